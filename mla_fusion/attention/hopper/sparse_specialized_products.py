"""The warps of `sparse_specialized.py` that multiply: scores, softmax, halves of the output.

As `warp_specialized_bf16.py`, but a tile arrives at once and later than its products take. So the
next tile's scores have no place behind the products of this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.warp_specialized_bf16 import EXACT, give_last, multiply_left, take
from mla_fusion.attention.hopper.warp_specialized_copy import (
    ROWS,
    TILE,
    WARPS,
    item_of,
    tiles_of,
    turn_of,
)
from mla_fusion.attention.hopper.warp_specialized_scores import raised, start_state
from mla_fusion.attention.hopper.warp_specialized_store import rows_of, store_lse, store_part
from mla_fusion.attention.plan.device_code import LOG2E


class Tiles(NamedTuple):
    """Tiles of keys in shared memory, and two barriers of each.

    keys: [n, tokens, L]. ropes: [n, tokens, R]; nothing reads it if R is 0. slots: [n, tokens], -1
    for none. full: the gathering warps have stored a tile. free: both halves are used.
    """

    keys: Any
    ropes: Any
    slots: Any
    full: Any
    free: Any


@gluon.jit
def scores_of(query, tiles, buffer, R: gl.constexpr, layout: gl.constexpr):
    """Products [rows, tokens] of the query with a tile, -inf where it has no token."""
    HALF: gl.constexpr = query.left.shape[1]
    PART: gl.constexpr = query.right.shape[2]
    keys = tiles.keys.index(buffer)
    s = gl.zeros([ROWS, TILE], gl.float32, layout)
    left = keys.slice(0, HALF, dim=1).permute((1, 0))
    s = warpgroup_mma(query.left, left, s, use_acc=False, is_async=True)
    for part in gl.static_range(2):
        quarter = keys.slice(HALF + part * PART, PART, dim=1).permute((1, 0))
        s = warpgroup_mma(query.right.index(part), quarter, s, is_async=True)
    if R > 0:
        rotated = tiles.ropes.index(buffer).permute((1, 0))
        s = warpgroup_mma(query.ropes, rotated, s, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    seen = tiles.slots.index(buffer).load(gl.SliceLayout(0, layout)) >= 0
    return gl.where(seen[None, :], s, float("-inf"))


@gluon.jit
def score(
    work, query, tiles, shared, target, sink_ptr, factor, R: gl.constexpr, SINK: gl.constexpr,
    HEADS: gl.constexpr, FOLD: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, softmax, and the left half of the output."""
    HALF: gl.constexpr = query.left.shape[1]
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    items = 0
    done = 0
    sent = 0
    begin = gl.load(work.indptr + gl.program_id(0))
    for number in range(begin, gl.load(work.indptr + gl.program_id(0) + 1)):
        item = item_of(work, number, HEADS, FOLD)
        count = tiles_of(item, work.first_row, HEADS)[1]
        m, l = start_state(row_layout)
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        if count > 0:
            mbarrier.wait(query.full, items & 1)
            items += 1
            for _ in range(count):
                buffer, phase = turn_of(done, BUFFERS)
                mbarrier.wait(tiles.full.index(buffer), phase)
                s = scores_of(query, tiles, buffer, R, scores)
                s, base, new_m = raised(s, factor, m, EXACT)
                decay = gl.exp2(m - base)
                m = new_m
                left = tiles.keys.index(buffer).slice(0, HALF, dim=1)
                sums, l, p, others = multiply_left(
                    s, base, decay, factor, acc, l, left, shared, sent
                )
                sent += 1
                # P is in registers, and read until the products end.
                acc, p, others = warpgroup_mma_wait(0, [sums, p, others])
                mbarrier.arrive(tiles.free.index(buffer), count=1)
                done += 1
            mbarrier.arrive(query.free, count=1)
        # The kernel in front may still read what is written here.
        gdc.gdc_wait()
        sink = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
        if SINK:  # noqa: SIM102 (known when compiled; the other one is not)
            if item.partial < 0:
                _rows, head, real = rows_of(work, item, target, row_layout, HEADS)
                sink = gl.load(sink_ptr + head, mask=real, other=float("-inf")) * LOG2E
        lse, inverse = give_last(m, l, sink, shared, sent)
        sent += 1
        store_lse(lse, work, item, target, HEADS, LSE)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
        store_part(acc, work, item, target, 0, 2 * HALF, HEADS)


@gluon.jit
def multiply(work, tiles, shared, target, HEADS: gl.constexpr, FOLD: gl.constexpr):
    """The second warpgroup: the right half of the output."""
    HALF: gl.constexpr = tiles.keys.shape[2] // 2
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    done = 0
    received = 0
    begin = gl.load(work.indptr + gl.program_id(0))
    for number in range(begin, gl.load(work.indptr + gl.program_id(0) + 1)):
        item = item_of(work, number, HEADS, FOLD)
        count = tiles_of(item, work.first_row, HEADS)[1]
        acc = gl.zeros([ROWS, HALF], gl.float32, output)
        for _ in range(count):
            p, factors = take(shared, received, output)
            received += 1
            buffer, phase = turn_of(done, BUFFERS)
            # Complete already; waiting makes the tile visible here.
            mbarrier.wait(tiles.full.index(buffer), phase)
            right = tiles.keys.index(buffer).slice(HALF, HALF, dim=1)
            sums = warpgroup_mma(p, right, acc * factors, is_async=True)
            acc, p = warpgroup_mma_wait(0, [sums, p])
            mbarrier.arrive(tiles.free.index(buffer), count=1)
            done += 1
        _, inverse = take(shared, received, output)
        received += 1
        gdc.gdc_wait()
        store_part(acc * inverse, work, item, target, HALF, 2 * HALF, HEADS)
