"""Parts that the warp-specialized decode kernels share: shared memory, a warp that copies, and the
work of a warpgroup on 64 query rows. Scores are [rows, tokens]; four threads have a row.
"""

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.common import TILE, items_of, read_item, tiles_of, tma_load
from mla_fusion.attention.plan.device_code import LN2

ROWS = gl.constexpr(64)  # query rows of a CTA: the M of WGMMA
WARPS = gl.constexpr(4)  # a warpgroup
# Of [rows, 4]: a sum for each of the four threads that have a row of scores.
SUMS = gl.constexpr(gl.DistributedLinearLayout(
    [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
))  # fmt: skip

# Tiles of keys in shared memory, two of bf16 or four of fp8, and their barriers. left, ropes: [n,
# tokens, columns]. right: [2 n, tokens, columns], two quarters of each tile.
Tiles = namedtuple("Tiles", "left right ropes left_full right_full left_free right_free")

# P [rows, tokens] of a tile, factors [rows] of the sums so far, and their barriers. For fp8 two
# of each.
Probabilities = namedtuple("Probabilities", "p factors full free")

# Descriptors of 64 rows of a half of the latents, of a quarter, and of the rotated part. Rows of
# a cache are tokens; those of the query tokens by heads.
Boxes = namedtuple("Boxes", "halves quarters rotated")

# The query as the copy engine sees it, its rows in shared memory, and barriers. left, ropes:
# [rows, columns]. right: [2, rows, columns].
Query = namedtuple("Query", "boxes left right ropes full free")


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """COUNT barriers, each of which ARRIVALS arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


def query_boxes(q: torch.Tensor, latent: int, per_work: int) -> dict[str, TensorDescriptor]:
    """`Boxes` of the query [tokens, heads, L + R] for items of `per_work` heads, as arguments by
    name. A box has 64 heads of one token, or all heads of an item for several tokens. Without R
    nothing reads the last box. Heads of padding are zeros. Rows behind those of an item are zeros
    or another token's. The results of both are not stored."""
    heads = per_work if ROWS.value % per_work == 0 else ROWS.value
    columns = latent // 2, latent // 4, q.shape[2] - latent
    block = [ROWS.value // heads, heads]
    found = common.boxes(q, [*q.shape[:2]], [*q.stride()[:2]], block, *columns)
    return {"q_halves": found[0], "q_quarters": found[1], "q_rotated": found[-1]}


@gluon.jit
def turn_of(number, COUNT: gl.constexpr):
    """The buffer of number `number` among COUNT, two or four, and the phase of its barriers."""
    # By bits: `number` is signed to the compiler, and a signed remainder takes more instructions.
    LOG2: gl.constexpr = COUNT // 2
    return number & (COUNT - 1), (number >> LOG2) & 1


@gluon.jit
def copy(work, query, tiles, cache, block_rows, early, form: gl.constexpr):
    """The copying warp: the query and all tiles of all items, in order."""
    HALF: gl.constexpr = tiles.left.shape[2]
    PART: gl.constexpr = tiles.right.shape[2]
    R: gl.constexpr = tiles.ropes.shape[2]
    SIZE: gl.constexpr = tiles.left.dtype.primitive_bitwidth // 8
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    items, done = 0, 0
    begin, end = items_of(work)
    is_short = 2 * gl.load(work.indptr + gl.num_programs(0)) <= gl.num_programs(0)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        if number == begin:
            # Once: the kernel in front has ended then.
            gdc.gdc_wait()
        if count > 0:  # noqa: SIM102 (known when compiled; the other one is not)
            # fp8 copies it for each item: its scores free it so.
            if common.is_edge(number == begin, item.begin, form.CHUNKS and SIZE == 2):
                copy_query(query, items, work, item, R, form.HEADS)
                items += 1
        for t in range(first, first + count):
            token = t * TILE
            row = common.load_kept(item.table + token // form.PAGE) * block_rows
            row += token % form.PAGE
            buffer, phase = turn_of(done, BUFFERS)
            mbarrier.wait(tiles.left_free.index(buffer), phase ^ 1)
            full = tiles.left_full.index(buffer)
            mbarrier.expect(full, TILE * (HALF + R) * SIZE)
            tma_load(cache.halves, [row, 0], full, tiles.left.index(buffer))
            tma_load(cache.rotated, [row, 2 * HALF], full, tiles.ropes.index(buffer))
            for part in gl.static_range(2):
                quarter = 2 * buffer + part
                mbarrier.wait(tiles.right_free.index(quarter), phase ^ 1)
                full = tiles.right_full.index(quarter)
                mbarrier.expect(full, TILE * PART * SIZE)
                target = tiles.right.index(quarter)
                tma_load(cache.quarters, [row, HALF + part * PART], full, target)
            done += 1
    # A product that merges may be launched, and waits; the reduction, too, where half of the CTAs
    # have nothing to do: its own find room beside those that have. Idle CTAs signal at their end.
    lets_in = early > 0
    if SIZE == 1:
        lets_in |= is_short
    if lets_in & (begin < end):
        gdc.gdc_launch_dependents()


@gluon.jit
def copy_query(query, number, work, item, R: gl.constexpr, HEADS: gl.constexpr):
    """Start the copy of the query rows of an item, as number `number`. R: rotated columns, or 0."""
    # Free from the start: the phase before the first counts as completed.
    mbarrier.wait(query.free, (number & 1) ^ 1)
    HALF: gl.constexpr = query.left.shape[1]
    PART: gl.constexpr = query.right.shape[2]
    SIZE: gl.constexpr = query.left.dtype.primitive_bitwidth // 8
    token = (item.token + work.first_row // HEADS).to(gl.int32)
    head = item.first_head + work.first_row % HEADS
    mbarrier.expect(query.full, ROWS * (2 * HALF + R) * SIZE)
    boxes, full = query.boxes, query.full
    copy_rows(boxes.halves, token, head, 0, full, query.left)
    for part in gl.static_range(2):
        copy_rows(boxes.quarters, token, head, HALF + part * PART, full, query.right.index(part))
    if R > 0:
        copy_rows(boxes.rotated, token, head, 2 * HALF, full, query.ropes)


@gluon.jit
def copy_rows(box, token, head, column, full, target):
    """Start the copy of a box of the query into `target` [rows, columns]."""
    SHAPE: gl.constexpr = box.block_type.shape
    layout: gl.constexpr = box.layout
    target = common.reinterpret(target, target.dtype, SHAPE, layout)
    tma_load(box, [token, head, column], full, target)


@gluon.jit
def add_quarters(s, query, tiles, done):
    """Start the other two products, with the quarters."""
    buffer, phase = turn_of(done, tiles.left.shape[0])
    for part in gl.static_range(2):
        quarter = 2 * buffer + part
        mbarrier.wait(tiles.right_full.index(quarter), phase)
        right = tiles.right.index(quarter).permute((1, 0))
        s = warpgroup_mma(query.right.index(part), right, s, is_async=True)
    return s


@gluon.jit
def see(s, token, item, limit, factor, m, SLACK: gl.constexpr = 0):
    """The scores of a tile from `token` on, -inf where a row does not see one; what is subtracted
    from them times `factor`; and the new m.

    factor: of the scores, in base 2. It is positive, so the maximum needs no product of each.
    SLACK: how far, in base 2, a maximum may be above its row's m before m is raised. P reaches
    2^SLACK, most decays are 1, sums and LSE stay. bf16 was slower with any."""
    # Of the tiles of an item only the first and the last ones have tokens that a row does not see.
    shortest = gl.minimum(item.end, item.end + item.after - (item.count - 1))
    if (token < item.begin) | (token + TILE > shortest):
        at = token + gl.arange(0, TILE, gl.SliceLayout(0, s.type.layout))
        seen = (at >= item.begin)[None, :] & (at[None, :] < limit[:, None])
        s = gl.where(seen, s, float("-inf"))
    return raised(s, factor, m, SLACK)


@gluon.jit
def raised(s, factor, m, SLACK: gl.constexpr = 0):
    """The same as `see` returns, for scores that are -inf where a row does not see a token."""
    highest = gl.max(s, 1) * factor
    new_m = gl.maximum(m, highest) if SLACK == 0 else gl.where(highest > m + SLACK, highest, m)
    # A row that has seen nothing keeps a P of zero, not NaN.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    return s, base, new_m


@gluon.jit
def p_of(s, base, factor):
    """P of scores [rows, tokens]."""
    return gl.exp2(s * factor - gl.convert_layout(base, gl.SliceLayout(1, s.type.layout))[:, None])


@gluon.jit
def sums_of(p):
    """The sums of P [rows, tokens]. Four threads' sums meet in `result_of`."""
    # A thread has two neighbours of every eight tokens.
    sums = gl.sum(gl.sum(p.reshape([ROWS, p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(sums, SUMS)


@gluon.jit
def last_visible(work, item, HEADS: gl.constexpr, layout: gl.constexpr):
    """The end of what each row sees: row i of n up to n - 1 - i before the sequence's."""
    row = work.first_row + gl.arange(0, ROWS, layout)
    return gl.minimum(item.end, item.end + item.after - (item.count - 1 - row // HEADS))


@gluon.jit
def result_of(m, l, sink=float("-inf")):
    """The natural-log LSE of each row, and what its sums are multiplied by. sink: one more score of
    each row, in base 2, of which the LSE knows nothing."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(l)) * LN2)
    return lse, gl.where(l > 0.0, 1.0 / (l + gl.exp2(sink - m)), 0.0)


@gluon.constexpr_function
def store_layout(columns):
    """The layout of a store: a thread has four neighbours of a row, and four threads have 16. In
    the layout of products a thread has pairs, and four threads fill half of a memory sector. Two
    threads of a warp exchange pairs by shuffles. More than four neighbours would go through shared
    memory, which is full."""
    wide = [[0, 16 << i] for i in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *wide], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def rows_of(work, item, target, COUNT: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr):
    """The COUNT rows of an item that this CTA has, and which of them are real."""
    rows = work.first_row + gl.arange(0, COUNT, layout)
    head = item.first_head + rows % HEADS
    return rows, head, (rows // HEADS < item.count) & (head < target.heads)


@gluon.jit
def store_part(acc, work, item, target, FIRST: gl.constexpr, form: gl.constexpr):
    """Store normalized sums [rows, columns] in the columns from FIRST on."""
    layout: gl.constexpr = store_layout(acc.shape[1])
    rows, head, real = rows_of(
        work, item, target, acc.shape[0], form.HEADS, gl.SliceLayout(1, layout)
    )
    col = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    if item.partial < 0:
        at_token = item.token + rows // form.HEADS
        final = target.out + at_token * target.stride_t + head * target.stride_h
        final = final[:, None] + col[None, :]
        values = gl.convert_layout(acc.to(target.out.dtype.element_ty), layout)
        gl.store(final, values, mask=real[:, None])
    else:
        at_partial = item.partial.to(gl.int64) * form.HEADS + rows
        partial = target.partial + at_partial[:, None] * form.L + col[None, :]
        gl.store(partial, gl.convert_layout(acc, layout), mask=real[:, None])


@gluon.constexpr_function
def pairs_layout(pairs):
    """Layout of products [pairs, rows], read as [pairs, groups, 8 rows]."""
    registers = [[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [pairs, 8, 8])


@gluon.jit
def pairs_in(even, odd, TYPE: gl.constexpr, layout: gl.constexpr):
    """Even and odd latents [pairs, rows] in TYPE, two in an integer: [pairs, groups, 8 rows]."""
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    part: gl.constexpr = gl.int32 if BITS == 32 else gl.int16
    pair: gl.constexpr = gl.int64 if BITS == 32 else gl.int32
    low = even.to(TYPE).to(part, bitcast=True).to(pair) & ((1 << BITS) - 1)
    pairs = low | (odd.to(TYPE).to(part, bitcast=True).to(pair) << BITS)
    return gl.convert_layout(pairs.reshape([even.shape[0], ROWS // 8, 8]), layout)


@gluon.jit
def store_pairs(even, odd, work, item, target, FIRST: gl.constexpr, form: gl.constexpr):
    """Store normalized sums [columns / 2, rows] of even and odd columns from FIRST on. Eight rows
    are heads of one token. All threads have the same eight groups of them in registers, so a
    group's address is one number for all, and a thread's place in it another."""
    PAIRS: gl.constexpr = even.shape[0]
    layout: gl.constexpr = pairs_layout(PAIRS)
    col = gl.arange(0, PAIRS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    group = gl.arange(0, ROWS // 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    # Zero, which the compiler does not know: a count is not negative. What is computed of it is
    # computed behind the item's tiles, not in front of all items, and then kept in memory.
    zero = (item.count.to(gl.uint32, bitcast=True) >> 31).to(gl.int32)
    row, col = row + zero, col + zero
    first = (work.first_row + zero) + 8 * group
    head = item.first_head + first % form.HEADS
    real = (first // form.HEADS < item.count) & (head + row < target.heads)
    if item.partial < 0:
        at_token = item.token + first // form.HEADS
        final = target.out + at_token * target.stride_t + head * target.stride_h
        final = final + row * target.stride_h + FIRST
        values = pairs_in(even, odd, target.out.dtype.element_ty, layout)
        gl.store(final.to(gl.pointer_type(gl.int32), bitcast=True) + col, values, mask=real)
    else:
        at_partial = item.partial.to(gl.int64) * form.HEADS + first + row
        partial = target.partial + at_partial * form.L + FIRST
        wide = pairs_in(even, odd, gl.float32, layout)
        gl.store(partial.to(gl.pointer_type(gl.int64), bitcast=True) + col, wide, mask=real)


@gluon.jit
def store_lse(lse, work, item, target, form: gl.constexpr):
    """Store the natural-log LSE of each row."""
    layout: gl.constexpr = lse.type.layout
    rows, head, real = rows_of(work, item, target, lse.shape[0], form.HEADS, layout)
    if item.partial < 0:
        if form.LSE:
            at_token = item.token + rows // form.HEADS
            gl.store(target.lse + at_token * target.heads + head, lse, mask=real)
    else:
        at_partial = item.partial.to(gl.int64) * form.HEADS + rows
        gl.store(target.partial_lse + at_partial, lse, mask=real)
