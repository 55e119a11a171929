"""The three warpgroups of `warp_specialized.py` that compute, when query and cache are fp8.

The scores are an e4m3 product. The output is [latents, rows]: values are widened to fp16 in
registers (`widen_pairs`), as the left operand, because an e4m3 product cannot read them as they
lie. So one warpgroup only computes scores and softmax, and two widen and multiply a half each. The
products of a tile's scores run under the softmax of the tile before, and P lies twice in shared
memory: a slot is free when both halves have used it. A half of a tile is free behind its products
and a fence: a barrier ends no load of a thread, and the copy engine's writes keep no order with
loads that are not fenced.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper.common import TILE, barrier, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.decode import read_scales
from mla_fusion.attention.hopper.warp_specialized_common import ROWS, WARPS, turn_of

# The least normal number. Scales of zero would make scores of -inf, which no row sees, NaN.
LEAST = gl.constexpr(2.0**-126)
# Of the softmax. P reaches 2^8, and fp16 holds 2^15. Most tiles then have factors of 1 only, so
# that nothing is rescaled.
SLACK = gl.constexpr(8)


@gluon.jit
def slot_of(shared, number):
    """The slot of the P that is sent as number `number`, and the phase of its barriers."""
    at, phase = turn_of(number, shared.p.shape[0])
    p, factors, full, free = shared
    return ws.Probabilities(p.index(at), factors.index(at), full.index(at), free.index(at)), phase


@gluon.jit
def send(shared, p, factors, sent):
    """Give P and the factors of a tile to both halves, as number `sent`."""
    slot, phase = slot_of(shared, sent)
    mbarrier.wait(slot.free, phase ^ 1)
    slot.p.store(p.to(slot.p.dtype))
    slot.factors.store(factors)
    hopper.fence_async_shared()
    barrier()
    mbarrier.arrive(slot.full, count=1)


@gluon.jit
def send_last(shared, factors, sent):
    """Give the factors of an item's sums, as number `sent`."""
    slot, phase = slot_of(shared, sent)
    mbarrier.wait(slot.free, phase ^ 1)
    slot.factors.store(factors)
    barrier()
    mbarrier.arrive(slot.full, count=1)


@gluon.jit
def softmax_step(s, token, item, limit, factor, m, l):
    """One step of the online softmax over a tile from `token` on: P, decay, new state."""
    s, base, new_m = ws.see(s, token, item, limit, factor, m, SLACK)
    p = ws.p_of(s, base, factor)
    decay = gl.exp2(m - base)
    sums = ws.sums_of(p)
    return p, decay, new_m, l * gl.convert_layout(decay, gl.SliceLayout(1, ws.SUMS))[:, None] + sums


@gluon.jit
def all_scores(query, tiles, done, layout: gl.constexpr):
    """Start all products [rows, tokens] of the query with tile number `done` of the CTA."""
    buffer, phase = turn_of(done, tiles.left.shape[0])
    mbarrier.wait(tiles.left_full.index(buffer), phase)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    left = tiles.left.index(buffer).permute((1, 0))
    s = hopper.warpgroup_mma(query.left, left, s, use_acc=False, is_async=True)
    rope = tiles.ropes.index(buffer).permute((1, 0))
    s = hopper.warpgroup_mma(query.ropes, rope, s, is_async=True)
    return ws.add_quarters(s, query, tiles, done)


@gluon.jit
def score(
    work, query, tiles, shared, target, scale, q_scale_ptr, kv_scale_ptr, form: gl.constexpr
):  # fmt: skip
    """The first warpgroup: scores and softmax."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    # The kernel in front may write the scales, and still read what is written here.
    gdc.gdc_wait()
    items, done, sent = 0, 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        factor, value_scale = read_scales(scale, q_scale_ptr, kv_scale_ptr, True)
        factor = gl.where(factor == 0.0, LEAST, factor)
        limit = ws.last_visible(work, item, form.HEADS, row_layout)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([ROWS, 4], gl.float32, ws.SUMS)
        if count > 0:
            mbarrier.wait(query.full, items & 1)
            items += 1
            s = hopper.warpgroup_mma_wait(0, [all_scores(query, tiles, done, scores)])
            done += 1
            last = (first + count - 1) * TILE
            for token in range(first * TILE, last, TILE):
                started = all_scores(query, tiles, done, scores)
                p, decay, m, l = softmax_step(s, token, item, limit, factor, m, l)
                send(shared, p, decay, sent)
                sent += 1
                s = hopper.warpgroup_mma_wait(0, [started])
                done += 1
            # No warp reads the query any more.
            barrier()
            mbarrier.arrive(query.free, count=1)
            p, decay, m, l = softmax_step(s, last, item, limit, factor, m, l)
            send(shared, p, decay, sent)
            sent += 1
        lse, inverse = ws.result_of(m, l)
        send_last(shared, inverse * value_scale, sent)
        sent += 1
        ws.store_lse(lse, work, item, target, form)


@gluon.jit
def of_half(left, right, at, RIGHT: gl.constexpr):
    """Barriers of a half of the tile in buffer `at`: one of `left`, or two of `right`."""
    return (right.index(2 * at), right.index(2 * at + 1)) if RIGHT else (left.index(at),)


@gluon.jit
def read_quarter(tiles, at, NUMBER: gl.constexpr, RIGHT: gl.constexpr, layout: gl.constexpr):
    """A quarter of the tile in buffer `at`, in registers: pairs of latents by tokens."""
    PAIRS: gl.constexpr = tiles.right.shape[2] // 2
    if RIGHT:
        view = common.pairs_of(tiles.right.index(2 * at + NUMBER))
    else:
        view = common.pairs_of(tiles.left.index(at)).slice(NUMBER * PAIRS, PAIRS, dim=1)
    return view.permute((1, 0)).load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def multiply(work, tiles, shared, target, form: gl.constexpr, RIGHT: gl.constexpr):
    """The other warpgroups: a half of the output each, in two quarters of even and odd latents."""
    PART: gl.constexpr = tiles.right.shape[2]
    FIRST: gl.constexpr = 2 * PART if RIGHT else 0
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, output)
    # The kernel in front may still read what is written here. The first tile waits for it too.
    gdc.gdc_wait()
    done, received = 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        even = gl.zeros([PART // 2, ROWS], gl.float32, output)
        odd = even
        next_even, next_odd = even, even
        for t in range(first, first + count):
            slot, phase = slot_of(shared, received)
            mbarrier.wait(slot.full, phase)
            factors = slot.factors.load(row_layout)
            p = slot.p.permute((1, 0))
            at, turn = turn_of(done, tiles.left.shape[0])
            full = of_half(tiles.left_full, tiles.right_full, at, RIGHT)
            for i in gl.static_range(len(full)):
                # Complete already: the scores have waited. This makes the copies visible here.
                mbarrier.wait(full[i], turn)
            over = item.end - t * TILE
            if over < TILE:
                # No product of scores reads the half any more, and the other half's warps none of
                # it. The fence in front of its release is before the next copy.
                parts = of_half(tiles.left, tiles.right, at, RIGHT)
                for i in gl.static_range(len(parts)):
                    common.clear_rows(common.pairs_of(parts[i]), over)
            pairs = read_quarter(tiles, at, 0, RIGHT, output)
            # Each warp has the factors of all rows, so all warps agree. No factor is above 1.
            if gl.min(factors, 0) < 1.0:
                even = even * factors[None, :]
                odd = odd * factors[None, :]
                next_even = next_even * factors[None, :]
                next_odd = next_odd * factors[None, :]
            low, high = common.widen_pairs(pairs)
            even = hopper.warpgroup_mma(low, p, even, is_async=True)
            odd = hopper.warpgroup_mma(high, p, odd, is_async=True)
            pairs = read_quarter(tiles, at, 1, RIGHT, output)
            # Values in registers are read until their product ends.
            even, low = hopper.warpgroup_mma_wait(1, [even, low])
            low, next_high = common.widen_pairs(pairs)
            next_even = hopper.warpgroup_mma(low, p, next_even, is_async=True)
            odd, high = hopper.warpgroup_mma_wait(1, [odd, high])
            high = next_high
            next_odd = hopper.warpgroup_mma(high, p, next_odd, is_async=True)
            held = [next_even, next_odd, low, high]
            next_even, next_odd, low, high = hopper.warpgroup_mma_wait(0, held)
            # Not among products under way: there a fence crashes the assembler of Triton 3.6.
            hopper.fence_async_shared()
            barrier()
            free = of_half(tiles.left_free, tiles.right_free, at, RIGHT)
            for i in gl.static_range(len(free)):
                mbarrier.arrive(free[i], count=1)
            mbarrier.arrive(slot.free, count=1)
            received += 1
            done += 1
        slot, phase = slot_of(shared, received)
        mbarrier.wait(slot.full, phase)
        factors = slot.factors.load(row_layout)[None, :]
        barrier()
        mbarrier.arrive(slot.free, count=1)
        received += 1
        even, odd = even * factors, odd * factors
        ws.store_pairs(even, odd, work, item, target, FIRST, form)
        even, odd = next_even * factors, next_odd * factors
        ws.store_pairs(even, odd, work, item, target, FIRST + PART, form)
