"""The decode kernel for Hopper (sm_90) over byte caches (`plan/layouts.py`): warp-specialized.

As `warp_specialized.py` with bf16, of which it takes the query, the softmax and the stores. Four
warps gather the listed entries and dequantize them, once for all query rows of a CTA
(`sparse_specialized_gather.py`). Two warpgroups multiply them. V4's entries have no rotated part
beside their latents.

Fewer than 64 query rows are padded: the products of 64 take less time than the gather.
"""

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import warp_specialized_bf16 as bf16
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper.common import TILE, Work, barrier, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.sparse_specialized_gather import Scopes, gather
from mla_fusion.attention.hopper.warp_specialized_common import ROWS, WARPS, new_barriers, turn_of
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LOG2E, Target
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch

# Tiles of keys in shared memory, and two barriers of each. keys: [n, tokens, L]. ropes: [n,
# tokens, R]; nothing reads it if R is 0. slots: [n, tokens], -1 for none. full: the gathering
# warps have stored a tile. free: both halves are used.
GatheredTiles = namedtuple("GatheredTiles", "keys ropes slots full free")


@gluon.jit
def scores_of(query, tiles, buffer, R: gl.constexpr, layout: gl.constexpr):
    """Products [rows, tokens] of the query with a tile, -inf where it has no token."""
    HALF: gl.constexpr = query.left.shape[1]
    PART: gl.constexpr = query.right.shape[2]
    keys = tiles.keys.index(buffer)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    left = keys.slice(0, HALF, dim=1).permute((1, 0))
    s = hopper.warpgroup_mma(query.left, left, s, use_acc=False, is_async=True)
    for part in gl.static_range(2):
        quarter = keys.slice(HALF + part * PART, PART, dim=1).permute((1, 0))
        s = hopper.warpgroup_mma(query.right.index(part), quarter, s, is_async=True)
    if R > 0:
        rotated = tiles.ropes.index(buffer).permute((1, 0))
        s = hopper.warpgroup_mma(query.ropes, rotated, s, is_async=True)
    s = hopper.warpgroup_mma_wait(0, [s])
    seen = tiles.slots.index(buffer).load(gl.SliceLayout(0, layout)) >= 0
    return gl.where(seen[None, :], s, float("-inf"))


@gluon.jit
def score(work, query, tiles, shared, target, sink_ptr, factor, form: gl.constexpr):
    """The first warpgroup: scores, softmax, and the left half of the output."""
    HALF: gl.constexpr = query.left.shape[1]
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    items, done, sent = 0, 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        count = tiles_of(work, item, form)[1]
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([ROWS, 4], gl.float32, ws.SUMS)
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        if count > 0:
            mbarrier.wait(query.full, items & 1)
            items += 1
            for _ in range(count):
                buffer, phase = turn_of(done, BUFFERS)
                mbarrier.wait(tiles.full.index(buffer), phase)
                s = scores_of(query, tiles, buffer, form.R, scores)
                s, base, new_m = ws.raised(s, factor, m)
                decay = gl.exp2(m - base)
                m = new_m
                left = tiles.keys.index(buffer).slice(0, HALF, dim=1)
                sums, l, p, others = bf16.multiply_left(
                    s, base, decay, factor, acc, l, left, shared, sent
                )
                sent += 1
                # P is in registers, and read until the products end.
                acc, p, others = hopper.warpgroup_mma_wait(0, [sums, p, others])
                mbarrier.arrive(tiles.free.index(buffer), count=1)
                done += 1
            mbarrier.arrive(query.free, count=1)
        # The kernel in front may still read what is written here.
        gdc.gdc_wait()
        sink = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        if form.SINK and item.partial < 0:
            _, head, real = ws.rows_of(work, item, target, ROWS, form.HEADS, row_layout)
            sink = gl.load(sink_ptr + head, mask=real, other=float("-inf")) * LOG2E
        lse, inverse = bf16.give_last(m, l, sink, shared, sent)
        sent += 1
        ws.store_lse(lse, work, item, target, form)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
        ws.store_part(acc, work, item, target, 0, form)


@gluon.jit
def multiply(work, tiles, shared, target, form: gl.constexpr):
    """The second warpgroup: the right half of the output."""
    HALF: gl.constexpr = tiles.keys.shape[2] // 2
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    done, received = 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        count = tiles_of(work, item, form)[1]
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        for _ in range(count):
            p, factors = bf16.take(shared, received, output)
            received += 1
            buffer, phase = turn_of(done, BUFFERS)
            # Complete already; waiting makes the tile visible here.
            mbarrier.wait(tiles.full.index(buffer), phase)
            right = tiles.keys.index(buffer).slice(HALF, HALF, dim=1)
            sums = hopper.warpgroup_mma(p, right, acc * factors, is_async=True)
            acc, p = hopper.warpgroup_mma_wait(0, [sums, p])
            mbarrier.arrive(tiles.free.index(buffer), count=1)
            done += 1
        _, inverse = bf16.take(shared, received, output)
        received += 1
        gdc.gdc_wait()
        ws.store_part(acc * inverse, work, item, target, HALF, form)


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(
    do_not_specialize=[
        "table_stride",
        "extra_table_stride",
        "block_units",
        "extra_block_units",
        "fresh",
    ]
)
def mla_sparse_hopper_ws(
    table_ptr, extra_table_ptr, first_lens_ptr, sink_ptr, kv_ptr, extra_ptr, out_ptr, lse_ptr,
    partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, scale, heads, out_stride_t,
    out_stride_h, table_stride, extra_table_stride, block_units, extra_block_units, q_halves,
    q_quarters, q_rotated, fresh, FORM: gl.constexpr,
):  # fmt: skip
    """`plan.launches` has the parameters, `Scopes` the caches; the others are `Boxes` of the query.
    It is launched as early as `hopper.decode`, which has `fresh` too.
    """
    if fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = gl.bfloat16
    BUFFERS: gl.constexpr = 2
    R: gl.constexpr = FORM.R
    HALF: gl.constexpr = q_halves.block_type.shape[2]
    PART: gl.constexpr = q_quarters.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, 2 * HALF], layout)
    q_left = gl.allocate_shared_memory(TYPE, [ROWS, HALF], layout)
    # Without a rotated part nothing reads these two.
    ropes, q_ropes = keys, q_left
    if R > 0:
        ropes = gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, R], layout)
        q_ropes = gl.allocate_shared_memory(TYPE, [ROWS, R], layout)
    tiles = GatheredTiles(
        keys, ropes, gl.allocate_shared_memory(gl.int32, [BUFFERS, TILE], line),
        new_barriers(BUFFERS), new_barriers(BUFFERS, 2),
    )  # fmt: skip
    # Scales of the units on their way: four fp32, or two integers of four exponents.
    scales = gl.allocate_shared_memory(gl.int32, [TILE, 2 if FORM.layout.behind else 4], plain)
    made = new_barriers(4)
    query = ws.Query(
        ws.Boxes(q_halves, q_quarters, q_rotated),
        q_left, gl.allocate_shared_memory(TYPE, [2, ROWS, PART], layout), q_ropes,
        made.index(2), made.index(3),
    )  # fmt: skip
    shared = ws.Probabilities(
        gl.allocate_shared_memory(TYPE, [ROWS, TILE], layout),
        gl.allocate_shared_memory(gl.float32, [ROWS], line),
        made.index(0), made.index(1),
    )  # fmt: skip
    work = Work(
        work_indptr_ptr, work_info_ptr, table_ptr, table_stride,
        extra_table_ptr, extra_table_stride, gl.program_id(1) * ROWS,
    )  # fmt: skip
    scopes = Scopes(kv_ptr, block_units, extra_ptr, extra_block_units, first_lens_ptr)
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    hopper.fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (score, (work, query, tiles, shared, target, sink_ptr, scale * LOG2E, FORM)),
            (multiply, (work, tiles, shared, target, FORM)),
            (gather, (work, query, tiles, scales, scopes, FORM)),
        ],
        [4, 4],
        [184, 104],
    )  # fmt: skip
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    assert given.sparse is not None, "its card takes no other decode"
    cache, extra = given.kv_cache, given.sparse.extra.kv_cache
    arguments = {
        **launches.common(given),
        **ws.query_boxes(given.q, given.widths[0], given.plan.layout.per_work),
        "kv_ptr": cache.view(torch.int32), "block_units": cache.stride(0) // 16,
        "extra_ptr": extra.view(torch.int32), "extra_block_units": extra.stride(0) // 16,
    }  # fmt: skip
    options = {"num_warps": WARPS.value, "launch_pdl": True}
    return Launch(mla_sparse_hopper_ws, launches.grid(given, ROWS.value), arguments, options)
