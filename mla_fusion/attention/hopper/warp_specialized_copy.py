"""What the warps of `warp_specialized.py` share, and the warp that copies."""

from collections import namedtuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.copy import boxes, tma_load
from mla_fusion.attention.hopper.tile import reinterpret
from mla_fusion.attention.hopper.work import TILE, items_of, read_item, tiles_of

ROWS = gl.constexpr(64)  # query rows of a CTA: the M of WGMMA
WARPS = gl.constexpr(4)  # a warpgroup


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


def columns_of(latent: int, rotated: int) -> tuple[int, int, int]:
    """Columns of each of `Boxes`."""
    return latent // 2, latent // 4, rotated


def query_boxes(q: torch.Tensor, latent: int, per_work: int) -> tuple[TensorDescriptor, ...]:
    """`Boxes` of the query [tokens, heads, L + R] for items of `per_work` heads: 64 heads of a
    token, or all of an item's of several tokens; no last one if R is 0.

    Heads of padding are zeros. The rows that follow those of an item belong to other tokens, or are
    zeros. What either gives is not stored.
    """
    heads = per_work if ROWS.value % per_work == 0 else ROWS.value
    block, columns = [ROWS.value // heads, heads], columns_of(latent, q.shape[2] - latent)
    return boxes(q, [*q.shape[:2]], [*q.stride()[:2]], block, *columns)


@gluon.constexpr_function
def log2_of(count):
    """Of a power of two."""
    assert count & (count - 1) == 0, "numbers choose their buffer by their low bits"
    return count.bit_length() - 1


@gluon.jit
def turn_of(number, COUNT: gl.constexpr):
    """Which of COUNT buffers, a power of two, number `number` has, and the phase of its barriers.

    By bits: `number` is signed to the compiler, and a signed remainder takes more instructions.
    """
    SHIFT: gl.constexpr = log2_of(COUNT)
    return number & (COUNT - 1), (number >> SHIFT) & 1


@gluon.jit
def copy(work, query, tiles, cache, block_rows, form: gl.constexpr):
    """The copying warp: the query and all tiles of all items, in order."""
    HALF: gl.constexpr = tiles.left.shape[2]
    PART: gl.constexpr = tiles.right.shape[2]
    R: gl.constexpr = tiles.ropes.shape[2]
    SIZE: gl.constexpr = tiles.left.dtype.primitive_bitwidth // 8
    BUFFERS: gl.constexpr = tiles.left.shape[0]
    items = 0
    done = 0
    begin, end = items_of(work)
    is_short = 2 * gl.load(work.indptr + gl.num_programs(0)) <= gl.num_programs(0)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        if number == begin:
            # Once: the kernel in front has ended then.
            gdc.gdc_wait()
        if count > 0:
            # Free from the start: the phase before the first counts as completed.
            mbarrier.wait(query.free, (items & 1) ^ 1)
            copy_query(query, work, item, R, form.HEADS)
            items += 1
        for t in range(first, first + count):
            token = t * TILE
            row = gl.load(item.table + token // form.PAGE) * block_rows + token % form.PAGE
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
                tma_load(
                    cache.quarters, [row, HALF + part * PART], full, tiles.right.index(quarter)
                )
            done += 1
    # The reduction may be launched, and waits: where half of the CTAs have nothing to do, its
    # own find room beside those that have. Idle CTAs signal when they end.
    if SIZE == 1 and is_short & (begin < end):
        gdc.gdc_launch_dependents()


@gluon.jit
def copy_query(query, work, item, R: gl.constexpr, HEADS: gl.constexpr):
    """Start the copy of the query rows of an item. R: rotated columns, or 0."""
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
    target = reinterpret(target, target.dtype, SHAPE, layout)
    tma_load(box, [token, head, column], full, target)
