"""The decode kernel for Hopper (sm_90) over `plan.layouts.FP8_DS_MLA`, in Gluon.

As `hopper/decode.py`, of which it takes the stores, except:

- Both products are of fp16. A tile is read as pairs of e4m3 latents, which threads widen in
  registers, once along latents and once along tokens: fp16 holds each e4m3 value.
- The query is fp16 too: each row times a power of two, even latents apart from odd ones.
- A scale belongs to 128 latents of a token. Scores are four products, of 128 latents each, which
  are added with their scales. The output has four sets of P, one times each scale.
- P is relative to the largest P * scale of its row, so that it fits fp16 whatever the scales are.
  Below 2^-29 it loses bits: latents keep their precision up to a ratio of 2^26 between the scales
  of a token, or of tokens of like P.
- All threads copy the listed entries, 656 bytes in a row each, 16 bytes at a time. Slots are loaded
  a tile before they are needed, so that no copy waits for the slot that it follows.
"""

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.cards import SPARSE_FP8_ROWS
from mla_fusion.attention.hopper.common import TILE, Work, barrier, items_of, read_item
from mla_fusion.attention.hopper.decode import store_item
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LOG2E, Target, softmax_step
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch

GROUPS = gl.constexpr(4)  # of latents with a scale of their own
STAGES = gl.constexpr(2)  # tiles in shared memory: room for two CTAs on an SM
LARGEST_P = gl.constexpr(2.0**15)  # the largest one in fp16
VALUE = gl.constexpr(2.0**-15)

# A cache, three times over, and the slots of a sequence: `end` of them count. codes, ropes,
# scales: the address of the cache as e4m3, bf16 and fp32. block_units: 16 bytes each, from one
# block to the next.
ListedCache = namedtuple("ListedCache", "codes ropes scales block_units table end")

# Tiles in shared memory: STAGES of entries, and more of slots. keys: [STAGES, tokens, L]. ropes:
# [STAGES, tokens, R]. scales: [STAGES, tokens, GROUPS]. slots: [more than STAGES, tokens].
Ring = namedtuple("Ring", "keys ropes scales slots")

# Rows of a query in shared memory, each times a power of two. even, odd: [rows, L / 2], its even
# and odd latents. rope: [rows, R]. inverse: [rows], one over the power.
ScaledQuery = namedtuple("ScaledQuery", "even odd rope inverse")


@gluon.jit
def load_slots(entries, tile):
    """The slots of tile `tile` [tokens]; -1 from the end on."""
    at = tile * TILE + gl.arange(0, TILE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(entries.table + at, mask=at < entries.end, other=-1)


@gluon.jit
def copy_part(target, pointer, slots, block_stride, ENTRY: gl.constexpr, PAGE: gl.constexpr):
    """Start to copy the same columns of every entry of a tile; zeros for slot -1.

    pointer: these columns of the first entry. Strides are in elements.
    """
    layout: gl.constexpr = common.load_layout(
        target.shape[1], target.dtype, gl.num_warps(), target.shape[0]
    )
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    slot = slots.load(gl.SliceLayout(1, layout))
    wanted = slot >= 0
    slot = slot.to(gl.uint32)
    offset = (slot // PAGE).to(gl.int64) * block_stride + (slot % PAGE * ENTRY).to(gl.int64)
    common.async_load(target, pointer + offset[:, None] + col[None, :], mask=wanted[:, None])


@gluon.jit
def copy_entries(ring, entries, tile, ENTRY: gl.constexpr, PAGE: gl.constexpr):
    """Start the copy of tile `tile`, whose slots are there."""
    L: gl.constexpr = ring.keys.shape[2]
    buffer = tile % ring.keys.shape[0]
    slots = ring.slots.index(tile % ring.slots.shape[0])
    units = entries.block_units.to(gl.int64)
    copy_part(ring.keys.index(buffer), entries.codes, slots, units * 16, ENTRY, PAGE)
    scales = entries.scales + L // 4
    copy_part(ring.scales.index(buffer), scales, slots, units * 4, ENTRY // 4, PAGE)
    ropes = entries.ropes + (L + 4 * GROUPS) // 2
    copy_part(ring.ropes.index(buffer), ropes, slots, units * 8, ENTRY // 2, PAGE)
    async_copy.commit_group()


@gluon.jit
def load_query(query, q_ptr, work, item, heads, stride_h):
    """The rows of a token's query, times a power of two of each, into shared memory: their largest
    latent is below 2^15 and not below 2^14, so that fp16 holds all eight bits of a bf16 latent
    down to 2^-31 of it.
    """
    L: gl.constexpr = 2 * query.even.shape[1]
    ROWS: gl.constexpr = query.rope.shape[0]
    R: gl.constexpr = query.rope.shape[1]
    wide: gl.constexpr = common.load_layout(L, gl.bfloat16, gl.num_warps())
    narrow: gl.constexpr = common.load_layout(R, gl.bfloat16, gl.num_warps())
    row = work.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    col = gl.arange(0, L, gl.SliceLayout(0, wide))
    head = item.first_head + row
    pointers = q_ptr + (head * stride_h)[:, None] + col[None, :]
    value = gl.load(pointers, mask=(head < heads)[:, None], other=0.0).to(gl.float32)
    exponent = gl.max(gl.abs(value), 1).to(gl.int32, bitcast=True) >> 23
    # A row of smaller latents, or of zeros, keeps a power that rotated values stand.
    exponent = gl.maximum(exponent, 127 - 60)
    power = ((2 * 127 + 14 - exponent) << 23).to(gl.float32, bitcast=True)
    even, odd = gl.split((value * power[:, None]).reshape([ROWS, L // 2, 2]))
    query.even.store(even.to(gl.float16))
    query.odd.store(odd.to(gl.float16))
    query.inverse.store(((exponent - 14) << 23).to(gl.float32, bitcast=True))

    power = gl.convert_layout(power, gl.SliceLayout(1, narrow))
    row = work.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, narrow))
    col = L + gl.arange(0, R, gl.SliceLayout(0, narrow))
    head = item.first_head + row
    pointers = q_ptr + (head * stride_h)[:, None] + col[None, :]
    value = gl.load(pointers, mask=(head < heads)[:, None], other=0.0).to(gl.float32)
    query.rope.store((value * power[:, None]).to(gl.bfloat16))


@gluon.jit
def scales_of(scales, layout: gl.constexpr):
    """The scale of each token [tokens] for each of the four groups, in `layout`."""
    # A thread has both tokens of its scores: lanes 4 apart, and 8 tokens apart.
    read: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [64, 4],
    )  # fmt: skip
    even, odd = gl.split(scales.load(read).reshape([TILE, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    first, second = gl.convert_layout(first, layout), gl.convert_layout(second, layout)
    return first, second, gl.convert_layout(third, layout), gl.convert_layout(fourth, layout)


@gluon.jit
def product(view, query, zeros, GROUP: gl.constexpr):
    """Start the products [tokens, rows] of the latents of a group, without their scales."""
    PAIRS: gl.constexpr = view.shape[1] // GROUPS
    pairs = view.slice(GROUP * PAIRS, PAIRS, dim=1)
    even, odd = common.widen_pairs(pairs.load(gl.DotOperandLayout(0, zeros.type.layout, 2)))
    q_even = query.even.slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
    q_odd = query.odd.slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
    s = hopper.warpgroup_mma(even, q_even, zeros, use_acc=False, is_async=True)
    return hopper.warpgroup_mma(odd, q_odd, s, is_async=True)


@gluon.jit
def scores_of(view, rope, scale, query, score: gl.constexpr):
    """Products [tokens, rows] of a tile with the query. One group at a time: with the widened
    latents of two in flight, registers spill.
    """
    ROWS: gl.constexpr = query.rope.shape[0]
    zeros = gl.zeros([TILE, ROWS], gl.float32, score)
    q_rope = query.rope.permute((1, 0))
    rotated = hopper.warpgroup_mma(rope, q_rope, zeros, use_acc=False, is_async=True)
    a = product(view, query, zeros, 0)
    rotated, a = hopper.warpgroup_mma_wait(0, [rotated, a])
    s = rotated + a * scale[0][:, None]
    for group in gl.static_range(1, GROUPS):
        a = hopper.warpgroup_mma_wait(0, [product(view, query, zeros, group)])
        s += a * scale[group][:, None]
    return s


@gluon.jit
def bound_of(scale):
    """For each token an exponent [tokens] whose power of two no scale reaches, and its inverse.
    Added to the scores it makes P as large as the largest value that it multiplies, so that
    P * scale * inverse is at most 1 and fits fp16. l takes the inverse alone.
    """
    largest = gl.maximum(gl.maximum(scale[0], scale[1]), gl.maximum(scale[2], scale[3]))
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 126
    # Zeros have the scales of a token that is not listed, too: the inverse stays a small number.
    exponent = gl.minimum(gl.maximum(exponent, -60), 126)
    return exponent.to(gl.float32), ((127 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def add_group(acc, odd, decay, view, shared_p, GROUP: gl.constexpr):
    """Decay the sums [pairs, rows] of the latents of a group; start to add weighted values."""
    layout: gl.constexpr = acc.type.layout
    PAIRS: gl.constexpr = acc.shape[0]
    acc = acc * decay[None, :]
    odd = odd * decay[None, :]
    for j in gl.static_range(TILE // 32):
        pairs = view.slice(32 * j, 32).slice(GROUP * PAIRS, PAIRS, dim=1).permute((1, 0))
        low, high = common.widen_pairs(pairs.load(gl.DotOperandLayout(0, layout, 2)))
        part = shared_p.slice(32 * j, 32)
        acc = hopper.warpgroup_mma(low, part, acc, is_async=True)
        odd = hopper.warpgroup_mma(high, part, odd, is_async=True)
        # The products before these two are done, and give their registers back.
        acc, odd = hopper.warpgroup_mma_wait(2, [acc, odd])
    return acc, odd


@gluon.jit
def attend(
    ring, entries, query, shared_p, factor, tile, stop, score: gl.constexpr, form: gl.constexpr
):  # fmt: skip
    """The online softmax over tiles `tile` to `stop`, of which STAGES - 1 are on their way.

    factor: of the scores of each row, in base 2.

    Returns the sums [pairs of latents, rows] of each group, of even and of odd latents, m [rows],
    and l [tokens, rows].
    """
    ROWS: gl.constexpr = shared_p.shape[2]
    SLOTS: gl.constexpr = ring.slots.shape[0]
    token: gl.constexpr = gl.SliceLayout(1, score)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, score))
    l = gl.zeros([TILE, ROWS], gl.float32, score)
    zeros = gl.zeros([ring.keys.shape[2] // (2 * GROUPS), ROWS], gl.float32, score)
    accs = zeros, zeros, zeros, zeros
    odds = accs
    for t in range(tile, stop):
        async_copy.wait_group(STAGES - 2)
        # All copies of the tile have arrived, and no warp reads the buffer of the one before. The
        # first fence is also that of the query, which no product reads before.
        hopper.fence_async_shared()
        barrier()
        copy_entries(ring, entries, t + STAGES - 1, form.ENTRY, form.PAGE)
        later = load_slots(entries, t + STAGES)
        buffer = t % STAGES
        view = common.pairs_of(ring.keys.index(buffer))
        scale = scales_of(ring.scales.index(buffer), token)
        s = scores_of(view, ring.ropes.index(buffer), scale, query, score)
        seen = ring.slots.index(t % SLOTS).load(token) >= 0
        exponent, inverse = bound_of(scale)
        s = s * factor[None, :] + exponent[:, None]
        p, decay, m, _ = softmax_step(s, seen[:, None], 1.0, m, l)
        l = l * decay[None, :] + p * inverse[:, None]
        for i in gl.static_range(GROUPS):
            share = scale[i] * (inverse * LARGEST_P)
            shared_p.index(i).store((p * share[:, None]).to(gl.float16))
        hopper.fence_async_shared()
        # P of all warps is there.
        barrier()
        sums = ()
        for i in gl.static_range(GROUPS):
            sums += add_group(accs[i], odds[i], decay, view, shared_p.index(i), i)
        sums = hopper.warpgroup_mma_wait(0, sums)
        accs, odds = sums[0::2], sums[1::2]
        ring.slots.index((t + STAGES) % SLOTS).store(later)
    return accs, odds, m, l


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "block_units", "fresh"])
def mla_sparse_hopper_fp8(
    q_ptr, codes_ptr, ropes_ptr, scales_ptr, table_ptr, sink_ptr, out_ptr, lse_ptr, partial_ptr,
    partial_lse_ptr, work_indptr_ptr, work_info_ptr, scale, heads, q_stride_t, q_stride_h,
    out_stride_t, out_stride_h, table_stride, block_units, fresh, FORM: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Parameters and launch as `hopper.decode`, with the cache as `ListedCache` says and
    `table_ptr` of its slots. A work item is a token's query.
    """
    if fresh != 0:
        gdc.gdc_wait()
    L: gl.constexpr = FORM.L
    R: gl.constexpr = FORM.R
    codes: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = Ring(
        gl.allocate_shared_memory(codes_ptr.dtype.element_ty, [STAGES, TILE, L], codes),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, R], wide),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILE, GROUPS], plain),
        gl.allocate_shared_memory(gl.int32, [4, TILE], line),
    )
    query = ScaledQuery(
        gl.allocate_shared_memory(gl.float16, [ROWS, L // 2], wide),
        gl.allocate_shared_memory(gl.float16, [ROWS, L // 2], wide),
        gl.allocate_shared_memory(gl.bfloat16, [ROWS, R], wide),
        gl.allocate_shared_memory(gl.float32, [ROWS], line),
    )
    shared_p = gl.allocate_shared_memory(gl.float16, [GROUPS, TILE, ROWS], p_layout)
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    work = Work(
        work_indptr_ptr, work_info_ptr, table_ptr, table_stride,
        table_ptr, table_stride, gl.program_id(1) * ROWS,
    )  # fmt: skip
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, FORM)
        # All that follows may be written by the kernel in front.
        gdc.gdc_wait()
        entries = ListedCache(codes_ptr, ropes_ptr, scales_ptr, block_units, item.table, item.end)
        tile, stop = item.begin // TILE, (item.end + TILE - 1) // TILE
        # A graph's padding has items without query rows.
        stop = gl.where(item.count > 0, stop, tile)
        # No warp still reads the slots or entries of the item before.
        barrier()
        for i in gl.static_range(STAGES):
            slots = ring.slots.index((tile + i) % ring.slots.shape[0])
            slots.store(load_slots(entries, tile + i))
        barrier()
        for i in gl.static_range(STAGES - 1):
            copy_entries(ring, entries, tile + i, FORM.ENTRY, FORM.PAGE)
        of_token = q_ptr + item.token * q_stride_t
        load_query(query, of_token, work, item, heads, q_stride_h)
        factor = query.inverse.load(gl.SliceLayout(0, score)) * (scale * LOG2E)
        sums, odds, m, l = attend(ring, entries, query, shared_p, factor, tile, stop, score, FORM)
        async_copy.wait_group(0)
        # The reduction may be launched, and waits: see `hopper.decode`.
        if number == end - 1:
            gdc.gdc_launch_dependents()
        store_item(sums, odds, m, l, VALUE, work, item, target, sink_ptr, FORM, True)
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    cache = given.kv_cache
    arguments = {
        **launches.common(given),
        "codes_ptr": cache.view(given.plan.settings.kv_dtype),
        "ropes_ptr": cache.view(torch.bfloat16), "scales_ptr": cache.view(torch.float32),
        "block_units": cache.stride(0) // 16, "ROWS": SPARSE_FP8_ROWS,
    }  # fmt: skip
    options = {"num_warps": 4, "launch_pdl": True}
    return Launch(mla_sparse_hopper_fp8, launches.grid(given, SPARSE_FP8_ROWS), arguments, options)
