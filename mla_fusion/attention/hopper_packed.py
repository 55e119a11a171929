"""The decode kernel for Hopper (sm_90) over `layouts.FP8_DS_MLA`, in Gluon.

As `hopper_kernel.py`, of which it takes the plan's items and the stores: scores are keys [tokens,
L] times queries [L, rows], outputs values [L, tokens] times weights [tokens, rows]. What differs:

- Keys stay e4m3 for the scores, which are an fp8 product. A bf16 query row is the sum of two e4m3
  rows, times a power of two: the first has its upper four significant bits, the second the lower
  four. Both are columns of one product.
- A scale belongs to 128 latents of a token. Scores are four products, of 128 latents each, which
  are added with their scales. The output has four sets of weights: weight * scale.
- Values are widened to bf16 in registers. e4m3 bits moved to where bf16 has them are values times
  2^-120; weights carry 2^100 of that, the sums the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper_copy import barrier, load_layout
from mla_fusion.attention.hopper_gather import GROUPS, Entries, Ring, copy_entries, load_slots
from mla_fusion.attention.hopper_kernel import read_item, store_item
from mla_fusion.attention.hopper_tile import HIGH_BF16, LOW_BF16, pairs_of, softmax_step, widen
from mla_fusion.attention.triton_kernels import LOG2E

TOKENS = gl.constexpr(64)  # of a tile: the M of WGMMA
BLOCK = gl.constexpr(16)  # query rows whose two parts are neighbours
WEIGHT = gl.constexpr(2.0**100)
VALUE = gl.constexpr(2.0**20)


@gluon.jit
def split_query(
    q_keys, q_ropes, inverse, query, item, first_row, heads, stride_h, WARPS: gl.constexpr
):
    """The query as e4m3 [2 * rows, L], and its rotated part, times a power of two of each row.

    A row's largest latent then is 128 to 256, so that the two parts are its bf16 value, or within
    2^-18 of the largest one. inverse: [rows], one over that power.
    """
    L: gl.constexpr = q_keys.shape[1]
    wide: gl.constexpr = load_layout(L, 16, WARPS)
    narrow: gl.constexpr = load_layout(q_ropes.shape[1], 16, WARPS)
    for block in gl.static_range(q_ropes.shape[0] // BLOCK):
        row = first_row + block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, wide))
        col = gl.arange(0, L, gl.SliceLayout(0, wide))
        head = item.first_head + row
        pointers = query + (head * stride_h)[:, None] + col[None, :]
        value = gl.load(pointers, mask=(head < heads)[:, None], other=0.0).to(gl.float32)
        exponent = gl.max(gl.abs(value), 1).to(gl.int32, bitcast=True) >> 23
        # Beyond 2^-60 the inverse would not be a normal number.
        exponent = gl.maximum(exponent, 67)
        power = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
        value = value * power[:, None]
        high = value.to(gl.float8e4nv)
        low = (value - high.to(gl.float32)).to(gl.float8e4nv)
        q_keys.slice(2 * block * BLOCK, BLOCK).store(high)
        q_keys.slice(2 * block * BLOCK + BLOCK, BLOCK).store(low)
        inverse.slice(block * BLOCK, BLOCK).store(
            ((exponent - 7) << 23).to(gl.float32, bitcast=True)
        )

        power = gl.convert_layout(power, gl.SliceLayout(1, narrow))
        row = first_row + block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, narrow))
        col = L + gl.arange(0, q_ropes.shape[1], gl.SliceLayout(0, narrow))
        head = item.first_head + row
        pointers = query + (head * stride_h)[:, None] + col[None, :]
        value = gl.load(pointers, mask=(head < heads)[:, None], other=0.0).to(gl.float32)
        q_ropes.slice(block * BLOCK, BLOCK).store((value * power[:, None]).to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def scales_of(scales, layout: gl.constexpr):
    """The scale of each token [tokens] for each of the four groups, in `layout`."""
    # A thread has both tokens of its scores: lanes 4 apart, and 8 tokens apart.
    read: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] if layout.parent.warps_per_cta[1] == 1 else [[16, 0], [32, 0], [0, 0]],
        [], [64, 4],
    )  # fmt: skip
    even, odd = gl.split(scales.load(read).reshape([TOKENS, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, layout), gl.convert_layout(second, layout),
        gl.convert_layout(third, layout), gl.convert_layout(fourth, layout),
    )  # fmt: skip


@gluon.jit
def scores_of(key, rope, scale, q_keys, q_ropes, score: gl.constexpr, double: gl.constexpr):
    """Products [tokens, rows] of a tile with the query; `double`: the layout for twice the rows."""
    ROWS: gl.constexpr = q_ropes.shape[0]
    WIDTH: gl.constexpr = q_keys.shape[1] // GROUPS
    zeros = gl.zeros([TOKENS, 2 * ROWS], gl.float32, double)
    rotated = gl.zeros([TOKENS, ROWS], gl.float32, score)
    rotated = warpgroup_mma(rope, q_ropes.permute((1, 0)), rotated, use_acc=False, is_async=True)
    a = product(key, q_keys, zeros, 0, WIDTH)
    b = product(key, q_keys, zeros, 1, WIDTH)
    c = product(key, q_keys, zeros, 2, WIDTH)
    d = product(key, q_keys, zeros, 3, WIDTH)
    rotated, a, b, c, d = warpgroup_mma_wait(0, [rotated, a, b, c, d])
    s = a * of_tokens(scale[0], double) + b * of_tokens(scale[1], double)
    s += c * of_tokens(scale[2], double) + d * of_tokens(scale[3], double)
    parts = s.reshape([TOKENS, ROWS // BLOCK, 2, BLOCK]).permute((0, 1, 3, 2))
    high, low = gl.split(parts)
    return rotated + gl.convert_layout((high + low).reshape([TOKENS, ROWS]), score)


@gluon.jit
def of_tokens(scale, layout: gl.constexpr):
    """`scale` [tokens] as a column of a tensor in `layout`."""
    return gl.convert_layout(scale, gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def product(key, q_keys, zeros, GROUP: gl.constexpr, WIDTH: gl.constexpr):
    """Start the product of the latents of a group."""
    left = key.slice(GROUP * WIDTH, WIDTH, dim=1)
    right = q_keys.slice(GROUP * WIDTH, WIDTH, dim=1).permute((1, 0))
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def add_group(acc, odd, decay, view, weights, GROUP: gl.constexpr):
    """Decay the sums [pairs, rows] of the latents of a group; start to add weighted values."""
    layout: gl.constexpr = acc.type.layout
    PAIRS: gl.constexpr = acc.shape[0]
    acc = acc * decay[None, :]
    odd = odd * decay[None, :]
    for j in gl.static_range(TOKENS // 32):
        value = view.slice(32 * j, 32).slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
        value = value.load(gl.DotOperandLayout(0, layout, 2))
        part = weights.slice(32 * j, 32)
        acc = warpgroup_mma(widen(value, LOW_BF16, gl.bfloat16), part, acc, is_async=True)
        odd = warpgroup_mma(widen(value, HIGH_BF16, gl.bfloat16), part, odd, is_async=True)
    return acc, odd


@gluon.jit
def attend(
    ring, entries, q_keys, q_ropes, weights, factor, tile, stop, score: gl.constexpr,
    double: gl.constexpr, output: gl.constexpr, ENTRY: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The online softmax over tiles `tile` to `stop`, of which STAGES - 1 are on their way.

    factor: of the scores of each row, in base 2.

    Returns:
        (sums [pairs of latents, rows] of each group, those of odd latents, peak [rows], totals
        [tokens, rows]).
    """
    ROWS: gl.constexpr = q_ropes.shape[0]
    SLOTS: gl.constexpr = ring.slots.shape[0]
    token: gl.constexpr = gl.SliceLayout(1, score)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, score))
    total = gl.zeros([TOKENS, ROWS], gl.float32, score)
    acc0 = gl.zeros([ring.keys.shape[2] // (2 * GROUPS), ROWS], gl.float32, output)
    acc1, acc2, acc3 = acc0, acc0, acc0
    odd0, odd1, odd2, odd3 = acc0, acc0, acc0, acc0
    for t in range(tile, stop):
        async_copy.wait_group(STAGES - 2)
        # All copies of the tile have arrived, and no warp reads the buffer of the one before.
        fence_async_shared()
        barrier()
        copy_entries(ring, entries, t + STAGES - 1, ENTRY, PAGE, STAGES, WARPS)
        later = load_slots(entries, t + STAGES, TOKENS, WARPS)
        buffer = t % STAGES
        key = ring.keys.index(buffer)
        scale = scales_of(ring.scales.index(buffer), token)
        s = scores_of(key, ring.ropes.index(buffer), scale, q_keys, q_ropes, score, double)
        seen = ring.slots.index(t % SLOTS).load(token) >= 0
        p, decay, peak, total = softmax_step(s, seen[:, None], factor[None, :], peak, total)
        for i in gl.static_range(GROUPS):
            weights.index(i).store((p * (scale[i] * WEIGHT)[:, None]).to(gl.bfloat16))
        fence_async_shared()
        decay = gl.convert_layout(decay, gl.SliceLayout(0, output))
        # Weights of all warps are there.
        barrier()
        view = pairs_of(key)
        # Two groups in flight: values of one are widened beside the products of the other. With
        # four, registers spill.
        acc0, odd0 = add_group(acc0, odd0, decay, view, weights.index(0), 0)
        acc1, odd1 = add_group(acc1, odd1, decay, view, weights.index(1), 1)
        acc0, odd0, acc1, odd1 = warpgroup_mma_wait(0, [acc0, odd0, acc1, odd1])
        acc2, odd2 = add_group(acc2, odd2, decay, view, weights.index(2), 2)
        acc3, odd3 = add_group(acc3, odd3, decay, view, weights.index(3), 3)
        acc2, odd2, acc3, odd3 = warpgroup_mma_wait(0, [acc2, odd2, acc3, odd3])
        ring.slots.index((t + STAGES) % SLOTS).store(later)
    return (acc0, acc1, acc2, acc3), (odd0, odd1, odd2, odd3), peak, total


@gluon.jit
def allocate(
    TYPE: gl.constexpr, L: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):
    """Shared memory: tiles of entries, the query's parts, and four sets of weights of a tile."""
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    weight: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Ring(
        gl.allocate_shared_memory(TYPE, [STAGES, TOKENS, L], codes),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, R], wide),
        gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, GROUPS], plain),
        gl.allocate_shared_memory(gl.int32, [4 if STAGES < 4 else 8, TOKENS], line),
    )
    q_keys = gl.allocate_shared_memory(TYPE, [2 * ROWS, L], codes)
    q_ropes = gl.allocate_shared_memory(gl.bfloat16, [ROWS, R], wide)
    inverse = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    weights = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, TOKENS, ROWS], weight)
    return ring, q_keys, q_ropes, inverse, weights


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "block_units", "fresh"])
def decode_kernel(
    q_ptr, codes_ptr, ropes_ptr, scales_ptr, table_ptr, sink_ptr, out_ptr, lse_ptr,
    partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, qo_indptr_ptr, kv_indptr_ptr,
    scale, heads, q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride, block_units,
    fresh, ENTRY: gl.constexpr, PAGE: gl.constexpr, SINK: gl.constexpr, L: gl.constexpr,
    R: gl.constexpr, HEADS: gl.constexpr, FOLD: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, LSE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One worker (program 0) and one block of ROWS query rows (program 1), of one token each.

    Arguments as `hopper_kernel.decode_kernel`, with the cache as `hopper_gather.Entries` says and
    `table_ptr` of its slots. It is launched before the kernel in front has ended.
    """
    if fresh != 0:
        gdc.gdc_wait()
    ring, q_keys, q_ropes, inverse, weights = allocate(
        codes_ptr.dtype.element_ty, L, R, ROWS, STAGES
    )
    # Two groups of four warps share the tokens by rows.
    SPLIT: gl.constexpr = WARPS // 4
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, ROWS // SPLIT, 16])
    double: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, SPLIT], [16, 2 * ROWS // SPLIT, 32]
    )
    first_row = gl.program_id(1) * ROWS
    last_work = gl.load(work_indptr_ptr + gl.program_id(0) + 1) - 1
    for work in range(gl.load(work_indptr_ptr + gl.program_id(0)), last_work + 1):
        item = read_item(
            work_info_ptr + 8 * work, qo_indptr_ptr, kv_indptr_ptr, table_ptr, table_ptr,
            table_stride, table_stride, HEADS, FOLD,
        )  # fmt: skip
        # All that follows may be written by the kernel in front.
        gdc.gdc_wait()
        entries = Entries(codes_ptr, ropes_ptr, scales_ptr, block_units, item.table, item.end)
        tile, stop = item.begin // TOKENS, (item.end + TOKENS - 1) // TOKENS
        # A graph's padding has items without query rows.
        stop = gl.where(item.count > 0, stop, tile)
        # No warp still reads the slots or entries of the item before.
        barrier()
        for i in gl.static_range(STAGES):
            slots = ring.slots.index((tile + i) % ring.slots.shape[0])
            slots.store(load_slots(entries, tile + i, TOKENS, WARPS))
        barrier()
        for i in gl.static_range(STAGES - 1):
            copy_entries(ring, entries, tile + i, ENTRY, PAGE, STAGES, WARPS)
        query = q_ptr + item.token * q_stride_t
        split_query(q_keys, q_ropes, inverse, query, item, first_row, heads, q_stride_h, WARPS)
        factor = inverse.load(gl.SliceLayout(0, score)) * (scale * LOG2E)
        sums, odds, peak, total = attend(
            ring, entries, q_keys, q_ropes, weights, factor, tile, stop, score, double, score,
            ENTRY, PAGE, STAGES, WARPS,
        )  # fmt: skip
        async_copy.wait_group(0)
        # The reduction may be launched, and waits: see `hopper_kernel.decode_kernel`.
        if work == last_work:
            gdc.gdc_launch_dependents()
        store_item(
            sums, odds, peak, total, VALUE, item, first_row, heads, sink_ptr, out_ptr, lse_ptr,
            partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, L, HEADS, True, SINK, LSE,
        )  # fmt: skip
    # Idle programs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()
