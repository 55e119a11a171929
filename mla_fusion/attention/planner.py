"""The portable planner, as its specification: who decodes what, in NumPy.

`planner_triton.py` computes the same on the device, element by element. The rules are those that
are published of AITER's fast planner for page size 1 (ROCm/aiter, `get_mla_metadata_v1`); see
docs/persistent-decode.md.

The KV of a sequence is counted in blocks of `granularity` tokens; a work item costs its blocks and
`overhead` more. The budget of a worker is its share of the total cost, rounded up, and one more
`overhead`. Workers are served in order, sequences in order, head blocks inside their sequence:

1. what is left of the sequence fits into the worker's budget: the worker takes it all;
2. else, if more than `overhead` of the budget is left: the worker takes that many blocks, less
   the overhead, and is full. If fewer tokens than a query has rows would be left then, it takes
   them too: no later piece lies within the causal edge alone;
3. else the worker is full.

A sequence that one worker took whole is written by it; pieces of others go to partial rows,
numbered in order, that a reduction merges.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORK_COLUMNS = 8
(BATCH, PARTIAL_ROW, QO_START, QO_END, KV_START, KV_END, KV_OFFSET, PADDING) = range(WORK_COLUMNS)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a plan depends on besides the lengths of its sequences.

    workers: workgroups of the persistent kernel. fold: head blocks of a sequence. granularity:
    tokens of a block. overhead: fixed cost of a work item, in blocks. max_split_per_batch: a
    budget of this many pieces for each (folded) sequence, shared by all of them; -1 for none.
    """

    workers: int
    fold: int
    granularity: int
    overhead: int
    max_split_per_batch: int

    def busy_workers(self, batch: int) -> int:
        """Workers that may get work from `batch` sequences."""
        if self.max_split_per_batch < 0:
            return self.workers
        return min(self.workers, self.max_split_per_batch * batch * self.fold)

    def max_works(self, max_batch: int) -> int:
        """Most work items of a plan: every sequence ends once, every worker but one cuts once."""
        return max_batch * self.fold + self.workers - 1

    def max_partials(self, max_batch: int) -> int:
        """Most pieces of split sequences: a worker holds two at most, the outer ones one."""
        return min(self.max_works(max_batch), 2 * (self.workers - 1))

    def partial_map_size(self, max_batch: int) -> int:
        """Length of reduce_partial_map, which AITER makes larger than needed with a cap."""
        tiles, cap = max_batch * self.fold, self.max_split_per_batch
        size = self.max_partials(max_batch)
        return size if cap <= 0 else max(size, tiles + min(self.workers, cap * tiles))


def fill(
    plan: Any,
    rules: Rules,
    qo_indptr: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    max_query_len: int,
) -> None:
    """Write the plan of one step into the buffers of `plan`, in place.

    Args:
        plan: has the buffers of `PersistentDecodePlan` as NumPy arrays; those of the portable
            planner are work_indptr, work_info_set, reduce_indptr, reduce_final_map,
            reduce_partial_map, qo_indptr and kv_indptr.
        qo_indptr: [batch + 1], first query row of each sequence, from 0; sequences without rows
            cost nothing, and those at the end get no work item.
        seq_lens: [batch], KV tokens of each sequence, those of the query rows included.
        max_query_len: largest number of query rows of a sequence; also the distance of partial
            rows.
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

    work = partial = 0
    tile = done = first_partial = 0  # done: blocks of this tile that are taken
    plan.reduce_indptr[0] = 0
    for worker in range(rules.workers):
        plan.work_indptr[worker] = work
        left = share + rules.overhead if worker < busy else -1
        while tile < live * rules.fold and left >= 0:
            sequence, block = divmod(tile, rules.fold)
            rest = int(costs[sequence]) - done
            if left >= rest:
                taken, left = int(blocks[sequence]) - done, left - rest
            elif left > rules.overhead:
                taken, left = left - rules.overhead, -1
                uncovered = int(seq_lens[sequence]) - (done + taken) * rules.granularity
                if uncovered < max_query_len:
                    taken = int(blocks[sequence]) - done
            else:
                break
            ends = done + taken == blocks[sequence]
            split = done > 0 or not ends
            first = int(plan.kv_indptr[sequence])
            end = int(plan.kv_indptr[sequence + 1])
            if rows[sequence] == 0:
                end = first
            stop = min(first + (done + taken) * rules.granularity, end)
            query = int(qo_indptr[sequence]) * rules.fold + block * int(rows[sequence])
            plan.work_info_set[work] = (
                tile,
                partial * max_query_len if split else -1,
                query,
                query + rows[sequence],
                first + done * rules.granularity,
                stop,
                end - stop,
                0,
            )
            work += 1
            if split:
                plan.reduce_partial_map[partial] = partial * max_query_len
                partial += 1
            done += taken
            if ends:
                if partial > first_partial:
                    plan.reduce_final_map[tile] = (query, query + rows[sequence])
                first_partial = partial
                tile, done = tile + 1, 0
                plan.reduce_indptr[tile] = partial
    plan.work_indptr[rules.workers] = work
    plan.reduce_indptr[tile + 1 :] = partial
