"""Parts that kernels for Hopper (sm_90) share: the work items of a plan, boxes and layouts of
tiles, and pairs of neighbours in integers: the bytes of a 16-bit one are two e4m3 latents of a
token."""

import functools
from collections import namedtuple
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mla_fusion.attention.hopper import cards

TILE = gl.constexpr(cards.TILE)

# Triton 3.9 renamed all four.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# PTX that converts both bytes of an int16, two at a time.
BOTH = gl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")

# What all warps read: the plan, the table of each scope, and the query rows of this CTA.
Work = namedtuple(
    "Work",
    "indptr info table table_stride extra_table extra_table_stride first_row",
)

# A work item: KV tokens `begin` to `end` of a sequence, `after` more follow; `partial` row. Its
# query is the heads from `first_head` on, of the `count` rows from `token` on; the tables are the
# rows of the sequence.
Item = namedtuple(
    "Item", "sequence first_head partial count token begin end after table extra_table"
)


@gluon.jit
def load_kept(pointer):
    """A number of the plan or of a block table. L2 keeps it while caches stream through."""
    return gl.load(pointer, eviction_policy="evict_last")


@gluon.jit
def items_of(work):
    """The first work item of this CTA, and the one behind its last."""
    begin = load_kept(work.indptr + gl.program_id(0))
    return begin, load_kept(work.indptr + gl.program_id(0) + 1)


@gluon.jit
def read_item(work, number, form: gl.constexpr):
    """Work item `number` of the plan: a row of work_info_set."""
    info = work.info + 8 * number
    tile_index = load_kept(info)
    partial = load_kept(info + 1)
    query = load_kept(info + 2)
    count = load_kept(info + 3) - query
    kv_start = load_kept(info + 4)
    kv_end = load_kept(info + 5)
    after = load_kept(info + 6)
    kv_base = load_kept(info + 7)
    sequence, block = tile_index // form.FOLD, tile_index % form.FOLD
    first_head = block * form.HEADS
    token = ((query - block * count) // form.FOLD).to(gl.int64)
    table = work.table + sequence.to(gl.int64) * work.table_stride
    extra_table = work.extra_table + sequence.to(gl.int64) * work.extra_table_stride
    begin, end = kv_start - kv_base, kv_end - kv_base
    return Item(sequence, first_head, partial, count, token, begin, end, after, table, extra_table)


@gluon.jit
def is_edge(is_outer, tokens, CHUNKS: gl.constexpr):
    """Whether the query changes at the begin or end of an item: `is_outer` says whether the items
    of the CTA begin or end there, `tokens` is how many of the sequence lie beyond. Without CHUNKS
    each item has a query of its own."""
    edge = True
    if CHUNKS:
        edge = is_outer | (tokens == 0)
    return edge


@gluon.jit
def tiles_of(work, item, form: gl.constexpr):
    """First tile of an item, and how many it has: none if the CTA has no rows in it."""
    first = item.begin // TILE
    count = (item.end + TILE - 1) // TILE - first
    return first, gl.where(work.first_row < form.HEADS * item.count, count, 0)


def cache_boxes(
    kv_cache: torch.Tensor, columns: tuple[int, ...], tokens: int = cards.TILE
) -> tuple[Any, ...]:
    """`kv_cache` [blocks, page_size, L + R] as the tensor copy engine sees it, one list of rows:
    descriptors of boxes of `tokens`, one for each of `columns`, and the rows from one block to the
    next. 0 if the engine cannot copy such boxes: they span pages, or blocks are not a whole number
    of rows apart. The descriptors are then the cache, and unused."""
    blocks, page_size, _ = kv_cache.shape
    block_stride, entry, _ = kv_cache.stride()
    if page_size % tokens or block_stride % entry:
        return *[kv_cache] * len(columns), 0
    step = block_stride // entry
    rows = (blocks - 1) * step + page_size
    return *boxes(kv_cache, [rows], [entry], [tokens], *columns), step


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
def load_layout(width, dtype, warps, rows=1):
    """The layout of a load of rows of `width` elements: 16 bytes of a row for each thread. With
    several `rows` a thread has neighbouring ones."""
    vector = 128 // dtype.primitive_bitwidth
    threads = min(32, width // vector)
    rows = max(1, rows // warps // (32 // threads))
    return gl.BlockedLayout([rows, vector], [32 // threads, threads], [warps, 1], [1, 0])


@gluon.jit
def widen_pairs(pairs):
    """The low and the high bytes of int16 `pairs`, e4m3, as fp16: exact, and NaN stays NaN."""
    return gl.inline_asm_elementwise(BOTH, "=r,=r,r", [pairs], (gl.float16, gl.float16), True, 2)


@gluon.jit
def reinterpret(shared, TYPE: gl.constexpr, SHAPE: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as another type or shape."""
    if RENAMED:
        view = shared.reinterpret(TYPE, SHAPE, layout)
    else:
        view = shared._reinterpret(TYPE, SHAPE, layout)
    return view


@gluon.jit
def pairs_of(tile):
    """A tile in shared memory [tokens, columns] as integers of two neighbours."""
    BITS: gl.constexpr = 2 * tile.dtype.primitive_bitwidth
    SHAPE: gl.constexpr = [tile.shape[0], tile.shape[1] // 2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    return reinterpret(tile, gl.int16 if BITS == 16 else gl.int32, SHAPE, layout)


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
