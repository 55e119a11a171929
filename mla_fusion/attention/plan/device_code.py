"""Triton code that kernels of several rooms share: work items, the online softmax, ue8m0 scales."""

from collections import namedtuple

import triton
import triton.language as tl

from mla_fusion.attention.plan.epilogue import EPSILON

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LEAST_SCALE = tl.constexpr(EPSILON)

# A work item: KV tokens `begin` to `end` of a sequence, `after` more follow; `partial` row. Of each
# query row of the CTA: head, token, and whether it is no padding.
Item = namedtuple("Item", "sequence partial count head real token begin end after")

# A cache and the row of its table for one sequence: blocks, or slots; strides in elements.
Source = namedtuple("Source", "pointer table block_stride")

# Where results go: final rows, or partial rows for splits.
Target = namedtuple("Target", "out lse partial partial_lse stride_t stride_h heads")


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
def softmax_step(s, seen, scale, m, l):
    """One step of the online softmax: P [tokens, rows], the decay of earlier sums, new m and l."""
    s = tl.where(seen, s * scale, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 0))
    # A row that has seen nothing keeps a P of zero, not NaN.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2(s - base[None, :])
    decay = tl.exp2(m - base)
    return p, decay, new_m, l * decay[None, :] + p


@triton.jit
def power_of_two(scale):
    """The least power of two that is neither below `scale` (fp32) nor `LEAST_SCALE`."""
    bits = tl.maximum(scale, LEAST_SCALE).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
