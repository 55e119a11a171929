"""The two warpgroups of `warp_specialized.py` that compute, when query and cache are bf16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper.common import TILE, barrier, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.warp_specialized_common import ROWS, WARPS, turn_of


@gluon.jit
def give_last(m, l, sink, shared, sent):
    """Give what all sums are multiplied by, as number `sent`; the LSE of each row, and that."""
    lse, inverse = ws.result_of(m, l, sink)
    mbarrier.wait(shared.free, (sent & 1) ^ 1)
    shared.factors.store(inverse)
    barrier()
    mbarrier.arrive(shared.full, count=1)
    return lse, inverse


@gluon.jit
def take(shared, received, output: gl.constexpr):
    """Take number `received` from the other warpgroup: P as an operand, and factors."""
    mbarrier.wait(shared.full, received & 1)
    factors = shared.factors.load(gl.SliceLayout(1, output))
    p = shared.p.load(gl.DotOperandLayout(0, output, 2))
    barrier()
    mbarrier.arrive(shared.free, count=1)
    return p, factors[:, None]


@gluon.jit
def multiply_left(s, base, decay, factor, acc, l, left, shared, sent):
    """Compute P of a tile, start to add its left half to the output, and give P and the factors as
    number `sent`: new sums of both, and the two operands, which the products read where they were
    computed: no store, fence or barrier is in front, and no fence behind the stores of P, which
    the other warpgroup loads. Products of the first 32 tokens run under the others' softmax.
    """
    HALF: gl.constexpr = TILE // 2
    part: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    TYPE: gl.constexpr = left.dtype
    # Registers that a thread has already: the scores of the first 32 tokens, and of the others.
    first, others = gl.split(s.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    first, others = gl.convert_layout(first, part), gl.convert_layout(others, part)
    p = ws.p_of(first, base, factor)
    l = l * gl.convert_layout(decay, gl.SliceLayout(1, ws.SUMS))[:, None] + ws.sums_of(p)
    first = p.to(TYPE)
    first_p = gl.convert_layout(first, operand)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    acc = hopper.warpgroup_mma(first_p, left.slice(0, HALF), acc, is_async=True)
    p = ws.p_of(others, base, factor)
    l += ws.sums_of(p)
    others = p.to(TYPE)
    other_p = gl.convert_layout(others, operand)
    acc = hopper.warpgroup_mma(other_p, left.slice(HALF, HALF), acc, is_async=True)
    mbarrier.wait(shared.free, (sent & 1) ^ 1)
    shared.p.slice(0, HALF, dim=1).store(first)
    shared.p.slice(HALF, HALF, dim=1).store(others)
    shared.factors.store(decay)
    barrier()
    mbarrier.arrive(shared.full, count=1)
    return acc, l, first_p, other_p


@gluon.jit
def start_rotated(query, tiles, done, layout: gl.constexpr):
    """Start the product of the query with the rotated part of tile number `done`."""
    buffer, phase = turn_of(done, tiles.left.shape[0])
    mbarrier.wait(tiles.left_full.index(buffer), phase)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    rotated = tiles.ropes.index(buffer).permute((1, 0))
    return hopper.warpgroup_mma(query.ropes, rotated, s, use_acc=False, is_async=True)


@gluon.jit
def add_left(s, query, tiles, done):
    """Start the product with the left half, behind `start_rotated`."""
    buffer, _ = turn_of(done, tiles.left.shape[0])
    left = tiles.left.index(buffer).permute((1, 0))
    return hopper.warpgroup_mma(query.left, left, s, is_async=True)


@gluon.jit
def score(work, query, tiles, shared, scored, target, factor, form: gl.constexpr):
    """The first warpgroup: scores, softmax, and the left half of the output."""
    HALF: gl.constexpr = tiles.left.shape[2]
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    items, done, sent = 0, 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        limit = ws.last_visible(work, item, form.HEADS, row_layout)
        m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([ROWS, 4], gl.float32, ws.SUMS)
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        if count > 0:
            items += gl.where(common.is_edge(number == begin, item.begin, form.CHUNKS), 1, 0)
            mbarrier.wait(query.full, (items - 1) & 1)
            buffer, _ = turn_of(done, BUFFERS)
            started = start_rotated(query, tiles, done, scores)
            for t in range(first, first + count):
                left = tiles.left.index(buffer)
                started = add_left(started, query, tiles, done)
                started = ws.add_quarters(started, query, tiles, done)
                mbarrier.arrive(scored, count=1)
                # Here, under these products: the compiler puts one behind each arrival, else in
                # front of the left half's first product.
                barrier()
                s = hopper.warpgroup_mma_wait(0, [started])
                s, base, new_m = ws.see(s, t * TILE, item, limit, factor, m)
                decay = gl.exp2(m - base)
                m = new_m
                over = item.end - t * TILE
                if over < TILE:
                    common.clear_rows(left, over)
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
                acc, p, others = hopper.warpgroup_mma_wait(1, [sums, p, others])
                if more:
                    mbarrier.arrive(tiles.left_free.index(buffer), count=1)
                    done += 1
                    buffer, _ = turn_of(done, BUFFERS)
            _ = hopper.warpgroup_mma_wait(0, [started])
            mbarrier.arrive(tiles.left_free.index(buffer), count=1)
            done += 1
            done_with_it = common.is_edge(number + 1 == end, item.after, form.CHUNKS)
            mbarrier.arrive(query.free, count=1, pred=done_with_it)
        lse, inverse = give_last(m, l, float("-inf"), shared, sent)
        sent += 1
        # The kernel in front may still read what is written here.
        gdc.gdc_wait()
        ws.store_lse(lse, work, item, target, form)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
        ws.store_part(acc, work, item, target, 0, form)


@gluon.jit
def multiply(work, tiles, shared, scored, target, form: gl.constexpr):
    """The second warpgroup: the right half of the output, in two quarters."""
    PART: gl.constexpr = tiles.right.shape[2]
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PART, 16])
    done, received = 0, 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        third = gl.zeros([ROWS, PART], gl.float32, output)
        fourth = third
        for t in range(first, first + count):
            buffer, phase = turn_of(done, BUFFERS)
            quarter = 2 * buffer
            p, factors = take(shared, received, output)
            received += 1
            # Complete already; waiting makes the copies visible here.
            mbarrier.wait(tiles.right_full.index(quarter), phase)
            mbarrier.wait(tiles.right_full.index(quarter + 1), phase)
            over = item.end - t * TILE
            if over < TILE:
                common.clear_rows(tiles.right.index(quarter), over)
                common.clear_rows(tiles.right.index(quarter + 1), over)
            third = third * factors
            sums = hopper.warpgroup_mma(p, tiles.right.index(quarter), third, is_async=True)
            # P is in registers, and read until the last product ends.
            third, p = hopper.warpgroup_mma_wait(0, [sums, p])
            mbarrier.arrive(tiles.right_free.index(quarter), count=1)
            # Not beside the third quarter's product: Triton 3.6's assembler then waits for it.
            fourth = fourth * factors
            if t + 1 < first + count:
                # The fourth quarter's product is not in front of the next scores, but under the
                # softmax behind them.
                mbarrier.wait(scored, (done + 1) & 1)
            last = hopper.warpgroup_mma(p, tiles.right.index(quarter + 1), fourth, is_async=True)
            fourth, p = hopper.warpgroup_mma_wait(0, [last, p])
            mbarrier.arrive(tiles.right_free.index(quarter + 1), count=1)
            done += 1
        _, inverse = take(shared, received, output)
        received += 1
        gdc.gdc_wait()
        ws.store_part(third * inverse, work, item, target, 2 * PART, form)
        ws.store_part(fourth * inverse, work, item, target, 3 * PART, form)
