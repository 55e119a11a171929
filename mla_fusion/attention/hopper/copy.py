"""How the decode kernel for Hopper gets tiles of keys into shared memory, in Gluon.

The tensor copy engine (TMA) copies tiles of whole pages; one thread computes the address. All
threads copy the others, 16 bytes each at a time: over several pages, lists of slots.
"""

import functools
from collections import namedtuple
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_fusion.attention.hopper.tile import pairs_of
from mla_fusion.attention.hopper.work import TILE

# Triton 3.9 renamed all three.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


# What the tiles of a sequence are copied from. first, extra: its scopes; the other is for sparse
# sequences. latents, rotated, block_rows: as `cache_boxes` returns them.
Copies = namedtuple("Copies", "first extra latents rotated block_rows")

# Two tiles in shared memory, and a barrier for each, which the copy engine completes. keys: [2,
# tokens, L]. ropes: [2, tokens, R].
Buffers = namedtuple("Buffers", "keys ropes arrived")


def cache_boxes(kv_cache: torch.Tensor, columns: tuple[int, ...], block_n: int) -> tuple[Any, ...]:
    """`kv_cache` [blocks, page_size, L + R] as the tensor copy engine sees it: one list of rows.

    Returns:
        Descriptors of tiles of `block_n` tokens and so many columns each, and the rows from one
        block to the next. 0 if the engine cannot copy such tiles: they span pages, or blocks are
        not a whole number of rows apart. The descriptors are then the cache, and unused.
    """
    blocks, page_size, _ = kv_cache.shape
    block_stride, entry, _ = kv_cache.stride()
    if page_size % block_n or block_stride % entry:
        return *[kv_cache] * len(columns), 0
    step = block_stride // entry
    return *boxes(kv_cache, [(blocks - 1) * step + page_size], [entry], [block_n], *columns), step


def boxes(
    tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int], *columns: int
) -> tuple[TensorDescriptor, ...]:
    """Descriptors of `block` rows of `shape`, `strides` elements apart, for each of `columns`."""
    whole, strides = [*shape, tensor.shape[-1]], [*strides, 1]
    return tuple(
        TensorDescriptor(tensor, whole, strides, [*block, count], layout)
        for count in columns
        if count and (layout := tile_layout(count, tensor.itemsize, len(block) + 1))
    )


@functools.cache
def tile_layout(columns: int, size: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory; Triton takes microseconds to make it."""
    return gl.NVMMASharedLayout(min(128, columns * size), 8 * size, rank)


@gluon.constexpr_function
def load_layout(width, bits, warps, rows=1):
    """The layout in which threads read 16 bytes each of rows of `width` elements. Of so many `rows`
    a thread has neighbours.
    """
    vector = 128 // bits
    threads = min(32, width // vector)
    rows = max(1, rows // warps // (32 // threads))
    return gl.BlockedLayout([rows, vector], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.jit
def copy_part(
    target, base, source, token, end, ENTRY: gl.constexpr, PAGE: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Start the copy of some columns of tokens `token` ... into `target` [tokens, width].

    base: of the columns, in the cache, or of token `token` if the tile is in one page. Tokens from
    `end` on, and those of slot -1, are not read and become zeros.
    """
    layout: gl.constexpr = load_layout(
        target.shape[1], target.dtype.primitive_bitwidth, gl.num_warps()
    )
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    wanted = row < end - token
    if ROWS == "one page":
        offset = row * ENTRY
    elif ROWS == "pages":
        at = token + row
        page = gl.load(source.table + at // PAGE, mask=wanted, other=0)
        offset = page.to(gl.int64) * source.block_stride + at % PAGE * ENTRY
    else:
        slot = gl.load(source.table + token + row, mask=wanted, other=-1)
        wanted = slot >= 0
        page = (slot // PAGE).to(gl.int64)
        offset = page * source.block_stride + slot % PAGE * ENTRY
    pointers = base + offset[:, None] + col[None, :]
    async_load(target, pointers, mask=wanted[:, None])


@gluon.jit
def copy_tile(
    buffer, source, tile, end, ENTRY: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr
):
    """Start the copy of tile `tile` of a sequence."""
    keys, ropes = buffer.keys, buffer.ropes
    BLOCK_N: gl.constexpr = keys.shape[0]
    rows: gl.constexpr = "slots" if SPARSE else "one page" if PAGE % BLOCK_N == 0 else "pages"
    token = tile * BLOCK_N
    base = source.pointer
    if rows == "one page":
        # Tiles after the end copy nothing; the first page stands in for theirs.
        page = gl.load(source.table + gl.where(token < end, token // PAGE, 0))
        base += page.to(gl.int64) * source.block_stride + token % PAGE * ENTRY
    copy_part(keys, base, source, token, end, ENTRY, PAGE, rows)
    copy_part(ropes, base + keys.shape[1], source, token, end, ENTRY, PAGE, rows)
    async_copy.commit_group()


@gluon.jit
def row_of(copies, token, PAGE: gl.constexpr):
    """The row of the cache that has token `token` of a sequence."""
    page = gl.load(copies.first.table + token // PAGE)
    return page * copies.block_rows + token % PAGE


@gluon.jit
def copy_boxes(buffer, copies, token, BOXES: gl.constexpr, PAGE: gl.constexpr):
    """Have the copy engine copy BOXES * TILE tokens from `token` on, one box or two."""
    keys, ropes = buffer.keys, buffer.ropes
    BITS: gl.constexpr = keys.dtype.primitive_bitwidth
    mbarrier.expect(buffer.arrived, BOXES * TILE * (keys.shape[1] + ropes.shape[1]) * BITS // 8)
    row = row_of(copies, token, PAGE)
    other = row_of(copies, token + TILE, PAGE) if BOXES == 2 else row
    for box in gl.static_range(BOXES):
        at = other if box == 1 else row
        tma_load(copies.latents, [at, 0], buffer.arrived, keys.slice(box * TILE, TILE))
        target = ropes.slice(box * TILE, TILE)
        tma_load(copies.rotated, [at, keys.shape[1]], buffer.arrived, target)


@gluon.jit
def start_copy(buffers, at, copies, tile, end, first_end, form: gl.constexpr, BULK: gl.constexpr):
    """Start the copy of tile `tile` of a sequence into buffer `at`.

    A sparse sequence has the columns of the first scope, then those of the other. BULK: the copy
    engine copies, the tokens after an end too, which may be NaN; none where no token is left.
    """
    buffer = Buffers(buffers.keys.index(at), buffers.ropes.index(at), buffers.arrived.index(at))
    BLOCK_N: gl.constexpr = buffer.keys.shape[0]
    if form.SPARSE:
        SKIP: gl.constexpr = form.FIRST // BLOCK_N
        if tile < SKIP:
            copy_tile(buffer, copies.first, tile, first_end, form.ENTRY, form.PAGE, True)
        else:
            copy_tile(
                buffer, copies.extra, tile - SKIP, end - form.FIRST, form.EXTRA_ENTRY,
                form.EXTRA_PAGE, True,
            )  # fmt: skip
    elif BULK:
        BOXES: gl.constexpr = BLOCK_N // TILE
        token = tile * TILE
        if token + (BOXES - 1) * TILE < end:
            copy_boxes(buffer, copies, token, BOXES, form.PAGE)
        elif BOXES == 2 and token < end:
            copy_boxes(buffer, copies, token, 1, form.PAGE)
    else:
        copy_tile(buffer, copies.first, tile, end, form.ENTRY, form.PAGE, False)


@gluon.jit
def clear_rows(tile, count):
    """Zero the rows of `tile` [tokens, columns] of 16 bits from `count` on: they may hold NaN."""
    COUNT: gl.constexpr = tile.shape[0]
    PART: gl.constexpr = 32
    pairs = pairs_of(tile)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, COUNT, gl.SliceLayout(1, layout))
    for i in gl.static_range(pairs.shape[1] // PART):
        part = pairs.slice(i * PART, PART, dim=1)
        zeros = gl.zeros([COUNT, PART], gl.int32, layout)
        part.store(gl.where((row < count)[:, None], part.load(layout), zeros))
    fence_async_shared()
    barrier()


@gluon.jit
def wait_for_tile(buffers, buffer, phases, left, BULK: gl.constexpr):
    """Wait until a tile has arrived, of `left` tokens; return the next phases of both barriers."""
    if BULK:
        mbarrier.wait(buffers.arrived.index(buffer), phases >> buffer & 1)
        phases ^= 1 << buffer
        keys = buffers.keys.index(buffer)
        # P is zero there. Widened fp8 has no NaN.
        if keys.dtype.primitive_bitwidth == 16 and left < keys.shape[0]:
            clear_rows(keys, left)
    else:
        fence_async_shared()
    return phases
