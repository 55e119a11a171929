"""The planner of `planner.py` on the device: one CTA, no host sync, the same plan.

Cost, once a model step: two integers read for each sequence, 32 bytes written for each work item,
and a serial loop of about 23 instructions per CTA, and 12 plus one L1 load per sequence; more when
heads are folded. From the fourth on, CTAs that start in one tile take none.

Why the serial part is small: lay the costs of all tiles end to end. A CTA that starts at
position p ends at p + budget - overhead, cutting a tile, unless a tile ends between there and
p + budget, or nothing is cut: then it ends with the last such tile. So the loop only finds ends,
walking over the sequences once for each budget tried; the rest is parallel, a lane for each CTA.
"""

import torch
import triton
import triton.language as tl

from mla_fusion.attention.plan import chunks_triton
from mla_fusion.attention.plan.buffers import PLANNED, PlanBuffers
from mla_fusion.attention.plan.planner import EVEN_SHARE, MERGED_AT_ONCE, SMALL_SHARE, STEPS
from mla_fusion.attention.plan.planner import allocate as allocate

PROVIDERS = ("triton", "reference")
MERGED, SMALL, EVEN, TRIED = map(tl.constexpr, (MERGED_AT_ONCE, SMALL_SHARE, EVEN_SHARE, STEPS))


def fill(
    plan: PlanBuffers, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """As `planner.fill`, from device tensors, which the kernel reads when it runs."""
    rules, max_batch, batch = plan.rules, plan.settings.max_batch, len(seq_lens)
    arguments = {
        "step_qo_indptr": qo_indptr, "seq_lens": seq_lens, "batch": batch,
        "busy": rules.busy_ctas(batch), "max_query_len": max_query_len, "MAX_BATCH": max_batch,
        "RULES": rules, "BLOCK_B": triton.next_power_of_2(max_batch), "num_warps": 4,
        **{name: getattr(plan, name) for name in PLANNED},
    }  # fmt: skip
    if rules.chunk:
        block_w = triton.next_power_of_2(rules.ctas + 1)
        chunks_triton.mla_plan_chunks[(batch,)](**arguments, BLOCK_W=block_w)
        return
    # The serial loop is the same in all warps; they share the work before and after it.
    block_w = triton.next_power_of_2(rules.ctas)
    mla_plan[(1,)](**arguments, scratch=plan.planner_scratch, BLOCK_W=block_w)


@triton.jit
def store_costs(
    qo_indptr, seq_lens, plan_qo_indptr, plan_kv_indptr, sequences, b, batch, max_query_len,
    MAX_BATCH: tl.constexpr, rules: tl.constexpr,
):  # fmt: skip
    """Copy the lengths, write the pairs of sequences; return the tiles up to the last live one."""
    query = tl.load(qo_indptr + b, mask=b < batch, other=0)
    query_end = tl.load(qo_indptr + b + 1, mask=b < batch, other=0)
    length = tl.load(seq_lens + b, mask=b < batch, other=0)
    last_query = tl.load(qo_indptr + batch)
    tl.store(plan_qo_indptr, 0)
    tl.store(plan_qo_indptr + 1 + b, tl.where(b < batch, query_end, last_query), mask=b < MAX_BATCH)
    tl.store(plan_kv_indptr, 0)
    tl.store(plan_kv_indptr + 1 + b, tl.cumsum(length), mask=b < MAX_BATCH)
    is_live = query_end > query
    blocks = (length + rules.granularity - 1) // rules.granularity
    cost = tl.where(is_live, blocks + rules.overhead, 0)
    uncut = tl.maximum(length - max_query_len, 0) // rules.granularity + 1
    tl.store(sequences + b, pack(tl.cumsum(cost) * rules.fold, uncut), mask=b < MAX_BATCH)
    return tl.max(tl.where(is_live, b + 1, 0)) * rules.fold


# Tensors that are read side by side count as unaligned: for wider reads a thread would get several
# neighbouring lanes, and change to others, through shared memory, at every store of a work item.
@triton.jit(
    do_not_specialize=["batch", "busy", "max_query_len", "step_qo_indptr", "seq_lens", "scratch"]
)
def mla_plan(
    step_qo_indptr, seq_lens, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
    reduce_partial_map, qo_indptr, kv_indptr, scratch, batch, busy, max_query_len,
    MAX_BATCH: tl.constexpr, RULES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One CTA; `busy` of all CTAs may get work from `batch` of MAX_BATCH sequences."""
    OVERHEAD: tl.constexpr = RULES.overhead
    # Pairs in the scratch. Of each sequence: where its last tile ends; how many blocks of a tile
    # leave too little for another split. Of each CTA: its first tile; the blocks of it done.
    sequences, starts = scratch, scratch + MAX_BATCH

    b = tl.arange(0, BLOCK_B)
    live_tiles = store_costs(
        step_qo_indptr, seq_lens, qo_indptr, kv_indptr, sequences, b, batch, max_query_len,
        MAX_BATCH, RULES,
    )  # fmt: skip
    tl.debug_barrier()
    # Read back although known, so that the loop finds the pairs in L1.
    end, _ = unpack(tl.load(sequences + b, mask=b < MAX_BATCH, other=0))
    total = tl.max(end)
    # Dead sequences count: their lengths are known, and whether they have rows no longer is.
    longest = tl.max(tl.load(seq_lens + b, mask=b < batch, other=0))
    longest = (longest + RULES.granularity - 1) // RULES.granularity
    share = tl.maximum((total + busy - 1) // busy, 1 + (longest > MERGED).to(tl.int32))
    budget, kept = share + OVERHEAD, tl.full([], OVERHEAD, tl.int32)
    is_even = total == live_tiles.to(tl.int64) * (longest + OVERHEAD)
    if (live_tiles <= busy) & (longest <= share + OVERHEAD // 2):
        budget = tl.maximum(budget, longest + OVERHEAD)
        kept = budget  # a CTA that would cut a tile keeps all of its budget: it need not
    elif share <= tl.where(is_even, EVEN, SMALL * OVERHEAD):
        budget = smallest_budget(sequences, b, share, total, busy, MAX_BATCH, RULES)
    last = busy
    while last >= busy:
        tl.debug_barrier()  # other threads store a start than for the budget before
        last = find_starts(sequences, starts, budget, kept, total, busy, RULES.fold, BLOCK_W)
        budget = tl.minimum(budget + (OVERHEAD + TRIED - 1) // TRIED, share + OVERHEAD)
    tl.debug_barrier()

    # A lane is a CTA; those after the last one with work start and end after all tiles.
    w = tl.arange(0, BLOCK_W)
    after_all = live_tiles.to(tl.int64)
    tile, done = unpack(tl.load(starts + w, mask=w <= last, other=after_all))
    end_tile, end_done = unpack(tl.load(starts + 1 + w, mask=w < last, other=after_all))
    is_resumed, is_cut = (done > 0).to(tl.int32), (end_done > 0).to(tl.int32)
    works = end_tile - tile + is_cut
    splits = tl.where(end_tile == tile, tl.maximum(is_resumed, is_cut), is_resumed + is_cut)
    all_splits = tl.sum(splits)
    tl.store(reduce_indptr, 0)
    for block in range(RULES.fold):
        at = 1 + b * RULES.fold + block
        tl.store(reduce_indptr + at, all_splits, mask=(b < MAX_BATCH) & (at > live_tiles))
    work_end = tl.cumsum(works)
    partial = tl.cumsum(splits) - splits
    tl.store(work_indptr, 0)
    tl.store(work_indptr + 1 + w, work_end, mask=w < RULES.ctas)
    write_items(
        qo_indptr, kv_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map,
        max_query_len, works, tile, done, work_end - works, partial, end_done, RULES,
    )  # fmt: skip


@triton.jit
def smallest_budget(
    sequences, b, share, total, busy, MAX_BATCH: tl.constexpr, rules: tl.constexpr
):  # fmt: skip
    """The first budget that is tried: with a smaller one, `busy` CTAs cannot take all tiles."""
    end, _ = unpack(tl.load(sequences + b, mask=b < MAX_BATCH, other=0))
    begin, _ = unpack(tl.load(sequences + b - 1, mask=(b > 0) & (b < MAX_BATCH), other=0))
    last_block = tl.maximum((end - begin) // rules.fold - rules.overhead - 1, 0)
    largest = share + rules.overhead
    budget = tl.minimum(tl.maximum(share, 2 * rules.overhead), largest)
    least = busy * budget + 1
    while (least > busy * budget) & (budget < largest):
        cuts = last_block // (budget - rules.overhead)
        least = total + tl.sum(cuts) * (rules.overhead * rules.fold)
        budget += (least > busy * budget).to(tl.int32)
    return budget


@triton.jit
def find_starts(
    sequences, starts, budget, kept, total, busy, FOLD: tl.constexpr, BLOCK_W: tl.constexpr
):  # fmt: skip
    """Write where each CTA starts; return the last that gets work, `busy` or more if too few are.
    Scalar but for the stores of CTAs that start in the same tile: nothing in the loop but the walk
    over the sequences waits for memory."""
    zero = tl.full([], 0, tl.int32)
    lane = 1 + tl.arange(0, BLOCK_W)
    step = budget - kept  # blocks of a CTA that starts and ends in a tile
    tile, begin, last = zero, zero, zero
    end, uncut = unpack(tl.load(sequences))
    following = tl.load(sequences + 1)  # ahead, since the walk would wait for each
    tl.store(starts, 0)
    reach = budget
    while (reach < total) & (last < busy):
        while end <= reach:
            tile += FOLD
            sequences += 1
            begin = end
            end, uncut = unpack(following)
            following = tl.load(sequences + 1)
        # The tile that holds `reach`: the CTA gets done with some of its blocks.
        tile_cost = (end - begin) // FOLD
        block = zero
        for i in tl.static_range(1, FOLD):  # a division takes longer
            block += (begin + i * tile_cost <= reach).to(tl.int32)
        tile_begin = begin + block * tile_cost
        done = tl.maximum(reach - kept - tile_begin, 0)
        is_whole = done >= uncut
        next_tile = tile + block + is_whole.to(tl.int32)
        start = pack(next_tile, tl.where(is_whole, 0, done))
        position = tile_begin + tl.where(is_whole, tile_cost, done)
        # None starts where the last tile was taken whole.
        last += (position < total).to(tl.int32)
        tl.store(starts + last, start, mask=(position < total) & (last < busy))
        # Three or more: one or two are found sooner by the next turns than by this division.
        if (step > 0) & (done + 3 * step < uncut):
            more = (uncut - 1 - done) // step  # cuts of this tile behind the first
            others = pack(next_tile, done + lane * step)
            tl.store(starts + last + lane, others, mask=(lane <= more) & (last + lane < busy))
            last += more
            position += more * step
        reach = position + budget
    return last


@triton.jit
def pack(low, high):
    """Two numbers, not negative, in one: a pair is read and written at once."""
    return (high.to(tl.int64) << 32) | low


@triton.jit
def unpack(pair):
    """The two numbers of `pack`."""
    return pair.to(tl.int32), (pair >> 32).to(tl.int32)


@triton.jit
def write_items(
    qo_indptr, kv_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map,
    max_query_len, works, tile, done, work, partial, end_done, rules: tl.constexpr,
):  # fmt: skip
    """Write the items of all CTAs, a lane for each, from where its CTA starts on."""
    for item in range(tl.max(works)):
        mask = item < works
        sequence = tile // rules.fold
        block = tile % rules.fold
        query = tl.load(qo_indptr + sequence, mask=mask, other=0)
        rows = tl.load(qo_indptr + sequence + 1, mask=mask, other=0) - query
        token = tl.load(kv_indptr + sequence, mask=mask, other=0)
        length = tl.load(kv_indptr + sequence + 1, mask=mask, other=0) - token
        planned = tl.where(rows > 0, length, 0)
        is_cut = (item == works - 1) & (end_done > 0)
        is_split = (done > 0) | is_cut
        stop = tl.where(is_cut, end_done * rules.granularity, planned)
        query = query * rules.fold + block * rows
        row = work_info_set + work * 8
        tl.store(row, tile, mask=mask)
        tl.store(row + 1, tl.where(is_split, partial * max_query_len, -1), mask=mask)
        tl.store(row + 2, query, mask=mask)
        tl.store(row + 3, query + rows, mask=mask)
        tl.store(row + 4, token + done * rules.granularity, mask=mask)
        tl.store(row + 5, token + stop, mask=mask)
        tl.store(row + 6, planned - stop, mask=mask)
        tl.store(row + 7, token, mask=mask)
        tl.store(reduce_partial_map + partial, partial * max_query_len, mask=mask & is_split)
        ends = mask & (is_cut == 0)
        partial += is_split.to(tl.int32)
        tl.store(reduce_indptr + 1 + tile, partial, mask=ends)
        tl.store(reduce_final_map + 2 * tile, query, mask=ends & is_split)
        tl.store(reduce_final_map + 2 * tile + 1, query + rows, mask=ends & is_split)
        done = tl.zeros(done.shape, tl.int32)
        tile += 1
        work += 1
