"""The decode kernel for Hopper (sm_90), in Gluon: the layouts and copies are spelled out.

Why not the portable kernel alone: its pipeliner copies the next tile of keys only when the current
one has been used, where two tiles in flight are all that shared memory holds, and it cannot
read an fp8 tile as latent vectors across tokens without a trip through shared memory.

Scores are computed transposed, as keys [tokens, L] times queries [L, rows], and so is the output,
as values [L, tokens] times weights [tokens, rows]. The 64 rows that a warpgroup product has at
least are then tokens and latents, which there are enough of, and not the 16 heads of a rank.
Keys and values are one tile in shared memory, read once for each product. While a tile is used
`hopper_copy.py` copies the next one.

An fp8 tile is read a second time as pairs: the two bytes of a 16-bit element are two latents of one
token. `low` and `high` make fp16 of either byte, exactly but for a factor of 2^-8, by moving the
sign, and exponent and mantissa, to where fp16 has them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper_copy import slots_of, start_copy
from mla_fusion.attention.triton_kernels import LN2, LOG2E

# Triton 3.9 renamed both.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def low(pairs):
    """Low bytes of int16 `pairs` as fp16, times 2^-8; two elements at a time. A NaN becomes 480."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 sign, rest;
        shl.b32 sign, $1, 8;
        shl.b32 rest, $1, 7;
        and.b32 sign, sign, 0x80008000;
        lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
        }""",
        "=r,r",
        [pairs],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def high(pairs):
    """High bytes of int16 `pairs`, as `low`."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 sign, rest;
        shr.u32 rest, $1, 1;
        and.b32 sign, $1, 0x80008000;
        lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
        }""",
        "=r,r",
        [pairs],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_query(
    target, source, row, first_head, heads, count, stride_t, stride_h,
    layout: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Rows of the query [rows, width] into shared memory; zeros for rows that are none."""
    rows = row + gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    cols = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    head = first_head + rows % HEADS
    pointers = source + (rows // HEADS).to(gl.int64) * stride_t + head * stride_h
    wanted = (rows // HEADS < count) & (head < heads)
    target.store(gl.load(pointers[:, None] + cols[None, :], mask=wanted[:, None], other=0.0))


@gluon.jit
def store_output(pointers, acc, odd, wanted, PAIRS: gl.constexpr, layout: gl.constexpr):
    """acc [width, rows] to the columns behind `pointers` [rows]; with PAIRS `odd` between them."""
    TYPE: gl.constexpr = pointers.dtype.element_ty
    col = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    if PAIRS:
        # Two neighbours go out in one store: alone each would fill half of a memory sector.
        BITS: gl.constexpr = TYPE.primitive_bitwidth
        part: gl.constexpr = gl.int32 if BITS == 32 else gl.int16
        pair: gl.constexpr = gl.int64 if BITS == 32 else gl.int32
        low_part = acc.to(TYPE).to(part, bitcast=True).to(pair) & ((1 << BITS) - 1)
        high_part = odd.to(TYPE).to(part, bitcast=True).to(pair) << BITS
        target = pointers.to(gl.pointer_type(pair), bitcast=True)
        gl.store(target[None, :] + col[:, None], low_part | high_part, mask=wanted[None, :])
    else:
        gl.store(pointers[None, :] + col[:, None], acc.to(TYPE), mask=wanted[None, :])


# A table of one column, in the warm-up, must not compile another variant than the requests'.
@gluon.jit(do_not_specialize=["table_stride", "extra_table_stride", "fresh"])
def decode_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    extra_ptr,
    extra_table_ptr,
    first_lens_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    partial_lse_ptr,
    work_indptr_ptr,
    work_info_ptr,
    qo_indptr_ptr,
    kv_indptr_ptr,
    q_scale_ptr,
    kv_scale_ptr,
    scale,
    heads,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    table_stride,
    block_stride,
    extra_table_stride,
    extra_block_stride,
    latents,
    rotated,
    block_rows,
    fresh,
    ENTRY: gl.constexpr,
    PAGE: gl.constexpr,
    EXTRA_ENTRY: gl.constexpr,
    EXTRA_PAGE: gl.constexpr,
    FIRST: gl.constexpr,
    SPARSE: gl.constexpr,
    SINK: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    HEADS: gl.constexpr,
    FOLD: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LSE: gl.constexpr,
    BULK: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Arguments as `triton_kernels.decode_kernel`, and those of `hopper_copy.bulk_copy`.

    BULK: the copy engine takes whole tiles. PDL: launched before the kernel in front has ended,
    and waits for it before it reads anything but the plan; with `fresh` not 0 it waits at once, for
    then the kernel in front may be writing the plan.
    """
    if PDL and fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = kv_ptr.dtype.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    FP8: gl.constexpr = BITS == 8
    P_TYPE: gl.constexpr = gl.float16 if FP8 else TYPE
    VEC: gl.constexpr = 128 // BITS
    # More warps than a tile has 16 tokens for share them by rows.
    SPLIT: gl.constexpr = WARPS * 16 // BLOCK_N
    score: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // SPLIT, SPLIT], [16, ROWS // SPLIT, 256 // BITS]
    )
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, score)
    by_token: gl.constexpr = gl.SliceLayout(1, score)
    out_row: gl.constexpr = gl.SliceLayout(0, output)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(R * BITS // 8, BITS, 2)
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weight: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    load_wide: gl.constexpr = gl.BlockedLayout([1, VEC], [1, 32], [WARPS, 1], [1, 0])
    load_narrow: gl.constexpr = gl.BlockedLayout(
        [1, VEC], [32 * VEC // R, R // VEC], [WARPS, 1], [1, 0]
    )

    keys = gl.allocate_shared_memory(TYPE, [2, BLOCK_N, L], wide)
    ropes = gl.allocate_shared_memory(TYPE, [2, BLOCK_N, R], narrow)
    q_keys = gl.allocate_shared_memory(TYPE, [ROWS, L], wide)
    q_ropes = gl.allocate_shared_memory(TYPE, [ROWS, R], narrow)
    weights = gl.allocate_shared_memory(P_TYPE, [BLOCK_N, ROWS], weight)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if BULK:
        mbarrier.init(arrived.index(0), count=1)
        mbarrier.init(arrived.index(1), count=1)
        fence_async_shared()
        barrier()
    # For each buffer a bit: which phase of its barrier the next tile of the copy engine completes.
    phases = 0

    first_row = gl.program_id(1) * ROWS
    row = first_row + gl.arange(0, ROWS, by_row)

    last_work = gl.load(work_indptr_ptr + gl.program_id(0) + 1) - 1
    for work in range(gl.load(work_indptr_ptr + gl.program_id(0)), last_work + 1):
        info = work_info_ptr + 8 * work
        tile_index = gl.load(info)
        partial = gl.load(info + 1)
        count = gl.load(info + 3) - gl.load(info + 2)
        kv_start = gl.load(info + 4)
        kv_end = gl.load(info + 5)
        kv_offset = gl.load(info + 6)
        sequence = tile_index // FOLD
        first_head = tile_index % FOLD * HEADS
        token = gl.load(qo_indptr_ptr + sequence).to(gl.int64)
        kv_base = gl.load(kv_indptr_ptr + sequence)
        table = table_ptr + sequence.to(gl.int64) * table_stride
        extra_table = extra_table_ptr + sequence.to(gl.int64) * extra_table_stride
        begin = kv_start - kv_base
        end = kv_end - kv_base
        if PDL:
            # All that follows, scales too, may be what the kernel in front writes.
            gdc.gdc_wait()
        factor = scale * LOG2E
        value_scale = 1.0
        if FP8:
            kv_scale = gl.load(kv_scale_ptr)
            factor *= gl.load(q_scale_ptr) * kv_scale
            value_scale = 256.0 * kv_scale
        first_end = end
        if SPARSE:
            first_end = gl.minimum(end, gl.load(first_lens_ptr + sequence))
        tile = begin // BLOCK_N
        # Row blocks behind the query rows of this sequence have nothing to do.
        stop = gl.where(first_row < HEADS * count, (end + BLOCK_N - 1) // BLOCK_N, tile)

        # A copy that nobody waits for would put its barrier a phase ahead.
        if tile < stop:
            start_copy(
                keys.index(0), ropes.index(0), arrived.index(0), kv_ptr, table, latents, rotated,
                block_rows, extra_ptr, extra_table, tile, end, first_end, block_stride,
                extra_block_stride, ENTRY, PAGE, EXTRA_ENTRY, EXTRA_PAGE, FIRST, SPARSE, BULK,
                WARPS,
            )  # fmt: skip
        source = q_ptr + token * q_stride_t
        load_query(
            q_keys, source, first_row, first_head, heads, count, q_stride_t, q_stride_h,
            load_wide, HEADS,
        )  # fmt: skip
        load_query(
            q_ropes, source + L, first_row, first_head, heads, count, q_stride_t, q_stride_h,
            load_narrow, HEADS,
        )  # fmt: skip
        fence_async_shared()

        # Row i of n sees tokens up to n - 1 - i before the end of the sequence.
        limit = gl.minimum(end, end + kv_offset - (count - 1 - row // HEADS))
        peak = gl.full([ROWS], float("-inf"), gl.float32, by_row)
        total = gl.zeros([BLOCK_N, ROWS], gl.float32, score)
        acc = gl.zeros([L // 2 if FP8 else L, ROWS], gl.float32, output)
        odd = acc
        current = 0
        for t in range(tile, stop):
            if BULK:
                # No warp reads the other buffer any more.
                barrier()
            else:
                async_copy.wait_group(0)
            # Behind the last tile this copies nothing.
            start_copy(
                keys.index(1 - current), ropes.index(1 - current), arrived.index(1 - current),
                kv_ptr, table, latents, rotated, block_rows, extra_ptr, extra_table, t + 1, end,
                first_end, block_stride, extra_block_stride, ENTRY, PAGE, EXTRA_ENTRY, EXTRA_PAGE,
                FIRST, SPARSE, BULK, WARPS,
            )  # fmt: skip
            if BULK:
                if t * BLOCK_N + BLOCK_N <= end:
                    mbarrier.wait(arrived.index(current), phases >> current & 1)
                    phases ^= 1 << current
                else:
                    async_copy.wait_group(0)
                    fence_async_shared()
                    barrier()
            else:
                fence_async_shared()
            key = keys.index(current)
            s = gl.zeros([BLOCK_N, ROWS], gl.float32, score)
            s = warpgroup_mma(key, q_keys.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma(ropes.index(current), q_ropes.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, [s])

            at = t * BLOCK_N + gl.arange(0, BLOCK_N, by_token)
            seen = (at >= begin)[:, None] & (at[:, None] < limit[None, :])
            if SPARSE:
                valid = slots_of(at, table, extra_table, first_end, end, t, FIRST) >= 0
                seen &= valid[:, None]
            s = gl.where(seen, s * factor, float("-inf"))
            new_peak = gl.maximum(peak, gl.max(s, 0))
            # A row that has seen nothing keeps weights of zero, not NaN.
            base = gl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = gl.exp2(s - base[None, :])
            decay = gl.exp2(peak - base)
            total = total * decay[None, :] + p
            peak = new_peak
            weights.store(p.to(P_TYPE))
            fence_async_shared()
            decay = gl.convert_layout(decay, out_row)
            acc = acc * decay[None, :]
            if FP8:
                odd = odd * decay[None, :]
                if RENAMED:
                    view = key.reinterpret(gl.int16, [BLOCK_N, L // 2], pairs)
                else:
                    view = key._reinterpret(gl.int16, [BLOCK_N, L // 2], pairs)
                for j in gl.static_range(BLOCK_N // 32):
                    value = view.slice(32 * j, 32).permute((1, 0))
                    value = value.load(gl.DotOperandLayout(0, output, 2))
                    weight_part = weights.slice(32 * j, 32)
                    acc = warpgroup_mma(low(value), weight_part, acc, is_async=True)
                    odd = warpgroup_mma(high(value), weight_part, odd, is_async=True)
                    acc, odd = warpgroup_mma_wait(0, [acc, odd])
            else:
                acc = warpgroup_mma(key.permute((1, 0)), weights, acc, is_async=True)
                acc = warpgroup_mma_wait(0, [acc])
            current = 1 - current
        async_copy.wait_group(0)
        # The zeros behind the last tile, before the copy engine writes there.
        fence_async_shared()
        # The reduction may be launched, and waits. Not yet where it has many rows: its programs
        # would all go where a multiprocessor is free, to the few that are done first.
        if PDL and ROWS <= 32:  # noqa: SIM102 (known when compiled; the other one is not)
            if work == last_work:
                gdc.gdc_launch_dependents()

        total = gl.sum(total, 0)
        lse = gl.where(total > 0.0, (peak + gl.log2(total)) * LN2, float("-inf"))
        rows = first_row + gl.arange(0, ROWS, out_row)
        head = first_head + rows % HEADS
        real = (rows // HEADS < count) & (head < heads)
        lse = gl.convert_layout(lse, out_row)
        divisor = gl.convert_layout(total, out_row)
        if SINK:  # noqa: SIM102 (known when compiled; the other one is not)
            if partial < 0:
                sink = gl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
                divisor += gl.exp2(sink - gl.convert_layout(peak, out_row))
        inverse = gl.where(lse > float("-inf"), value_scale / divisor, 0.0)
        acc = acc * inverse[None, :]
        odd = odd * inverse[None, :]
        if partial < 0:
            at_token = token + rows // HEADS
            final = out_ptr + at_token * out_stride_t + head * out_stride_h
            store_output(final, acc, odd, real, FP8, output)
            if LSE:
                gl.store(lse_ptr + at_token * heads + head, lse, mask=real)
        else:
            at_partial = (partial.to(gl.int64) * HEADS) + rows
            store_output(partial_ptr + at_partial * L, acc, odd, real, FP8, output)
            gl.store(partial_lse_ptr + at_partial, lse, mask=real)
    if PDL:
        # Programs without work too: who waits for this grid counts on all that was before it.
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
