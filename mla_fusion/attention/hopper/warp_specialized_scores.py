"""Scores and softmax of a tile in the warp-specialized decode kernel for Hopper, for both types.

See `hopper/warp_specialized.py`. Scores are [rows, tokens], and four threads have a row of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from mla_fusion.attention.hopper.warp_specialized_copy import ROWS, TILE, turn_of
from mla_fusion.attention.plan.device_code import LN2

# Of [rows, 4]: a sum for each of the four threads that have a row of scores.
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
)


@gluon.jit
def start_scores(query, tiles, done, layout: gl.constexpr):
    """Start the products [rows, tokens] of the query with tile number `done` of the CTA: two
    of four, those with its left half and its rotated part.
    """
    buffer, phase = turn_of(done, tiles.left.shape[0])
    mbarrier.wait(tiles.left_full.index(buffer), phase)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    left = tiles.left.index(buffer).permute((1, 0))
    s = warpgroup_mma(query.left, left, s, use_acc=False, is_async=True)
    return warpgroup_mma(query.ropes, tiles.ropes.index(buffer).permute((1, 0)), s, is_async=True)


@gluon.jit
def start_rotated(query, tiles, done, layout: gl.constexpr):
    """Start the product of the query with the rotated part of tile number `done`."""
    buffer, phase = turn_of(done, tiles.left.shape[0])
    mbarrier.wait(tiles.left_full.index(buffer), phase)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    rotated = tiles.ropes.index(buffer).permute((1, 0))
    return warpgroup_mma(query.ropes, rotated, s, use_acc=False, is_async=True)


@gluon.jit
def add_left(s, query, tiles, done):
    """Start the product with the left half, behind `start_rotated`."""
    buffer, _ = turn_of(done, tiles.left.shape[0])
    left = tiles.left.index(buffer).permute((1, 0))
    return warpgroup_mma(query.left, left, s, is_async=True)


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
def start_state(layout: gl.constexpr):
    """m and l of rows that have seen nothing."""
    m = gl.full([ROWS], float("-inf"), gl.float32, layout)
    return m, gl.zeros([ROWS, 4], gl.float32, SUMS)


@gluon.jit
def see(s, token, item, limit, factor, m, SLACK: gl.constexpr):
    """The scores of a tile from `token` on, -inf where a row does not see one; what is subtracted
    from them times `factor`; and the new m.

    factor: of the scores, in base 2. It is positive, so the maximum needs no product of each.
    SLACK: how far a maximum may be above its row's m, in base 2, before m is raised.
    P reaches 2^SLACK, and most decays are 1. Sums and LSE do not depend on where m is.
    """
    # Of the tiles of an item only the first and the last ones have tokens that a row does not see.
    shortest = gl.minimum(item.end, item.end + item.after - (item.count - 1))
    if (token < item.begin) | (token + TILE > shortest):
        at = token + gl.arange(0, TILE, gl.SliceLayout(0, s.type.layout))
        seen = (at >= item.begin)[None, :] & (at[None, :] < limit[:, None])
        s = gl.where(seen, s, float("-inf"))
    return raised(s, factor, m, SLACK)


@gluon.jit
def raised(s, factor, m, SLACK: gl.constexpr):
    """What `see` returns, of scores that are -inf where a row does not see a token."""
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
def decayed(l, decay):
    """The sums of the rows so far, times the decay of each."""
    return l * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def sums_of(p):
    """The sums of P [rows, tokens]. Four threads' sums meet in `result_of`."""
    # A thread has two neighbours of every eight tokens.
    sums = gl.sum(gl.sum(p.reshape([ROWS, p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(sums, SUMS)


@gluon.jit
def two_halves(s, layout: gl.constexpr):
    """The scores of the first 32 tokens and of the others: registers that a thread has already."""
    first, others = gl.split(s.reshape([ROWS, 2, TILE // 2]).permute((0, 2, 1)))
    return gl.convert_layout(first, layout), gl.convert_layout(others, layout)


@gluon.jit
def last_visible(work, item, HEADS: gl.constexpr, layout: gl.constexpr):
    """The end of the tokens that each row sees: row i of n up to n - 1 - i before the end of the
    sequence.
    """
    row = work.first_row + gl.arange(0, ROWS, layout)
    return gl.minimum(item.end, item.end + item.after - (item.count - 1 - row // HEADS))


@gluon.jit
def result_of(m, l, sink=float("-inf")):
    """The natural-log LSE of each row, and what its sums are multiplied by.

    sink: one more score of each row, in base 2, of which the LSE knows nothing.
    """
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    lse = gl.where(l > 0.0, (m + gl.log2(l)) * LN2, float("-inf"))
    return lse, gl.where(l > 0.0, 1.0 / (l + gl.exp2(sink - m)), 0.0)
