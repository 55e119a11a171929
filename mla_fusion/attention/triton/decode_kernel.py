"""The portable decode kernel, and the reduction, in Triton.

A program is a worker: it walks over its work items, and in each over tiles of BLOCK_N tokens of
one sequence, with an online softmax in base 2 and fp32 sums. Tiles start at multiples of
BLOCK_N of the sequence, so that a tile lies in one page where pages are multiples of tiles.

Scores and output are transposed, tokens by rows and latents by rows, as `hopper/decode.py` says.

A range of Triton's is a power of two long. Other widths are padded: L_PAD and R_PAD are those
ranges, and `within` masks what lies beyond L and R.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from mla_fusion.attention.triton.byte_cache import read_latents, read_rotated

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Item(NamedTuple):
    """A work item: KV tokens `begin` to `end` of a sequence, `after` more follow; `partial` row.

    Of each query row of the program: head, token, and whether it is real, none of padding.
    """

    sequence: Any
    partial: Any
    count: Any
    head: Any
    real: Any
    token: Any
    begin: Any
    end: Any
    after: Any


class Source(NamedTuple):
    """A cache and the row of its table for one sequence: blocks, or slots; strides in elements."""

    pointer: Any
    table: Any
    block_stride: Any


@triton.jit
def within(mask, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`mask` without columns from WIDTH on, of which a range up to PADDED has some."""
    if PADDED > WIDTH:
        mask &= column < WIDTH
    return mask


@triton.jit
def read_item(
    info, qo_indptr_ptr, kv_indptr_ptr, row, heads, HEADS: tl.constexpr, FOLD: tl.constexpr
):  # fmt: skip
    """The work item in row `info` of work_info_set, for query rows `row`."""
    tile_index = tl.load(info)
    partial = tl.load(info + 1)
    count = tl.load(info + 3) - tl.load(info + 2)
    kv_start = tl.load(info + 4)
    kv_end = tl.load(info + 5)
    after = tl.load(info + 6)
    sequence = tile_index // FOLD
    head = tile_index % FOLD * HEADS + row % HEADS
    real = (row // HEADS < count) & (head < heads)
    token = tl.load(qo_indptr_ptr + sequence).to(tl.int64) + row // HEADS
    kv_base = tl.load(kv_indptr_ptr + sequence)
    begin, end = kv_start - kv_base, kv_end - kv_base
    return Item(sequence, partial, count, head, real, token, begin, end, after)


@triton.jit
def listed_entries(
    at, wanted, source, ENTRY: tl.constexpr, PAGE: tl.constexpr, BEHIND: tl.constexpr
):  # fmt: skip
    """Addresses of the slots that the table lists for tokens `at`, and a mask of the valid ones.

    And with BEHIND those of the eight bytes for each entry that follow a page's entries.
    """
    slot = tl.load(source.table + at, mask=wanted, other=-1)
    wanted &= slot >= 0
    slot = tl.where(wanted, slot, 0)
    page = (slot // PAGE).to(tl.int64)
    entry = source.pointer + page * source.block_stride + slot % PAGE * ENTRY
    exponents = entry
    if BEHIND:
        exponents = source.pointer + page * source.block_stride + (PAGE * ENTRY + slot % PAGE * 8)
    return entry, wanted, exponents


@triton.jit
def tile_entries(
    tile, at, item, source, extra, first_lens_ptr, ENTRY: tl.constexpr, PAGE: tl.constexpr,
    EXTRA_ENTRY: tl.constexpr, EXTRA_PAGE: tl.constexpr, FIRST: tl.constexpr,
    SPARSE: tl.constexpr, BEHIND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Addresses of tokens `at` of a tile, and a mask and more as `listed_entries` has them."""
    wanted = (at >= item.begin) & (at < item.end)
    if SPARSE:
        if tile * BLOCK_N < FIRST:
            wanted &= at < tl.load(first_lens_ptr + item.sequence)
            entry, wanted, exponents = listed_entries(at, wanted, source, ENTRY, PAGE, BEHIND)
        else:
            entry, wanted, exponents = listed_entries(
                at - FIRST, wanted, extra, EXTRA_ENTRY, EXTRA_PAGE, BEHIND
            )
    else:
        if PAGE % BLOCK_N == 0:
            page = tl.load(source.table + tile * BLOCK_N // PAGE)
        else:
            page = tl.load(source.table + at // PAGE, mask=wanted, other=0)
        entry = source.pointer + page.to(tl.int64) * source.block_stride + at % PAGE * ENTRY
        exponents = entry
    return entry, wanted, exponents


@triton.jit
def softmax_step(s, seen, scale, peak, total):
    """One step of the online softmax: weights [tokens, rows], decay of earlier sums, new state."""
    s = tl.where(seen, s * scale, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 0))
    # A row that has seen nothing keeps weights of zero, not NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(s - base[None, :])
    decay = tl.exp2(peak - base)
    return p, decay, new_peak, total * decay[None, :] + p


@triton.jit
def store_item(
    acc, peak, total, value_scale, item, row, heads, sink_ptr, out_ptr, lse_ptr, partial_ptr,
    partial_lse_ptr, out_stride_t, out_stride_h, L: tl.constexpr, L_PAD: tl.constexpr,
    HEADS: tl.constexpr, SINK: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Normalize the sums and write them: to the output, or to partial rows for a piece."""
    latent = tl.arange(0, L_PAD)
    head, real, partial = item.head, item.real, item.partial
    divisor = tl.sum(total, 0)
    lse = tl.where(divisor > 0.0, (peak + tl.log2(divisor)) * LN2, float("-inf"))
    if SINK:  # noqa: SIM102 (known when compiled; the other one is not)
        if partial < 0:
            divisor += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E - peak)
    output = acc * tl.where(lse > float("-inf"), value_scale / divisor, 0.0)[None, :]
    if partial < 0:
        final = out_ptr + item.token * out_stride_t + head * out_stride_h
        final = final[None, :] + latent[:, None]
        wanted = within(real[None, :], latent[:, None], L, L_PAD)
        tl.store(final, output.to(out_ptr.dtype.element_ty), mask=wanted)
        if LSE:
            tl.store(lse_ptr + item.token * heads + head, lse, mask=real)
    else:
        at_partial = partial.to(tl.int64) * HEADS + row
        piece = partial_ptr + at_partial * L
        wanted = within(real[None, :], latent[:, None], L, L_PAD)
        tl.store(piece[None, :] + latent[:, None], output, mask=wanted)
        tl.store(partial_lse_ptr + at_partial, lse, mask=real)


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@triton.jit(do_not_specialize=["table_stride", "extra_table_stride"])
def decode_kernel(
    q_ptr, kv_ptr, table_ptr, extra_ptr, extra_table_ptr, first_lens_ptr, sink_ptr, out_ptr,
    lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, qo_indptr_ptr,
    kv_indptr_ptr, q_scale_ptr, kv_scale_ptr, scale, heads, q_stride_t, q_stride_h, out_stride_t,
    out_stride_h, table_stride, block_stride, extra_table_stride, extra_block_stride,
    ENTRY: tl.constexpr, PAGE: tl.constexpr, EXTRA_ENTRY: tl.constexpr, EXTRA_PAGE: tl.constexpr,
    FIRST: tl.constexpr, SPARSE: tl.constexpr, SINK: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, BEHIND: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    L_PAD: tl.constexpr, R_PAD: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, LSE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One worker (program 0) and one block of ROWS query rows (program 1).

    Tensors are those of `mla_fusion.attention.persistent_mla_decode` and of its plan. scale: of the
    scores, before the scales of q and the cache. ENTRY: stride of tokens in a page. HEADS, FOLD:
    `heads_per_work` and `fold` of the plan. A query row is position * HEADS + head. LSE: `lse_ptr`
    is written. DOT: the type of both products.

    SPARSE: `table_ptr` lists slots instead of blocks, -1 for none. A sequence is FIRST tokens of
    the first scope, of which the first `first_lens_ptr` count, then those of the `extra_` scope.
    SINK: `sink_ptr` [heads] holds one more score for each head, of a key whose value is zero.
    GROUP: not 0 for caches of bytes, of e4m3 type here; with CODES and BEHIND as `read_latents`
    says. R is 0 where the rotated values are latents.
    """
    scale *= LOG2E
    value_scale = 1.0
    if q_ptr.dtype.element_ty.primitive_bitwidth == 8:
        scale *= tl.load(q_scale_ptr)
    if kv_ptr.dtype.element_ty.primitive_bitwidth == 8 and GROUP == 0:
        value_scale = tl.load(kv_scale_ptr)
        scale *= value_scale
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    latent = tl.arange(0, L_PAD)
    rope = L + tl.arange(0, R_PAD)
    for work in range(
        tl.load(work_indptr_ptr + tl.program_id(0)), tl.load(work_indptr_ptr + tl.program_id(0) + 1)
    ):
        info = work_info_ptr + 8 * work
        item = read_item(info, qo_indptr_ptr, kv_indptr_ptr, row, heads, HEADS, FOLD)
        sequence = item.sequence.to(tl.int64)
        source = Source(kv_ptr, table_ptr + sequence * table_stride, block_stride)
        extra_table = extra_table_ptr + sequence * extra_table_stride
        extra = Source(extra_ptr, extra_table, extra_block_stride)
        # Row blocks after the query rows of this sequence have nothing to do.
        has_rows = first_row < HEADS * item.count
        stop = tl.where(has_rows, tl.cdiv(item.end, BLOCK_N), item.begin // BLOCK_N)

        query = q_ptr + item.token * q_stride_t + item.head * q_stride_h
        real = item.real[None, :]
        is_latent = within(real, latent[:, None], L, L_PAD)
        is_rope = within(real, rope[:, None], L + R, L + R_PAD)
        q_latent = tl.load(query[None, :] + latent[:, None], mask=is_latent, other=0.0)
        q_rope = tl.load(query[None, :] + rope[:, None], mask=is_rope, other=0.0)
        q_latent = q_latent.to(DOT)
        q_rope = q_rope.to(DOT)
        # Row i of n sees tokens up to n - 1 - i before the end of the sequence.
        limit = tl.minimum(item.end, item.end + item.after - (item.count - 1 - row // HEADS))
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_N, ROWS], tl.float32)
        acc = tl.zeros([L_PAD, ROWS], tl.float32)
        for tile in tl.range(item.begin // BLOCK_N, stop):
            at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            entry, wanted, exponents = tile_entries(
                tile, at, item, source, extra, first_lens_ptr, ENTRY, PAGE, EXTRA_ENTRY,
                EXTRA_PAGE, FIRST, SPARSE, BEHIND, BLOCK_N,
            )  # fmt: skip
            if GROUP > 0:
                s = tl.zeros([BLOCK_N, ROWS], tl.float32)
                if R > 0:
                    s = tl.dot(read_rotated(entry, wanted, CODES, GROUP, R), q_rope, s)
                key = read_latents(entry, exponents, wanted, CODES, GROUP, BEHIND, L, BLOCK_N)
                s = tl.dot(key, q_latent, s)
            else:
                of_key = within(wanted[:, None], latent[None, :], L, L_PAD)
                of_rope = within(wanted[:, None], rope[None, :], L + R, L + R_PAD)
                key = tl.load(entry[:, None] + latent[None, :], mask=of_key, other=0.0)
                key_rope = tl.load(entry[:, None] + rope[None, :], mask=of_rope, other=0.0)
                key = key.to(DOT)
                s = tl.dot(key, q_latent)
                s = tl.dot(key_rope.to(DOT), q_rope, s)
            seen = wanted[:, None] & (at[:, None] < limit[None, :])
            p, decay, peak, total = softmax_step(s, seen, scale, peak, total)
            acc = tl.dot(tl.trans(key), p.to(DOT), acc * decay[None, :])
        store_item(
            acc, peak, total, value_scale, item, row, heads, sink_ptr, out_ptr, lse_ptr,
            partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, L, L_PAD, HEADS, SINK, LSE,
        )  # fmt: skip


@triton.jit
def merge_step(lse, part, peak, total, acc):
    """Merge PIECES more pieces: their LSE [pieces, rows] in base 2, outputs [..., columns]."""
    new_peak = tl.maximum(peak, tl.max(lse, 0))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(lse - base[None, :])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(p, 0)
    acc = acc * decay[:, None] + tl.sum(part * p[:, :, None], 0)
    return new_peak, total, acc


@triton.jit
def reduce_kernel(
    partial_ptr, partial_lse_ptr, reduce_indptr_ptr, reduce_final_map_ptr, reduce_partial_map_ptr,
    qo_indptr_ptr, sink_ptr, out_ptr, lse_ptr, heads, out_stride_t, out_stride_h,
    SINK: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, LSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of tile `program 0`: ROWS query rows from ROWS * `program 1` on.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), over PIECES pieces at once
    and for COLUMNS latents (program 2; the last one may have fewer). The decode kernel writes tiles
    that were not split. PDL: the launch precedes the end of the decode kernel, which has waited for
    the plan; this kernel waits for the decode before it reads anything else.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PADDED: tl.constexpr = (L + COLUMNS - 1) // COLUMNS * COLUMNS
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(reduce_indptr_ptr + tile)
    last = tl.load(reduce_indptr_ptr + tile + 1)
    if first == last:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    count = tl.load(reduce_final_map_ptr + 2 * tile + 1) - tl.load(reduce_final_map_ptr + 2 * tile)
    head = tile % FOLD * HEADS + row % HEADS
    real = (row // HEADS < count) & (head < heads)
    token = tl.load(qo_indptr_ptr + tile // FOLD).to(tl.int64) + row // HEADS
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, PIECES):
        piece = start + tl.arange(0, PIECES)
        at = tl.load(reduce_partial_map_ptr + piece, mask=piece < last, other=0).to(tl.int64)
        at = at[:, None] * HEADS + row[None, :]
        if PDL:
            tl.extra.cuda.gdc_wait()
        wanted = (piece < last)[:, None] & real[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=wanted, other=float("-inf")) * LOG2E
        values = partial_ptr + at[:, :, None] * L + column[None, None, :]
        of_piece = within(wanted[:, :, None], column[None, None, :], L, PADDED)
        part = tl.load(values, mask=of_piece, other=0.0)
        peak, total, acc = merge_step(lse, part, peak, total, acc)
    lse = tl.where(total > 0.0, (peak + tl.log2(total)) * LN2, float("-inf"))
    if SINK:
        total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E - peak)
    acc *= tl.where(lse > float("-inf"), 1.0 / total, 0.0)[:, None]
    final = out_ptr + token * out_stride_t + head * out_stride_h
    of_row = within(real[:, None], column[None, :], L, PADDED)
    tl.store(final[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=of_row)
    if LSE:  # noqa: SIM102 (known when compiled; the other one is not)
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + token * heads + head, lse, mask=real)
