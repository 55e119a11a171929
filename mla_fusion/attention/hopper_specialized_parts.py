"""What the warps of the specialized decode kernel for Hopper share: types, copies and stores.

See `hopper_specialized.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper_copy import barrier, tile_layout, tma_load
from mla_fusion.attention.hopper_kernel import load_query, read_item

ROWS = gl.constexpr(64)  # query rows of a program: the M of WGMMA
TILE = gl.constexpr(64)  # tokens
WARPS = gl.constexpr(4)  # a warpgroup


class Work(NamedTuple):
    """What all warps read: the plan, and the query's rows of this program."""

    indptr: Any
    info: Any
    qo_indptr: Any
    kv_indptr: Any
    table: Any
    table_stride: Any
    first_row: Any


class Tiles(NamedTuple):
    """Two tiles of keys in shared memory, and their barriers.

    left, ropes: [2, tokens, columns]. right: [4, tokens, columns], two quarters of each tile.
    """

    left: Any
    right: Any
    ropes: Any
    left_full: Any
    right_full: Any
    left_free: Any
    right_free: Any


class Weights(NamedTuple):
    """Weights [rows, tokens] of a tile, factors [rows] of the sums so far, and their barriers."""

    weights: Any
    factors: Any
    full: Any
    free: Any


class Query(NamedTuple):
    """The query in global memory, and where its parts go in shared memory, [rows, columns]."""

    pointer: Any
    stride_t: Any
    stride_h: Any
    heads: Any
    left: Any
    right: Any
    ropes: Any


class Target(NamedTuple):
    """Where results go: final rows, or partial rows for pieces."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    stride_t: Any
    stride_h: Any
    heads: Any


def descriptors(kv_cache: torch.Tensor, latent: int) -> tuple[object, object, object, int]:
    """`kv_cache` [blocks, page_size, L + R] as the tensor copy engine sees it: one list of rows.

    Returns:
        Descriptors of 64 tokens of half of their latent, of a quarter, and of their rotated part,
        and the rows from one block to the next.

    Raises:
        ValueError: tiles span pages, or blocks are not a whole number of rows apart.
    """
    blocks, page_size, width = kv_cache.shape
    step, entry, _ = kv_cache.stride()
    tile = TILE.value
    if page_size % tile or step % entry:
        raise ValueError(
            f"the specialized kernel copies {tile} tokens of a page at once, from blocks that are "
            f"whole entries apart, got pages of {page_size} tokens, {step} and {entry} elements "
            "from one block and entry to the next: leave the choice of the kernel to the provider"
        )
    rows = (blocks - 1) * (step // entry) + page_size

    def part(columns: int) -> TensorDescriptor:
        layout = tile_layout(columns, kv_cache.itemsize)
        return TensorDescriptor(kv_cache, [rows, width], [entry, 1], [tile, columns], layout)

    return part(latent // 2), part(latent // 4), part(width - latent), step // entry


@gluon.jit
def tiles_of(item, first_row, HEADS: gl.constexpr):
    """First tile of an item, and how many it has: none if the program has no rows in it."""
    first = item.begin // TILE
    count = (item.end + TILE - 1) // TILE - first
    return first, gl.where(first_row < HEADS * item.count, count, 0)


@gluon.jit
def item_of(work, number, HEADS: gl.constexpr, FOLD: gl.constexpr):
    """Work item `number` of the plan."""
    return read_item(
        work.info + 8 * number, work.qo_indptr, work.kv_indptr, work.table, work.table,
        work.table_stride, work.table_stride, HEADS, FOLD,
    )  # fmt: skip


@gluon.jit
def copy(
    work, tiles, halves, quarters, ropes, block_rows, PAGE: gl.constexpr, HEADS: gl.constexpr,
    FOLD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The copying warp: all tiles of all items, in order."""
    HALF: gl.constexpr = tiles.left.shape[2]
    PART: gl.constexpr = tiles.right.shape[2]
    R: gl.constexpr = tiles.ropes.shape[2]
    SIZE: gl.constexpr = tiles.left.dtype.primitive_bitwidth // 8
    done = 0
    begin = gl.load(work.indptr + gl.program_id(0))
    for number in range(begin, gl.load(work.indptr + gl.program_id(0) + 1)):
        item = item_of(work, number, HEADS, FOLD)
        first, count = tiles_of(item, work.first_row, HEADS)
        if PDL:
            gdc.gdc_wait()
        for t in range(first, first + count):
            token = t * TILE
            row = gl.load(item.table + token // PAGE) * block_rows + token % PAGE
            buffer = done % 2
            # Free from the start: the phase before the first counts as completed.
            phase = (done // 2) % 2
            mbarrier.wait(tiles.left_free.index(buffer), phase ^ 1)
            full = tiles.left_full.index(buffer)
            mbarrier.expect(full, TILE * (HALF + R) * SIZE)
            tma_load(halves, [row, 0], full, tiles.left.index(buffer))
            tma_load(ropes, [row, 2 * HALF], full, tiles.ropes.index(buffer))
            for part in gl.static_range(2):
                quarter = 2 * buffer + part
                mbarrier.wait(tiles.right_free.index(quarter), phase ^ 1)
                full = tiles.right_full.index(quarter)
                mbarrier.expect(full, TILE * PART * SIZE)
                tma_load(quarters, [row, HALF + part * PART], full, tiles.right.index(quarter))
            done += 1


@gluon.jit
def clear_rows(tile, count):
    """Zero the rows of `tile` [tokens, columns] from `count` on: they may hold NaN."""
    PART: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    for i in gl.static_range(tile.shape[1] // PART):
        part = tile.slice(i * PART, PART, dim=1)
        part.store(gl.where((row < count)[:, None], part.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def put(shared, p, factors, sent):
    """Store the weights and factors of a tile for both warpgroups, the `sent`-th time."""
    mbarrier.wait(shared.free, (sent % 2) ^ 1)
    shared.weights.store(p.to(shared.weights.dtype))
    shared.factors.store(factors)
    fence_async_shared()
    barrier()


@gluon.jit
def load_rows(query, item, first_row, HEADS: gl.constexpr):
    """The query's rows of an item into shared memory."""
    HALF: gl.constexpr = query.left.shape[1]
    PART: gl.constexpr = query.right.shape[2]
    rows = query.pointer + item.token * query.stride_t
    steps = query.stride_t, query.stride_h
    load_query(query.left, rows, item, first_row, query.heads, *steps, HEADS, WARPS)
    for part in gl.static_range(2):
        load_query(
            query.right.index(part), rows + HALF + part * PART, item, first_row, query.heads,
            *steps, HEADS, WARPS,
        )  # fmt: skip
    load_query(query.ropes, rows + 2 * HALF, item, first_row, query.heads, *steps, HEADS, WARPS)
    fence_async_shared()
    barrier()


@gluon.jit
def store_part(acc, work, item, target, FIRST: gl.constexpr, L: gl.constexpr, HEADS: gl.constexpr):
    """Store normalized sums [rows, columns] in the columns from FIRST on."""
    layout: gl.constexpr = acc.type.layout
    rows = work.first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    col = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    head = item.first_head + rows % HEADS
    real = (rows // HEADS < item.count) & (head < target.heads)
    if item.partial < 0:
        at_token = item.token + rows // HEADS
        final = target.out + at_token * target.stride_t + head * target.stride_h
        TYPE: gl.constexpr = target.out.dtype.element_ty
        gl.store(final[:, None] + col[None, :], acc.to(TYPE), mask=real[:, None])
    else:
        at_partial = (item.partial.to(gl.int64) * HEADS) + rows
        gl.store(target.partial + at_partial[:, None] * L + col[None, :], acc, mask=real[:, None])


@gluon.jit
def store_lse(lse, work, item, target, HEADS: gl.constexpr, LSE: gl.constexpr):
    """Store the natural-log LSE of each row."""
    rows = work.first_row + gl.arange(0, ROWS, lse.type.layout)
    head = item.first_head + rows % HEADS
    real = (rows // HEADS < item.count) & (head < target.heads)
    if item.partial < 0:
        if LSE:
            at_token = item.token + rows // HEADS
            gl.store(target.lse + at_token * target.heads + head, lse, mask=real)
    else:
        at_partial = (item.partial.to(gl.int64) * HEADS) + rows
        gl.store(target.partial_lse + at_partial, lse, mask=real)
