"""How the warp-specialized decode kernel stores its results.

See `warp_specialized.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from mla_fusion.attention.hopper.warp_specialized_copy import ROWS


@gluon.constexpr_function
def store_layout(columns):
    """The layout in which a thread stores four neighbours of a row, and four threads 16.

    In that of products they are pairs, and four threads' fill half of a memory sector. From there
    to here two threads of a warp exchange pairs by shuffles. More than four would go through shared
    memory, which is full.
    """
    wide = [[0, 16 << i] for i in range((columns // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], *wide],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@gluon.jit
def rows_of(work, item, target, layout: gl.constexpr, HEADS: gl.constexpr):
    """The rows of an item that this CTA has, and which of them are real."""
    rows = work.first_row + gl.arange(0, ROWS, layout)
    head = item.first_head + rows % HEADS
    return rows, head, (rows // HEADS < item.count) & (head < target.heads)


@gluon.jit
def final_rows(rows, head, item, target, HEADS: gl.constexpr):
    """Where `rows` of the output begin."""
    return target.out + (item.token + rows // HEADS) * target.stride_t + head * target.stride_h


@gluon.jit
def partial_rows(rows, item, HEADS: gl.constexpr):
    """Numbers of the partial rows for `rows` of a split."""
    return (item.partial.to(gl.int64) * HEADS) + rows


@gluon.jit
def store_part(acc, work, item, target, FIRST: gl.constexpr, L: gl.constexpr, HEADS: gl.constexpr):
    """Store normalized sums [rows, columns] in the columns from FIRST on."""
    layout: gl.constexpr = store_layout(acc.shape[1])
    rows, head, real = rows_of(work, item, target, gl.SliceLayout(1, layout), HEADS)
    col = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    if item.partial < 0:
        final = final_rows(rows, head, item, target, HEADS)[:, None] + col[None, :]
        TYPE: gl.constexpr = target.out.dtype.element_ty
        gl.store(final, gl.convert_layout(acc.to(TYPE), layout), mask=real[:, None])
    else:
        at_partial = partial_rows(rows, item, HEADS)
        partial = target.partial + at_partial[:, None] * L + col[None, :]
        gl.store(partial, gl.convert_layout(acc, layout), mask=real[:, None])


@gluon.constexpr_function
def pairs_layout(pairs):
    """That of products [pairs, rows], of [pairs, groups, 8 rows]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [pairs, 8, 8],
    )


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
def store_pairs(
    even, odd, work, item, target, FIRST: gl.constexpr, L: gl.constexpr, HEADS: gl.constexpr
):
    """Store normalized sums [columns / 2, rows] of even and odd columns from FIRST on.

    Eight rows are heads of one token. All threads have the same eight groups of them in registers,
    so a group's address is one number for all, and a thread's place in it another.
    """
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
    head = item.first_head + first % HEADS
    real = (first // HEADS < item.count) & (head + row < target.heads)
    if item.partial < 0:
        final = final_rows(first, head, item, target, HEADS) + row * target.stride_h + FIRST
        values = pairs_in(even, odd, target.out.dtype.element_ty, layout)
        gl.store(final.to(gl.pointer_type(gl.int32), bitcast=True) + col, values, mask=real)
    else:
        partial = target.partial + (partial_rows(first, item, HEADS) + row) * L + FIRST
        wide = pairs_in(even, odd, gl.float32, layout)
        gl.store(partial.to(gl.pointer_type(gl.int64), bitcast=True) + col, wide, mask=real)


@gluon.jit
def store_lse(lse, work, item, target, HEADS: gl.constexpr, LSE: gl.constexpr):
    """Store the natural-log LSE of each row."""
    layout: gl.constexpr = lse.type.layout
    rows, head, real = rows_of(work, item, target, layout, HEADS)
    if item.partial < 0:
        if LSE:
            at_token = item.token + rows // HEADS
            gl.store(target.lse + at_token * target.heads + head, lse, mask=real)
    else:
        gl.store(target.partial_lse + partial_rows(rows, item, HEADS), lse, mask=real)
