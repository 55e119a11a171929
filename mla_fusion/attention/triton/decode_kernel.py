"""The portable decode kernel, in Triton.

A CTA walks over its work items, and in each over tiles of BLOCK_N tokens of one sequence, with an
online softmax in base 2 and fp32 sums. Tiles start at multiples of BLOCK_N of the sequence: a tile
lies in one page where pages are multiples of tiles. Scores and output are transposed, tokens by
rows and latents by rows, as `hopper/decode.py` says. A range of Triton's is a power of two long:
L_PAD and R_PAD are those of L and R, and `within` masks what lies beyond.
"""

import torch
import triton
import triton.language as tl

from mla_fusion import gpu
from mla_fusion.attention.cards import portable_rows
from mla_fusion.attention.plan import device_code, launches
from mla_fusion.attention.plan.device_code import LN2, LOG2E, Source, read_item, within
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.kernels.launches import Launch


@triton.jit
def listed_entries(at, wanted, source, ENTRY: tl.constexpr, PAGE: tl.constexpr, form: tl.constexpr):
    """Addresses of the slots that the table lists for tokens `at`, a mask of the valid ones, and
    the addresses of their scales, if these are behind the page's entries."""
    slot = tl.load(source.table + at, mask=wanted, other=-1)
    wanted &= slot >= 0
    slot = tl.where(wanted, slot, 0)
    page = source.pointer + (slot // PAGE).to(tl.int64) * source.block_stride
    entry = page + slot % PAGE * ENTRY
    exponents = entry
    if form.layout is not None:  # noqa: SIM102 (without a layout the other one is not compiled)
        if form.layout.behind:
            exponents = page + PAGE * ENTRY + slot % PAGE * 8
    return entry, wanted, exponents


@triton.jit
def tile_entries(
    tile, at, item, source, extra, first_lens_ptr, form: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Addresses of tokens `at` of a tile, and a mask and more as `listed_entries` has them."""
    wanted = (at >= item.begin) & (at < item.end)
    if form.SPARSE:
        if tile * BLOCK_N < form.FIRST:
            wanted &= at < tl.load(first_lens_ptr + item.sequence)
            entry, wanted, exponents = listed_entries(
                at, wanted, source, form.ENTRY, form.PAGE, form
            )
        else:
            entry, wanted, exponents = listed_entries(
                at - form.FIRST, wanted, extra, form.EXTRA_ENTRY, form.EXTRA_PAGE, form
            )
    else:
        if form.PAGE % BLOCK_N == 0:
            block = tl.load(source.table + tile * BLOCK_N // form.PAGE)
        else:
            block = tl.load(source.table + at // form.PAGE, mask=wanted, other=0)
        page = source.pointer + block.to(tl.int64) * source.block_stride
        entry = page + at % form.PAGE * form.ENTRY
        exponents = entry
    return entry, wanted, exponents


@triton.jit
def read_latents(entry, exponents, wanted, form: tl.constexpr, BLOCK_N: tl.constexpr):
    """Latents [tokens, L] of a tile, value * scale in fp32, rounded to bf16; zeros if not `wanted`.
    A code of 0 or 255 at `exponents` is written by nobody, and read as zero or infinity."""
    CODES: tl.constexpr = form.layout.quantized
    GROUP: tl.constexpr = form.layout.group
    L: tl.constexpr = form.L
    group, column = tl.arange(0, L // GROUP), tl.arange(0, L)[None, :]
    wanted = wanted[:, None]
    of_group = wanted & (group < CODES // GROUP)[None, :]
    if form.layout.behind:
        source = exponents.to(tl.pointer_type(tl.uint8), bitcast=True)
        code = tl.load(source[:, None] + group[None, :], mask=of_group, other=0)
        scales = (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        source = (entry + CODES).to(tl.pointer_type(tl.float32), bitcast=True)
        source = tl.multiple_of(source[:, None], (16, 16))
        scales = tl.load(source + group[None, :], mask=of_group, other=0.0)
    scales = tl.broadcast_to(scales[:, :, None], [BLOCK_N, L // GROUP, GROUP])
    # Triton 3.6 has lost the alignment of an entry by here, and would load single bytes.
    aligned = tl.multiple_of(entry[:, None], (16, 16))
    codes = tl.load(aligned + column, mask=wanted & (column < CODES), other=0.0)
    latents = (codes.to(tl.float32) * tl.reshape(scales, [BLOCK_N, L])).to(tl.bfloat16)
    if CODES < L:
        wide = (entry + CODES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        wide = tl.multiple_of(wide[:, None], (16, 16)) + (column - CODES)
        wide = tl.load(wide, mask=wanted & (column >= CODES), other=0.0)
        latents = tl.where(column < CODES, latents, wide)
    return latents


@triton.jit
def read_rotated(entry, wanted, form: tl.constexpr):
    """The R bf16 values [tokens, R] behind values and fp32 scales; zeros if not `wanted`."""
    CODES: tl.constexpr = form.layout.quantized
    # Triton 3.6 forgets what it knows of an address where its type changes.
    source = entry + CODES + CODES // form.layout.group * 4
    source = source.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    source = tl.multiple_of(source[:, None], (16, 16))
    return tl.load(source + tl.arange(0, form.R)[None, :], mask=wanted[:, None], other=0.0)


@triton.jit
def store_item(
    acc, m, l, value_scale, item, row, target, sink_ptr, form: tl.constexpr, L_PAD: tl.constexpr
):  # fmt: skip
    """Normalize the sums and write them: to the output, or to partial rows for a split."""
    latent = tl.arange(0, L_PAD)
    head, real, partial = item.head, item.real, item.partial
    divisor = tl.sum(l, 0)
    lse = tl.where(divisor == 0.0, float("-inf"), (m + tl.log2(divisor)) * LN2)
    if form.SINK:  # noqa: SIM102 (known when compiled; the other one is not)
        if partial < 0:
            divisor += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E - m)
    output = acc * tl.where(lse > float("-inf"), value_scale / divisor, 0.0)[None, :]
    wanted = within(real[None, :], latent[:, None], form.L, L_PAD)
    if partial < 0:
        final = target.out + item.token * target.stride_t + head * target.stride_h
        final = final[None, :] + latent[:, None]
        tl.store(final, output.to(target.out.dtype.element_ty), mask=wanted)
        if form.LSE:
            tl.store(target.lse + item.token * target.heads + head, lse, mask=real)
    else:
        at_partial = partial.to(tl.int64) * form.HEADS + row
        rows = target.partial + at_partial * form.L
        tl.store(rows[None, :] + latent[:, None], output, mask=wanted)
        tl.store(target.partial_lse + at_partial, lse, mask=real)


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@triton.jit(do_not_specialize=["table_stride", "extra_table_stride"])
def mla_decode_triton(
    q_ptr, kv_ptr, table_ptr, extra_ptr, extra_table_ptr, first_lens_ptr, sink_ptr, out_ptr,
    lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, qo_indptr_ptr,
    kv_indptr_ptr, q_scale_ptr, kv_scale_ptr, scale, heads, q_stride_t, q_stride_h, out_stride_t,
    out_stride_h, table_stride, block_stride, extra_table_stride, extra_block_stride,
    FORM: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One CTA (program_id 0) and one block of ROWS query rows (program_id 1).

    `plan.launches` has the parameters. A query row is position * HEADS + head. L_PAD, R_PAD: powers
    of two. DOT: the type of both products. R is 0 where the rotated values are latents."""
    L: tl.constexpr = FORM.L
    R: tl.constexpr = FORM.R
    scale *= LOG2E
    value_scale = 1.0
    if q_ptr.dtype.element_ty.primitive_bitwidth == 8:
        scale *= tl.load(q_scale_ptr)
    if kv_ptr.dtype.element_ty.primitive_bitwidth == 8 and FORM.layout is None:
        value_scale = tl.load(kv_scale_ptr)
        scale *= value_scale
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    latent = tl.arange(0, L_PAD)
    rope = L + tl.arange(0, R_PAD)
    target = device_code.Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    for work in range(
        tl.load(work_indptr_ptr + tl.program_id(0)), tl.load(work_indptr_ptr + tl.program_id(0) + 1)
    ):
        info = work_info_ptr + 8 * work
        item = read_item(info, qo_indptr_ptr, kv_indptr_ptr, row, heads, FORM.HEADS, FORM.FOLD)
        sequence = item.sequence.to(tl.int64)
        source = Source(kv_ptr, table_ptr + sequence * table_stride, block_stride)
        extra_table = extra_table_ptr + sequence * extra_table_stride
        extra = Source(extra_ptr, extra_table, extra_block_stride)
        # Row blocks after the query rows of this sequence have nothing to do.
        has_rows = first_row < FORM.HEADS * item.count
        stop = tl.where(has_rows, tl.cdiv(item.end, BLOCK_N), item.begin // BLOCK_N)

        query = q_ptr + item.token * q_stride_t + item.head * q_stride_h
        real = item.real[None, :]
        is_latent = within(real, latent[:, None], L, L_PAD)
        is_rope = within(real, rope[:, None], L + R, L + R_PAD)
        q_latent = tl.load(query[None, :] + latent[:, None], mask=is_latent, other=0.0)
        q_rope = tl.load(query[None, :] + rope[:, None], mask=is_rope, other=0.0)
        q_latent, q_rope = q_latent.to(DOT), q_rope.to(DOT)
        # Row i of n sees tokens up to n - 1 - i before the end of the sequence.
        limit = tl.minimum(item.end, item.end + item.after - (item.count - 1 - row // FORM.HEADS))
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_N, ROWS], tl.float32)
        acc = tl.zeros([L_PAD, ROWS], tl.float32)
        for tile in tl.range(item.begin // BLOCK_N, stop):
            at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            entry, wanted, exponents = tile_entries(
                tile, at, item, source, extra, first_lens_ptr, FORM, BLOCK_N
            )
            if FORM.layout is not None:
                s = tl.zeros([BLOCK_N, ROWS], tl.float32)
                if R > 0:
                    s = tl.dot(read_rotated(entry, wanted, FORM), q_rope, s)
                key = read_latents(entry, exponents, wanted, FORM, BLOCK_N)
                s = tl.dot(key, q_latent, s)
            else:
                of_key = within(wanted[:, None], latent[None, :], L, L_PAD)
                of_rope = within(wanted[:, None], rope[None, :], L + R, L + R_PAD)
                key = tl.load(entry[:, None] + latent[None, :], mask=of_key, other=0.0)
                key_rope = tl.load(entry[:, None] + rope[None, :], mask=of_rope, other=0.0)
                key = key.to(DOT)
                s = tl.dot(key, q_latent)
                s = tl.dot(key_rope.to(DOT), q_rope, s)
            seen = wanted[:, None] & (at[:, None] < limit[None, :])
            p, decay, m, l = device_code.softmax_step(s, seen, scale, m, l)
            acc = tl.dot(tl.trans(key), p.to(DOT), acc * decay[None, :])
        store_item(acc, m, l, value_scale, item, row, target, sink_ptr, FORM, L_PAD)


def tile(rows: int, latent: int, rope: int, of_bytes: bool, is_amd: bool) -> tuple[int, int]:
    """Query rows of a CTA for work items of `rows`, and its warps: the largest that compile for
    gfx942, gfx950 and sm_90 without spilling registers in the loop over tiles; fp8 latents above
    512 do on sm_90, whatever the tile. of_bytes: the scales of such a cache take registers too: 32
    query rows spill to memory on gfx942 and gfx950, 4 warps on sm_90."""
    warp = 64 if is_amd else 32
    if of_bytes:
        return (16, 4) if warp == 64 else (min(rows, 32), 8)
    size = portable_rows(rows, next_power_of_two(latent) + next_power_of_two(rope))
    return size, 4 if size == 16 and latent <= 512 else 256 // warp


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    latent, rope = given.widths
    is_amd = gpu.of(given.q.device).vendor == "AMD"
    rows, warps = tile(given.rows, latent, rope, given.layout is not None, is_amd)
    half = torch.float16 in (given.q.dtype, given.kv_cache.dtype)
    arguments = {
        **launches.common(given), **launches.caches(given),
        "L_PAD": next_power_of_two(latent), "R_PAD": next_power_of_two(rope), "ROWS": rows,
        "BLOCK_N": 16, "DOT": tl.float16 if half else tl.bfloat16,
    }  # fmt: skip
    options = {"num_warps": warps, "num_stages": 1}
    return Launch(mla_decode_triton, launches.grid(given, rows), arguments, options)
