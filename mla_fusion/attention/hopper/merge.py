"""The latents of a product with W_UV, merged from a plan's splits on their way to shared memory."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.common import barrier
from mla_fusion.attention.plan.device_code import LN2, LOG2E

MERGED = gl.constexpr(64)  # rows of splits that a CTA loads at once

# The splits of a step of `batch` sequences, as `PlanBuffers` has them.
Splits = namedtuple("Splits", "qo_indptr batch reduce_indptr reduce_map partial partial_lse")


@gluon.constexpr_function
def merge_layout(splits, warps):
    """Layout of [splits, rows, latents]. A thread has 16 bytes of each split."""
    return gl.BlockedLayout([splits, 1, 4], [1, 1, 32], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def row_layout(splits, warps):
    """Layout of the rows of what is merged [rows, latents]."""
    return gl.SliceLayout(1, gl.SliceLayout(0, merge_layout(splits, warps)))


@gluon.jit
def splits_of(plan, token, head, HEADS: gl.constexpr, FOLD: gl.constexpr):
    """The first split of each row's tile, the number of splits, and the row in a split. token:
    [rows], of the step. A tile that is whole has no splits."""
    rows: gl.constexpr = token.type.layout
    of_step: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    at = gl.convert_layout(token, gl.SliceLayout(1, of_step))[:, None]
    sequence = gl.zeros([token.shape[0]], gl.int32, rows)
    for first in range(0, plan.batch, 128):
        number = first + gl.arange(0, 128, gl.SliceLayout(0, of_step))
        end = gl.load(plan.qo_indptr + 1 + number, mask=number < plan.batch, other=2**30)
        sequence += gl.convert_layout(gl.sum((end[None, :] <= at).to(gl.int32), 1), rows)
    live = sequence < plan.batch
    tile = sequence * FOLD + head // HEADS
    begin = gl.load(plan.reduce_indptr + tile, mask=live, other=0)
    count = gl.load(plan.reduce_indptr + tile + 1, mask=live, other=0) - begin
    row = token - gl.load(plan.qo_indptr + sequence, mask=live, other=0)
    return begin, count, row * HEADS + head % HEADS


@gluon.jit
def merge_latents(
    target, plan, begin, count, row, pointers, lses, left, HEADS: gl.constexpr, LSE: gl.constexpr
):
    """Merge rows of latents into `target` [rows, L], as `reduce_kernel.py` does; a row without
    splits is read from `pointers` [rows]; zeros from row `left` on. LSE: store it to `lses`."""
    ROWS: gl.constexpr = target.shape[0]
    L: gl.constexpr = target.shape[1]
    SPLITS: gl.constexpr = MERGED // ROWS
    each: gl.constexpr = merge_layout(SPLITS, gl.num_warps())
    of_split: gl.constexpr = gl.SliceLayout(2, each)  # [splits, rows]
    merged: gl.constexpr = gl.SliceLayout(0, each)  # [rows, latents]
    of_row: gl.constexpr = gl.SliceLayout(1, merged)
    begins = gl.convert_layout(begin, gl.SliceLayout(0, of_split))[None, :]
    counts = gl.convert_layout(count, gl.SliceLayout(0, of_split))[None, :]
    rows = gl.convert_layout(row, gl.SliceLayout(0, of_split))[None, :]
    number = gl.arange(0, SPLITS, gl.SliceLayout(1, of_split))[:, None]
    wanted = number < counts
    at = gl.load(plan.reduce_map + begins + number, mask=wanted, other=0)
    # The decode has ended; all before is of the plan.
    gdc.gdc_wait()
    col = gl.arange(0, L, gl.SliceLayout(0, merged))[None, :]
    whole = (count == 0) & (gl.arange(0, ROWS, of_row) < left)
    own = gl.load(pointers[:, None] + col, mask=whole[:, None], other=0.0).to(gl.float32)
    m = gl.full([ROWS], float("-inf"), gl.float32, of_row)
    l = gl.zeros([ROWS], gl.float32, of_row)
    acc = gl.zeros([ROWS, L], gl.float32, merged)
    columns = gl.arange(0, L, gl.SliceLayout(0, gl.SliceLayout(1, each)))[None, None, :]
    for _ in range(0, gl.max(count, 0), SPLITS):
        at = at * HEADS + rows
        lse = gl.load(plan.partial_lse + at, mask=wanted, other=float("-inf")) * LOG2E
        parts = plan.partial + (at.to(gl.int64) * L)[:, :, None] + columns
        part = gl.load(parts, mask=wanted[:, :, None], other=0.0)
        number += SPLITS
        wanted = number < counts
        at = gl.load(plan.reduce_map + begins + number, mask=wanted, other=0)
        new_m = gl.maximum(m, gl.convert_layout(gl.max(lse, 0), of_row))
        base = gl.where(new_m == float("-inf"), 0.0, new_m)
        p = gl.exp2(lse - gl.convert_layout(base, gl.SliceLayout(0, of_split))[None, :])
        decay = gl.exp2(m - base)
        l = l * decay + gl.convert_layout(gl.sum(p, 0), of_row)
        acc = acc * decay[:, None] + gl.sum(part * p[:, :, None], 0)
        m = new_m
    if LSE:
        lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(l)) * LN2)
        gl.store(lses, lse, mask=count > 0)
    acc *= gl.where(l > 0.0, 1.0 / l, 0.0)[:, None]
    target.store((acc + own).to(target.dtype))
    fence_async_shared()
    barrier()
