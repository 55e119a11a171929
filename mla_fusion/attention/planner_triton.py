"""The planner of `planner.py` on the device: one Triton program, no host sync, the same plan.

Cost: two integers read for each sequence, 32 bytes written for each work item, and a serial loop
of one step for each worker: two dependent rounds of reductions over the sequences within a warp.
The loop bounds it: 0.2 us a worker are expected, 25 us for 132 workers, once a step and not once
a layer. It has not been measured.

How the serial part is that small: lay the costs of all tiles end to end. A worker that starts at
position p ends at p + share, cutting a tile, unless a tile ends between there and
p + share + overhead: then it ends with the last such tile. So a worker takes a lookup, however
many tiles it executes, and the work items are written afterwards, a lane for each worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from mla_fusion.attention.plan import PersistentDecodePlan


def fill(
    plan: PersistentDecodePlan, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """As `planner.fill`, from device tensors, which the kernel reads when it runs."""
    settings, batch = plan.settings, seq_lens.shape[0]
    rules = settings.rules
    sequences = triton.next_power_of_2(settings.max_batch)
    lanes = triton.next_power_of_2(rules.workers)
    plan_kernel[(1,)](
        qo_indptr,
        seq_lens,
        plan.work_indptr,
        plan.work_info_set,
        plan.reduce_indptr,
        plan.reduce_final_map,
        plan.reduce_partial_map,
        plan.qo_indptr,
        plan.kv_indptr,
        batch,
        rules.busy_workers(batch),
        max_query_len,
        MAX_BATCH=settings.max_batch,
        WORKERS=rules.workers,
        FOLD=rules.fold,
        GRANULARITY=rules.granularity,
        OVERHEAD=rules.overhead,
        BLOCK_B=sequences,
        BLOCK_W=lanes,
        # One warp reduces without shared memory; more only where its registers would not do.
        num_warps=1 if max(sequences, lanes) <= 256 else 4,
    )


@triton.jit(do_not_specialize=["batch", "busy", "max_query_len"])
def plan_kernel(
    qo_indptr, seq_lens, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
    reduce_partial_map, plan_qo_indptr, plan_kv_indptr, batch, busy, max_query_len,
    MAX_BATCH: tl.constexpr, WORKERS: tl.constexpr, FOLD: tl.constexpr,
    GRANULARITY: tl.constexpr, OVERHEAD: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program; `busy` of WORKERS may get work from `batch` of MAX_BATCH sequences."""
    # Lanes are sequences.
    b = tl.arange(0, BLOCK_B)
    query = tl.load(qo_indptr + b, mask=b < batch, other=0)
    query_end = tl.load(qo_indptr + b + 1, mask=b < batch, other=0)
    length = tl.load(seq_lens + b, mask=b < batch, other=0)
    last_query = tl.load(qo_indptr + batch)
    kv_end = tl.cumsum(length)
    tl.store(plan_qo_indptr, 0)
    tl.store(plan_qo_indptr + 1 + b, tl.where(b < batch, query_end, last_query), mask=b < MAX_BATCH)
    tl.store(plan_kv_indptr, 0)
    tl.store(plan_kv_indptr + 1 + b, kv_end, mask=b < MAX_BATCH)

    is_live = query_end > query
    cost = tl.where(is_live, (length + GRANULARITY - 1) // GRANULARITY + OVERHEAD, 0)
    end = tl.cumsum(cost) * FOLD  # position of the end of a sequence's last tile
    live = tl.max(tl.where(is_live, b + 1, 0))
    total = tl.max(end)
    share = (total + busy - 1) // tl.maximum(busy, 1)

    # Lanes are workers: where each starts (tile, blocks of it done, first token of its sequence;
    # works and partial pieces before) and how it ends (tile, blocks of it done).
    w = tl.arange(0, BLOCK_W)
    start_tile = tl.zeros([BLOCK_W], tl.int32)
    start_done, start_token, start_work, start_partial = (
        start_tile, start_tile, start_tile, start_tile,
    )  # fmt: skip
    end_tile, end_done = start_tile, start_tile
    zero = tl.full([], 0, tl.int32)
    position, tile, done, token, work, partial = zero, zero, zero, zero, zero, zero
    for worker in range(busy):
        reach = position + share + OVERHEAD
        sequence = tl.sum(((end <= reach) & (b < live)).to(tl.int32))
        here = b == sequence
        tokens = tl.sum(tl.where(here, length, 0))
        begin = tl.sum(tl.where(here, end - cost * FOLD, 0))
        next_token = tl.sum(tl.where(here, kv_end - length, 0))
        tile_cost = (tokens + GRANULARITY - 1) // GRANULARITY + OVERHEAD
        block = (reach - begin) // tile_cost
        begin += block * tile_cost
        next_done = tl.maximum(reach - begin - OVERHEAD, 0)
        absorb = (next_done > 0) & (tokens - next_done * GRANULARITY < max_query_len)
        next_token += tl.where(absorb & (block == FOLD - 1), tokens, 0)
        next_tile = sequence * FOLD + block + absorb.to(tl.int32)
        next_done = tl.where(absorb, 0, next_done)
        position = begin + tl.where(absorb, tile_cost, next_done)
        finished = reach >= total
        next_tile = tl.where(finished, live * FOLD, next_tile)
        next_done = tl.where(finished, 0, next_done)
        position = tl.where(finished, total, position)

        lane = w == worker
        start_tile = tl.where(lane, tile, start_tile)
        start_done = tl.where(lane, done, start_done)
        start_token = tl.where(lane, token, start_token)
        start_work = tl.where(lane, work, start_work)
        start_partial = tl.where(lane, partial, start_partial)
        end_tile = tl.where(lane, next_tile, end_tile)
        end_done = tl.where(lane, next_done, end_done)
        is_resumed, is_cut = (done > 0).to(tl.int32), (next_done > 0).to(tl.int32)
        work += next_tile - tile + is_cut
        partial += tl.where(next_tile == tile, tl.maximum(is_resumed, is_cut), is_resumed + is_cut)
        tile, done, token = next_tile, next_done, next_token

    tl.store(work_indptr + w, tl.where(w < busy, start_work, work), mask=w < WORKERS)
    tl.store(work_indptr + WORKERS, work)
    tl.store(reduce_indptr, 0)
    for block in range(FOLD):
        behind = 1 + b * FOLD + block
        tl.store(reduce_indptr + behind, partial, mask=(b < MAX_BATCH) & (behind > live * FOLD))

    works = tl.where(w < busy, end_tile - start_tile + (end_done > 0).to(tl.int32), 0)
    write_items(
        qo_indptr, seq_lens, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map,
        max_query_len, works, start_tile, start_done, start_token, start_work, start_partial,
        end_done, FOLD, GRANULARITY, BLOCK_W,
    )  # fmt: skip


@triton.jit
def write_items(
    qo_indptr, seq_lens, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map,
    max_query_len, works, tile, done, token, work, partial, end_done,
    FOLD: tl.constexpr, GRANULARITY: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the items of all workers, a lane for each, from where its worker starts on."""
    for item in range(tl.max(works)):
        mask = item < works
        sequence = tile // FOLD
        block = tile % FOLD
        query = tl.load(qo_indptr + sequence, mask=mask, other=0)
        rows = tl.load(qo_indptr + sequence + 1, mask=mask, other=0) - query
        length = tl.load(seq_lens + sequence, mask=mask, other=0)
        planned = tl.where(rows > 0, length, 0)
        is_cut = (item == works - 1) & (end_done > 0)
        is_split = (done > 0) | is_cut
        stop = tl.where(is_cut, end_done * GRANULARITY, planned)
        query = query * FOLD + block * rows
        row = work_info_set + work * 8
        tl.store(row, tile, mask=mask)
        tl.store(row + 1, tl.where(is_split, partial * max_query_len, -1), mask=mask)
        tl.store(row + 2, query, mask=mask)
        tl.store(row + 3, query + rows, mask=mask)
        tl.store(row + 4, token + done * GRANULARITY, mask=mask)
        tl.store(row + 5, token + stop, mask=mask)
        tl.store(row + 6, planned - stop, mask=mask)
        tl.store(row + 7, 0, mask=mask)
        tl.store(reduce_partial_map + partial, partial * max_query_len, mask=mask & is_split)
        ends = mask & (is_cut == 0)
        partial += is_split.to(tl.int32)
        tl.store(reduce_indptr + 1 + tile, partial, mask=ends)
        tl.store(reduce_final_map + 2 * tile, query, mask=ends & is_split)
        tl.store(reduce_final_map + 2 * tile + 1, query + rows, mask=ends & is_split)
        token += tl.where(block == FOLD - 1, length, 0)
        done = tl.zeros([BLOCK_W], tl.int32)
        tile += 1
        work += 1
