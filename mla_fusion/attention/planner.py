"""The portable planner, as its specification: who decodes what, in NumPy.

`planner_triton.py` computes the same on the device, element by element. The three numbered rules
are those that are published of AITER's fast planner for page size 1 (ROCm/aiter,
`get_mla_metadata_v1`); see docs/persistent-decode.md.

The KV of a sequence is counted in blocks of `granularity` tokens; a work item costs its blocks and
`overhead` more. The budget of a worker is its share of the total cost, rounded up, and one more
`overhead`. The share is at least two where the longest sequence has more blocks than the reduction
merges pieces at once: on an H200 a round of it took longer than a block. Workers are served in
order, sequences in order, head blocks inside their sequence:

1. what is left of the sequence fits into the worker's budget: the worker takes it all;
2. else, if more than `overhead` of the budget is left: the worker takes that many blocks, less
   the overhead, and is full. If this leaves fewer tokens than a query has rows, it takes them
   too: every later piece has a key that the first row sees;
3. else the worker is full.

Nothing is cut where each worker can take a whole tile within its budget: there are no more tiles
than workers, and the longest sequence fits. The largest load has the same bound, and no piece has
to be merged.

A sequence that one worker took whole is written by it; pieces of others go to partial rows,
numbered in order, that a reduction merges.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mla_fusion.attention import heads
from mla_fusion.attention.buffers import PLANNED, common_buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mla_fusion.attention.buffers import PlanBuffers, Rules, Settings

PROVIDERS = ("reference", "triton")
MERGED_AT_ONCE = 32  # pieces, by a program of the reduction
WORK_COLUMNS = 8
(BATCH, PARTIAL_ROW, QO_START, QO_END, KV_START, KV_END, KV_OFFSET, PADDING) = range(WORK_COLUMNS)


def require(settings: Settings) -> None:
    """It plans for all settings, on any device that NumPy reads: a CPU."""


def allocate(settings: Settings) -> dict[str, Any]:
    """The fields of a plan, its buffers zeroed.

    Raises:
        ValueError: `heads_per_work` is no multiple of 16, or `workers` has no default.
    """
    layout = heads.layout(settings.num_heads, settings.max_query_len, settings.heads_per_work)
    rules = settings.rules(layout.fold)
    partials = rules.max_partials(settings.max_batch)
    scratch = settings.max_batch + rules.workers
    common = common_buffers(
        settings, layout, rules, partials=partials, scratch=scratch, epilogue=True
    )
    planned = {
        name: torch.zeros(shape, dtype=torch.int32, device=settings.device)
        for name, shape in shapes(rules, settings.max_batch).items()
    }
    addresses = [planned[name].data_ptr() for name in ("work_indptr", "work_info_set")]
    pointers = torch.tensor(addresses, device=settings.device).view(torch.uint64)
    return {**common, **planned, "work_metadata_ptrs": pointers}


def shapes(rules: Rules, max_batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers that a refresh writes, by name."""
    tiles = max_batch * rules.fold
    return {
        "work_indptr": (rules.workers + 1,),
        "work_info_set": (rules.max_works(max_batch), WORK_COLUMNS),
        "reduce_indptr": (tiles + 1,),
        "reduce_final_map": (tiles, 2),
        "reduce_partial_map": (rules.partial_map_size(max_batch),),
        "qo_indptr": (max_batch + 1,),
        "kv_indptr": (max_batch + 1,),
    }


def fill(
    plan: PlanBuffers, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """Write the plan of one step in place: `fill_arrays` for tensors on the CPU."""
    arrays = SimpleNamespace(**{name: getattr(plan, name).numpy() for name in PLANNED})
    fill_arrays(arrays, plan.rules, qo_indptr.numpy(), seq_lens.numpy(), max_query_len)


def fill_arrays(
    plan: Any,
    rules: Rules,
    qo_indptr: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    max_query_len: int,
) -> None:
    """Write the plan of one step, in place.

    Args:
        plan: has the buffers `PLANNED` as NumPy arrays.
        qo_indptr: [batch + 1], first query row of each sequence, from 0; sequences without rows
            cost nothing, and those at the end get no work item.
        seq_lens: [batch], KV tokens of each sequence, those of the query rows included.
        max_query_len: most query rows of a sequence; also the distance of partial rows.
    """
    batch = len(seq_lens)
    plan.qo_indptr[: batch + 1] = qo_indptr
    plan.qo_indptr[batch + 1 :] = qo_indptr[batch]
    plan.kv_indptr[0] = 0
    plan.kv_indptr[1 : batch + 1] = np.cumsum(seq_lens)
    plan.kv_indptr[batch + 1 :] = plan.kv_indptr[batch]

    rows = np.diff(qo_indptr)
    blocks = np.where(rows > 0, -(-seq_lens // rules.granularity), 0)
    costs = np.where(rows > 0, blocks + rules.overhead, 0)
    live = int(np.flatnonzero(rows > 0)[-1]) + 1 if (rows > 0).any() else 0
    busy = rules.busy_workers(batch)
    share = -(-int(costs.sum()) * rules.fold // busy) if busy else 0
    longest = -(-int(seq_lens.max(initial=0)) // rules.granularity)
    share = max(share, 1 + (longest > MERGED_AT_ONCE))
    cuts = live * rules.fold > busy or longest > share

    work = partial = 0
    tile = done = first_partial = 0  # done: blocks of this tile that are taken
    plan.reduce_indptr[0] = 0
    for worker in range(rules.workers):
        plan.work_indptr[worker] = work
        left = share + rules.overhead if worker < busy else -1
        while tile < live * rules.fold and left >= 0:
            sequence, block = divmod(tile, rules.fold)
            remaining = int(blocks[sequence]) - done
            if left >= int(costs[sequence]) - done:
                taken, left = remaining, left - (int(costs[sequence]) - done)
            elif cuts and left > rules.overhead:
                taken, left = left - rules.overhead, -1
                if int(seq_lens[sequence]) - (done + taken) * rules.granularity < max_query_len:
                    taken = remaining
            else:
                break
            begin, done = done, done + taken
            ends = taken == remaining
            split = begin > 0 or not ends
            span = _rows_and_tokens(plan, rules, sequence, block, begin, done)
            row = partial * max_query_len
            plan.work_info_set[work] = (tile, row if split else -1, *span, 0)
            work += 1
            if split:
                plan.reduce_partial_map[partial] = row
                partial += 1
            if ends:
                if partial > first_partial:
                    plan.reduce_final_map[tile] = span[:2]
                first_partial = partial
                tile, done = tile + 1, 0
                plan.reduce_indptr[tile] = partial
    plan.work_indptr[rules.workers] = work
    plan.reduce_indptr[tile + 1 :] = partial


def _rows_and_tokens(
    plan: Any, rules: Rules, sequence: int, block: int, begin: int, end: int
) -> tuple[int, int, int, int, int]:
    """Columns QO_START to KV_OFFSET of an item: the KV blocks `begin` to `end` of a sequence."""
    token, rows_end = plan.qo_indptr[sequence : sequence + 2].tolist()
    first, last = plan.kv_indptr[sequence : sequence + 2].tolist()
    rows = rows_end - token
    if rows == 0:
        last = first
    query = token * rules.fold + block * rows
    stop = min(first + end * rules.granularity, last)
    return query, query + rows, first + begin * rules.granularity, stop, last - stop
