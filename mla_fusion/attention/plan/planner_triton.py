"""The planner of `planner.py` on the device: one CTA, no host sync, the same plan.

Cost, once a model step: two integers read for each sequence, 32 bytes written for each work item,
and a serial loop of about 15 instructions and four L1 loads for each tile.

Why so little is serial: lay the costs of all tiles end to end. A CTA that starts at position p
reaches p + budget, and the next one starts `step` = budget - overhead behind p, in a tile that is
cut; or at the begin of a tile, if p + budget lies in a window around it. So from the begin of a
tile CTAs start at equal distances, until one reaches a window: the loop only finds these begins, by
remainders of positions and the step, with a budget in each lane. All else is parallel.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from mla_fusion.attention.plan import buffers, chunks_triton
from mla_fusion.attention.plan.buffers import PLANNED, PlanBuffers
from mla_fusion.attention.plan.planner import EVEN_SHARE, MERGED_AT_ONCE, SMALL_SHARE, STEPS
from mla_fusion.attention.plan.planner import allocate as allocate

PROVIDERS = ("triton", "reference")

# In the scratch, of each tile: where it begins; its window; for each budget remainders and sums.
Cuts = namedtuple("Cuts", "begins windows remainders sums")
MERGED, SMALL, EVEN, TRIED = map(tl.constexpr, (MERGED_AT_ONCE, SMALL_SHARE, EVEN_SHARE, STEPS))
LANES = tl.constexpr(buffers.PLANNER_LANES)  # budgets that are tried: the first one, and STEPS more
AT_ONCE = tl.constexpr(64)  # tiles whose cuts are prepared at once
FAR = tl.constexpr(2**31 - 1)  # a step beyond all tiles


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
    # Blocks at the end of a tile that are too few tokens for another split.
    late = blocks - tl.maximum(length - max_query_len, 0) // rules.granularity - 1
    late = tl.where(is_live, tl.maximum(late, 0), 0)
    tl.store(sequences + b, pack(tl.cumsum(cost) * rules.fold, late), mask=b < MAX_BATCH)
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
    # In the scratch: of each sequence the pair of where its last tile ends, and its late blocks; of
    # each CTA the pair of its first tile and the blocks of it done. The rest is of `Cuts`.
    sequences, starts = scratch, scratch + MAX_BATCH
    TILES: tl.constexpr = MAX_BATCH * RULES.fold + 1
    begins = starts + RULES.ctas + 1
    remainders = begins + 2 * TILES
    cuts = Cuts(begins, begins + TILES, remainders, remainders + LANES * TILES)

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
    budget = share + OVERHEAD
    is_even = total == live_tiles.to(tl.int64) * (longest + OVERHEAD)
    is_whole = (live_tiles <= busy) & (longest <= share + OVERHEAD // 2)
    if is_whole:
        budget = tl.maximum(budget, longest + OVERHEAD)
    elif share <= tl.where(is_even, EVEN, SMALL * OVERHEAD):
        budget = smallest_budget(sequences, b, share, total, busy, MAX_BATCH, RULES)
    lane, w = tl.arange(0, LANES), tl.arange(0, BLOCK_W)
    tl.store(starts + w, tl.where(w == 0, 0, -1).to(tl.int64), mask=w <= RULES.ctas)
    budgets = budget + lane * ((OVERHEAD + TRIED - 1) // TRIED)
    budgets = tl.where(is_whole, budget, tl.minimum(budgets, share + OVERHEAD))
    steps = tl.where(is_whole, FAR, budgets - OVERHEAD)
    prepare_cuts(sequences, cuts, live_tiles, budgets, steps, lane, is_whole, RULES)
    tl.debug_barrier()
    step, last, lane = smallest_cut(
        sequences, cuts, live_tiles, total, busy, budgets, steps, lane, RULES
    )
    tl.debug_barrier()
    find_starts(starts, cuts, live_tiles, step, last, lane, w)
    tl.debug_barrier()

    # A lane is a CTA; those after the last one with work start and end after all tiles.
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
def prepare_cuts(sequences, cuts, live_tiles, budgets, steps, lane, is_whole, rules: tl.constexpr):
    """Write the begin of each tile, its window, and for each budget two remainders by the step: of
    the window's begin and of the tile's."""
    for first in range(0, live_tiles, AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        mask = tile < live_tiles
        sequence, before = tile // rules.fold, (tile - 1) // rules.fold
        begin, _ = unpack(tl.load(sequences + sequence - 1, mask=mask & (sequence > 0), other=0))
        end, _ = unpack(tl.load(sequences + sequence, mask=mask, other=0))
        _, late = unpack(tl.load(sequences + before, mask=mask & (tile > 0), other=0))
        cost = (end - begin) // rules.fold
        begin += tile % rules.fold * cost
        # A CTA that reaches the late blocks in front takes them. One that reaches so little of the
        # tile that nothing is left but the fixed cost, or that may not cut it, takes none of it.
        early = tl.where(is_whole, cost - 1, tl.minimum(cost - 1, rules.overhead))
        tl.store(cuts.begins + tile, begin.to(tl.int64), mask=mask)
        tl.store(cuts.windows + tile, pack(begin - late, late + early), mask=mask)
        window = tl.maximum((begin - late)[:, None] - budgets[None, :], 0)
        pair = pack(window % steps[None, :], begin[:, None] % steps[None, :])
        tl.store(cuts.remainders + tile[:, None] * LANES + lane, pair, mask=mask[:, None])


@triton.jit
def smallest_cut(
    sequences, cuts, live_tiles, total, busy, budgets, steps, lane, rules: tl.constexpr
):  # fmt: skip
    """Find the tiles at whose begin a CTA starts, for all budgets at once. Write for each tile and
    budget how many such begins there are up to it, and the sum of all steps between them. Return
    the step, last CTA and lane of the first budget with which `busy` CTAs are enough."""
    begin, remainder = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
    begins, cut = begin, begin
    # Loaded ahead, since the next turn would wait.
    next_pair = tl.load(cuts.remainders + LANES + lane)
    next_window, next_tile = tl.load(cuts.windows + 1), tl.load(cuts.begins + 1)
    for tile in range(1, live_tiles):
        from_window, from_tile = unpack(next_pair)
        window, size = unpack(next_window)
        at = next_tile.to(tl.int32)
        next_pair = tl.load(cuts.remainders + (tile + 1) * LANES + lane)
        next_window, next_tile = tl.load(cuts.windows + tile + 1), tl.load(cuts.begins + tile + 1)
        # Where a CTA starts that reaches the window: at `begin`, or a number of steps behind it.
        window -= budgets
        behind = remainder - from_window
        behind = tl.where(behind < 0, behind + steps, behind)
        is_cut = window > begin
        hit = tl.where(is_cut, behind <= size, begin <= window + size)
        cut += tl.where(hit & is_cut, window + behind - begin, 0)
        begins += hit.to(tl.int32)
        begin, remainder = tl.where(hit, at, begin), tl.where(hit, from_tile, remainder)
        tl.store(cuts.sums + tile * LANES + lane, pack(begins, cut))
    end = sequences + (live_tiles - 1) // rules.fold
    _, late = unpack(tl.load(end, mask=live_tiles > 0, other=0))
    # Steps to the last CTA that starts.
    rest = total - late - budgets - begin
    rest = tl.where(rest > 0, (rest - 1) // steps + 1, 0)
    last = begins + cut // steps + rest
    enough = tl.min(tl.where(last < busy, lane, LANES - 1))
    step = tl.sum(tl.where(lane == enough, steps, 0))
    return step, tl.sum(tl.where(lane == enough, last, 0)), enough


@triton.jit
def find_starts(starts, cuts, live_tiles, step, last, lane, w):
    """Write where each CTA up to `last` starts; of the others, the -1 in `starts` stays."""
    for first in range(0, live_tiles, 2 * AT_ONCE):
        tile = first + tl.arange(0, 2 * AT_ONCE)
        mask = tile < live_tiles
        sums = cuts.sums + tile * LANES + lane
        begins, cut = unpack(tl.load(sums, mask=mask & (tile > 0), other=0))
        before, _ = unpack(tl.load(sums - LANES, mask=mask & (tile > 1), other=0))
        number = begins + cut // step
        hit = mask & ((begins != before) | (tile == 0))
        tl.store(starts + number, tile.to(tl.int64), mask=hit)
    tl.debug_barrier()
    marked = tl.load(starts + w, mask=w <= last, other=-1) >= 0
    # The last CTA up to each that starts at the begin of a tile.
    whole = tl.associative_scan(tl.where(marked, w, 0), 0, larger)
    tile = tl.load(starts + whole).to(tl.int32)
    position = tl.load(cuts.begins + tile).to(tl.int32) + (w - whole) * step
    # The tile that holds it: the last that does not begin behind it.
    low, high = tile, tl.zeros_like(w) + live_tiles
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        is_behind = tl.load(cuts.begins + middle) > position
        low, high = tl.where(is_behind, low, middle), tl.where(is_behind, middle, high)
    tile = tl.where(w == whole, tile, low)
    done = tl.where(w == whole, 0, position - tl.load(cuts.begins + tile).to(tl.int32))
    tl.debug_barrier()
    tl.store(starts + w, pack(tile, done), mask=w <= last)


@triton.jit
def larger(a, b):
    """For a scan."""
    return tl.maximum(a, b)


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
