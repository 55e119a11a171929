"""The batch-invariant plan of `planner.py` on the device, without a host sync.

A program writes the items of a sequence. It reads the lengths of all, and sums those in front of
its own. So it knows where its items, splits and costs begin, and waits for no other program.
"""

import triton
import triton.language as tl

from mla_fusion.attention.plan import buffers

ITEMS = tl.constexpr(128)  # that a program writes at once
NEAR, FAR = tl.constexpr(buffers.NEAR), tl.constexpr(buffers.FAR)


@triton.jit
def before(values, b, own):
    """The sum of the `values` of the sequences in front of sequence `own`."""
    return tl.sum(tl.where(b < own, values, 0))


@triton.jit
def value_of(values, b, own):
    """The value of sequence `own`."""
    return tl.sum(tl.where(b == own, values, 0))


@triton.jit
def number_of(x, a, b, c, rules: tl.constexpr):
    """The chunks of a sequence that begin in front of `x`, if those of its three kinds take a, b
    and c: tokens, or the costs of their items."""
    MIDDLE: tl.constexpr = (FAR - NEAR) * rules.chunk // rules.middle
    behind = tl.maximum(x - NEAR * a, 0)
    near = tl.minimum((x + a - 1) // a, NEAR)
    middle = tl.minimum((behind + b - 1) // b, MIDDLE)
    return near + middle + (tl.maximum(behind - MIDDLE * b, 0) + c - 1) // c


@triton.jit
def begin_of(n, a, b, c, rules: tl.constexpr):
    """Where chunk `n` of a sequence begins, as above."""
    MIDDLE: tl.constexpr = (FAR - NEAR) * rules.chunk // rules.middle
    behind = tl.maximum(n - NEAR, 0)
    far = tl.maximum(behind - MIDDLE, 0)
    return tl.minimum(n, NEAR) * a + tl.minimum(behind, MIDDLE) * b + far * c


@triton.jit(do_not_specialize=["batch", "busy", "max_query_len", "step_qo_indptr", "seq_lens"])
def mla_plan_chunks(
    step_qo_indptr, seq_lens, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
    reduce_partial_map, qo_indptr, kv_indptr, batch, busy, max_query_len,
    MAX_BATCH: tl.constexpr, RULES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Sequence `program_id(0)` of `batch`. Sequences longer than the plan has room for lose keys,
    and write nothing outside of it. BLOCK_W: CTAs and one more, up to a power of two."""
    FOLD: tl.constexpr = RULES.fold
    own = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    given = b < batch
    query = tl.load(step_qo_indptr + b, mask=given, other=0)
    rows = tl.load(step_qo_indptr + b + 1, mask=given, other=0) - query
    length = tl.load(seq_lens + b, mask=given, other=0)
    planned = tl.where(rows > 0, tl.minimum(length, RULES.room), 0)
    is_live = b < tl.max(tl.where(rows > 0, b + 1, 0))
    chunks = number_of(planned, RULES.chunk, RULES.middle, RULES.far, RULES)
    chunks = tl.where(is_live, tl.maximum(chunks, 1), 0)
    splits = tl.where(chunks > 1, chunks, 0)
    blocks = (planned + RULES.granularity - 1) // RULES.granularity
    cost = tl.where(rows > 0, blocks + chunks * RULES.overhead, 0).to(tl.int64)
    if own == 0:
        end = tl.load(step_qo_indptr + batch)
        end = tl.where(given, query + rows, end)
        tl.store(qo_indptr, 0)
        tl.store(qo_indptr + 1 + b, end, mask=b < MAX_BATCH)
        tl.store(kv_indptr, 0)
        tl.store(kv_indptr + 1 + b, tl.cumsum(length), mask=b < MAX_BATCH)
        tl.store(reduce_indptr, 0)
        for block in range(FOLD):
            end = (tl.cumsum(splits) - splits) * FOLD + (block + 1) * splits
            tl.store(reduce_indptr + 1 + b * FOLD + block, end, mask=b < MAX_BATCH)
    first = before(chunks, b, own) * FOLD
    count = value_of(chunks, b, own)
    write_ctas(work_indptr, cost, chunks, b, own, first, busy, RULES, BLOCK_W)
    query, rows, planned = (
        value_of(query, b, own),
        value_of(rows, b, own),
        value_of(planned, b, own),
    )
    token, partial = before(length, b, own), before(splits, b, own) * FOLD
    for start in range(0, count * FOLD, ITEMS):
        item = start + tl.arange(0, ITEMS)
        mask = item < count * FOLD
        block, chunk = item // count, item % count
        begin = begin_of(chunk, RULES.chunk, RULES.middle, RULES.far, RULES)
        stop = begin_of(chunk + 1, RULES.chunk, RULES.middle, RULES.far, RULES)
        begin, stop = tl.minimum(begin, planned), tl.minimum(stop, planned)
        of_query = query * FOLD + block * rows
        row = work_info_set + (first + item) * 8
        tl.store(row, own * FOLD + block, mask=mask)
        tl.store(row + 1, tl.where(count > 1, (partial + item) * max_query_len, -1), mask=mask)
        tl.store(row + 2, of_query, mask=mask)
        tl.store(row + 3, of_query + rows, mask=mask)
        tl.store(row + 4, token + begin, mask=mask)
        tl.store(row + 5, token + stop, mask=mask)
        tl.store(row + 6, planned - stop, mask=mask)
        tl.store(row + 7, token, mask=mask)
        mask &= count > 1
        at = partial + item
        tl.store(reduce_partial_map + at, at * max_query_len, mask=mask)
        final = reduce_final_map + 2 * (own * FOLD + block)
        tl.store(final, of_query, mask=mask & (chunk == 0))
        tl.store(final + 1, of_query + rows, mask=mask & (chunk == 0))


@triton.jit
def write_ctas(
    work_indptr, cost, chunks, b, own, first, busy, rules: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Write the first item of each CTA whose share of the costs begins in sequence `own`, or behind
    the last item of the sequence in front. first: the number of this sequence's first item."""
    FOLD: tl.constexpr = rules.fold
    # Costs of whole chunks.
    NEARER: tl.constexpr = rules.chunk // rules.granularity + rules.overhead
    MIDDLE: tl.constexpr = rules.middle // rules.granularity + rules.overhead
    FARTHER: tl.constexpr = rules.far // rules.granularity + rules.overhead
    total, begin = tl.sum(cost) * FOLD, before(cost, b, own) * FOLD
    tile, count = value_of(cost, b, own), value_of(chunks, b, own)
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    share = (w * total + busy - 1) // busy
    # Where the last items of this sequence and of the one in front begin.
    last = begin_of(tl.maximum(count - 1, 0), NEARER, MIDDLE, FARTHER, rules)
    last += begin + (FOLD - 1) * tile
    one_before = begin_of(value_of(chunks, b, own - 1) - 1, NEARER, MIDDLE, FARTHER, rules)
    one_before = value_of(cost, b, own - 1) - one_before
    earlier = tl.where(own == 0, -1, begin - one_before)
    inside = tl.maximum(share - begin, 0)
    block = tl.minimum(inside // tl.maximum(tile, 1), FOLD - 1)
    chunk = number_of(inside - block * tile, NEARER, MIDDLE, FARTHER, rules)
    at = first + block * count + tl.minimum(chunk, count)
    wanted = (share > earlier) & (share <= last) & (w < busy)
    tl.store(work_indptr + w, at.to(tl.int32), mask=wanted & (count > 0))
    # CTAs whose share has no item.
    live = tl.sum((chunks > 0).to(tl.int32))
    end = first + count * FOLD
    wanted = (own == tl.maximum(live - 1, 0)) & ((w >= busy) | (share > last) | (live == 0))
    tl.store(work_indptr + w, tl.zeros_like(w).to(tl.int32) + end, mask=wanted & (w <= rules.ctas))
