"""A decode kernel for Hopper (sm_90) with 64 query rows, whose warps have different work.

In `hopper/decode.py` eight warps compute scores, P and output in step, and the tensor cores idle
during the softmax. Here one warpgroup computes the scores of a tile, the softmax and the left half
of the output, the other one only the right half, and a single warp asks the tensor copy engine
(TMA) for the tiles. Products of the right half run beside those of the left half, and end last. So
that half is freed, copied and scored in two quarters of the latents, last of all.

Scores are [rows, tokens]: 64 rows fill the M of WGMMA, and a row of scores lies in four threads.
These registers, P, are the left operand of the left half's products. For the other
warpgroup P and factors go through shared memory, behind the start of those products.
Barriers (mbarrier), all completed by one arrival:

| barrier | completed by | waited for by |
|---|---|---|
| query.full: the query's rows of an item are there | TMA | the scores |
| query.free: they were used | the scores | the copying warp |
| left_full: left half and rotated part of a tile have arrived | TMA | who reads |
| right_full: so has a quarter of the right | TMA | who reads |
| left_free: the left half's products have ended | the scores | the copying warp |
| right_free: a quarter's products have ended | the right half | the copying warp |
| shared.full: P of a tile, or the last factor, is there | the scores | the right half |
| shared.free: it was loaded | the right half | the scores |
| scored: all products of a tile's scores are issued | the scores | the right half |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.copy import barrier
from mla_fusion.attention.hopper.fits import warp_specialized as fits
from mla_fusion.attention.hopper.warp_specialized_copy import (
    ROWS,
    TILE,
    WARPS,
    Boxes,
    Probabilities,
    Query,
    Target,
    Tiles,
    Work,
    cache_boxes,
    clear_rows,
    copy,
    item_of,
    query_boxes,
    store_lse,
    store_part,
    tiles_of,
    turn_of,
)
from mla_fusion.attention.hopper.warp_specialized_fp8 import multiply as multiply_fp8
from mla_fusion.attention.hopper.warp_specialized_fp8 import score as score_fp8
from mla_fusion.attention.hopper.warp_specialized_scores import (
    add_left,
    add_quarters,
    decayed,
    last_visible,
    p_of,
    result_of,
    see,
    start_rotated,
    start_state,
    sums_of,
    two_halves,
)
from mla_fusion.attention.plan.device_code import LOG2E

if TYPE_CHECKING:
    from mla_fusion.attention.plan.inputs import Inputs, Launch

__all__ = ["arguments", "fits", "kernel"]

# m is a row's maximum: with slack the kernel was slower, as its sums are rescaled all the same.
EXACT = gl.constexpr(0)


@gluon.jit
def give(shared, first, others, factors, sent):
    """Give P of a tile, of its first and its other tokens, and the factors to the other
    warpgroup, as number `sent`.

    It loads them, so no fence stands between these stores and a product.
    """
    HALF: gl.constexpr = TILE // 2
    mbarrier.wait(shared.free, (sent & 1) ^ 1)
    shared.p.slice(0, HALF, dim=1).store(first)
    shared.p.slice(HALF, HALF, dim=1).store(others)
    shared.factors.store(factors)
    barrier()
    mbarrier.arrive(shared.full, count=1)


@gluon.jit
def multiply_left(s, base, decay, factor, acc, l, left, shared, sent):
    """Compute P of a tile, start to add its left half to the output, and give P: new sums of both,
    and the two operands that the products read.

    Products read P from the registers where they were computed: no store, fence or
    barrier is in front of them. Those of the first 32 tokens run under the softmax of the others.
    """
    HALF: gl.constexpr = TILE // 2
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    TYPE: gl.constexpr = left.dtype
    first, others = two_halves(s, part)
    p = p_of(first, base, factor)
    l = decayed(l, decay) + sums_of(p)
    first = p.to(TYPE)
    first_p = gl.convert_layout(first, operand)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    acc = warpgroup_mma(first_p, left.slice(0, HALF), acc, is_async=True)
    p = p_of(others, base, factor)
    l += sums_of(p)
    others = p.to(TYPE)
    other_p = gl.convert_layout(others, operand)
    acc = warpgroup_mma(other_p, left.slice(HALF, HALF), acc, is_async=True)
    give(shared, first, others, decay, sent)
    return acc, l, first_p, other_p


@gluon.jit
def score(
    work, query, tiles, shared, scored, target, factor, HEADS: gl.constexpr, FOLD: gl.constexpr,
    LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, softmax, and the left half of the output."""
    HALF: gl.constexpr = tiles.left.shape[2]
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    items = 0
    done = 0
    sent = 0
    begin = gl.load(work.indptr + gl.program_id(0))
    for number in range(begin, gl.load(work.indptr + gl.program_id(0) + 1)):
        item = item_of(work, number, HEADS, FOLD)
        first, count = tiles_of(item, work.first_row, HEADS)
        limit = last_visible(work, item, HEADS, row_layout)
        m, l = start_state(row_layout)
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        if count > 0:
            mbarrier.wait(query.full, items & 1)
            items += 1
            buffer, _ = turn_of(done, BUFFERS)
            started = start_rotated(query, tiles, done, scores)
            for t in range(first, first + count):
                left = tiles.left.index(buffer)
                started = add_left(started, query, tiles, done)
                started = add_quarters(started, query, tiles, done)
                mbarrier.arrive(scored, count=1)
                # Here, under these products: the compiler puts one behind each arrival, else in
                # front of the left half's first product.
                barrier()
                s = warpgroup_mma_wait(0, [started])
                s, base, new_m = see(s, t * TILE, item, limit, factor, m, EXACT)
                decay = gl.exp2(m - base)
                m = new_m
                over = item.end - t * TILE
                if over < TILE:
                    clear_rows(left, over)
                sums, l, p, others = multiply_left(
                    s, base, decay, factor, acc, l, left, shared, sent
                )
                sent += 1
                # The next scores' first product is behind the left half's, so that the tensor cores
                # do not wait for the warps in between. Behind the last tile it is of that tile
                # again, and not used.
                more = t + 1 < first + count
                started = start_rotated(query, tiles, gl.where(more, done + 1, done), scores)
                # P is in registers, and read until the products end.
                acc, p, others = warpgroup_mma_wait(1, [sums, p, others])
                if more:
                    mbarrier.arrive(tiles.left_free.index(buffer), count=1)
                    done += 1
                    buffer, _ = turn_of(done, BUFFERS)
            _ = warpgroup_mma_wait(0, [started])
            mbarrier.arrive(tiles.left_free.index(buffer), count=1)
            done += 1
            mbarrier.arrive(query.free, count=1)
        lse, inverse = result_of(m, l)
        mbarrier.wait(shared.free, (sent & 1) ^ 1)
        shared.factors.store(inverse)
        barrier()
        mbarrier.arrive(shared.full, count=1)
        sent += 1
        if PDL:
            # The kernel in front may still read what is written here.
            gdc.gdc_wait()
        store_lse(lse, work, item, target, HEADS, LSE)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
        store_part(acc, work, item, target, 0, 2 * HALF, HEADS)


@gluon.jit
def multiply(
    work, tiles, shared, scored, target, HEADS: gl.constexpr, FOLD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: the right half of the output, in two quarters."""
    PART: gl.constexpr = tiles.right.shape[2]
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, output)
    done = 0
    received = 0
    begin = gl.load(work.indptr + gl.program_id(0))
    for number in range(begin, gl.load(work.indptr + gl.program_id(0) + 1)):
        item = item_of(work, number, HEADS, FOLD)
        first, count = tiles_of(item, work.first_row, HEADS)
        third = gl.zeros([ROWS, PART], gl.float32, output)
        fourth = third
        for t in range(first, first + count):
            buffer, phase = turn_of(done, BUFFERS)
            quarter = 2 * buffer
            mbarrier.wait(shared.full, received & 1)
            factors = shared.factors.load(row_layout)
            p = shared.p.load(gl.DotOperandLayout(0, output, 2))
            barrier()
            mbarrier.arrive(shared.free, count=1)
            received += 1
            # Complete already; waiting makes the copies visible here.
            mbarrier.wait(tiles.right_full.index(quarter), phase)
            mbarrier.wait(tiles.right_full.index(quarter + 1), phase)
            over = item.end - t * TILE
            if over < TILE:
                clear_rows(tiles.right.index(quarter), over)
                clear_rows(tiles.right.index(quarter + 1), over)
            third = third * factors[:, None]
            sums = warpgroup_mma(p, tiles.right.index(quarter), third, is_async=True)
            # P is in registers, and read until the last product ends.
            third, p = warpgroup_mma_wait(0, [sums, p])
            mbarrier.arrive(tiles.right_free.index(quarter), count=1)
            # Not beside the third quarter's product: Triton 3.6's assembler then waits for it.
            fourth = fourth * factors[:, None]
            if t + 1 < first + count:
                # The fourth quarter's product is not in front of the next scores, but under the
                # softmax behind them.
                mbarrier.wait(scored, (done + 1) & 1)
            last = warpgroup_mma(p, tiles.right.index(quarter + 1), fourth, is_async=True)
            fourth, p = warpgroup_mma_wait(0, [last, p])
            mbarrier.arrive(tiles.right_free.index(quarter + 1), count=1)
            done += 1
        mbarrier.wait(shared.full, received & 1)
        inverse = shared.factors.load(row_layout)
        barrier()
        mbarrier.arrive(shared.free, count=1)
        received += 1
        if PDL:
            gdc.gdc_wait()
        store_part(third * inverse[:, None], work, item, target, 2 * PART, 4 * PART, HEADS)
        store_part(fourth * inverse[:, None], work, item, target, 3 * PART, 4 * PART, HEADS)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """Barriers that so many arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "fresh"])
def decode_kernel(
    table_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr,
    qo_indptr_ptr, kv_indptr_ptr, q_scale_ptr, kv_scale_ptr, scale, heads, out_stride_t,
    out_stride_h, table_stride, q_halves, q_quarters, q_rotated, halves, quarters, rotated,
    block_rows, fresh,
    PAGE: gl.constexpr, HEADS: gl.constexpr, FOLD: gl.constexpr, LSE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Arguments as `triton.decode_kernel`, and descriptors of query and cache; PDL and `fresh` as
    `hopper.decode` has them.
    """
    if PDL and fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = halves.block_type.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    FP8: gl.constexpr = BITS == 8
    BUFFERS: gl.constexpr = 4 if FP8 else 2
    HALF: gl.constexpr = halves.block_type.shape[1]
    PART: gl.constexpr = quarters.block_type.shape[1]
    R: gl.constexpr = rotated.block_type.shape[1]
    tile: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    rope: gl.constexpr = gl.NVMMASharedLayout(R * BITS // 8, BITS, 2)
    tiles = Tiles(
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, HALF], tile),
        gl.allocate_shared_memory(TYPE, [2 * BUFFERS, TILE, PART], tile),
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, R], rope),
        new_barriers(BUFFERS),
        new_barriers(2 * BUFFERS),
        new_barriers(BUFFERS),
        new_barriers(2 * BUFFERS),
    )
    first_row = gl.program_id(1) * ROWS
    query_made = new_barriers(2)
    query = Query(
        Boxes(q_halves, q_quarters, q_rotated),
        gl.allocate_shared_memory(TYPE, [ROWS, HALF], tile),
        gl.allocate_shared_memory(TYPE, [2, ROWS, PART], tile),
        gl.allocate_shared_memory(TYPE, [ROWS, R], rope),
        query_made.index(0),
        query_made.index(1),
    )
    work = Work(
        work_indptr_ptr, work_info_ptr, qo_indptr_ptr, kv_indptr_ptr, table_ptr, table_stride,
        first_row,
    )  # fmt: skip
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    cache = Boxes(halves, quarters, rotated)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if FP8:
        shared = Probabilities(
            gl.allocate_shared_memory(gl.float16, [2, ROWS, TILE], p_layout),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
            new_barriers(2),
            new_barriers(2, 2),
        )
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (score_fp8, (
                    work, query, tiles, shared, target, scale, q_scale_ptr, kv_scale_ptr, HEADS,
                    FOLD, LSE, PDL,
                )),
                (multiply_fp8, (work, tiles, shared, target, HEADS, FOLD, False, PDL)),
                (multiply_fp8, (work, tiles, shared, target, HEADS, FOLD, True, PDL)),
                (copy, (work, query, tiles, cache, block_rows, PAGE, HEADS, FOLD, PDL)),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )  # fmt: skip
    else:
        made = new_barriers(3)
        shared = Probabilities(
            gl.allocate_shared_memory(TYPE, [ROWS, TILE], p_layout),
            gl.allocate_shared_memory(gl.float32, [ROWS], plain),
            made.index(0),
            made.index(1),
        )
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (score, (
                    work, query, tiles, shared, made.index(2), target, scale * LOG2E, HEADS, FOLD,
                    LSE, PDL,
                )),
                (multiply, (work, tiles, shared, made.index(2), target, HEADS, FOLD, PDL)),
                (copy, (work, query, tiles, cache, block_rows, PAGE, HEADS, FOLD, PDL)),
            ],
            [4, 1],
            [216, 40],
        )  # fmt: skip
    if PDL:
        # Idle CTAs must signal too: a dependent grid waits for all of them.
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()


kernel: Any = decode_kernel


def arguments(given: Inputs) -> Launch:
    """What the kernel is launched with (also for compiling without a GPU)."""
    latent, per_work = given.widths[0], given.plan.heads_per_work
    args = (
        given.block_table,
        *given.results,
        *given.scales,
        *given.strides[2:],
        *query_boxes(given.q, latent, per_work),
        *cache_boxes(given.kv_cache, latent),
        int(given.plan.fresh),
    )
    options = {
        "PAGE": given.kv_cache.shape[1],
        "HEADS": per_work,
        "FOLD": given.plan.fold,
        "LSE": given.lse is not None,
        "PDL": True,
        "launch_pdl": True,
        "num_warps": WARPS.value,
    }
    return given.grid(ROWS.value), args, options
