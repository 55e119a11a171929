"""The portable planner, as its specification: who decodes what, in NumPy.

`planner_triton.py` computes the same on the device, element by element. The numbered rules are
those published of AITER's fast planner for page size 1 (ROCm/aiter, `get_mla_metadata_v1`).

KV is counted in blocks of `granularity` tokens; a work item costs its blocks and `overhead` more.
The budget of a CTA is at most its share of the total cost, rounded up, and one more `overhead`: so
all tiles fit. The share is at least two where the longest sequence has more blocks than the
reduction merges splits at once: on an H200 a round of it took longer than a block. CTAs are served
in order, sequences in order, head blocks inside their sequence:

1. what is left of the sequence fits into the CTA's budget: the CTA takes it all;
2. else, if more than `overhead` of the budget is left: the CTA takes that many blocks, less
   the overhead, and is full. If this leaves fewer tokens than a query has rows, it takes them
   too: every later split has a key that the first row sees;
3. else the CTA is full.

Nothing is cut where there are no more tiles than CTAs, and the longest has at most half an overhead
more blocks than the share: less than merging takes.

Else smaller budgets are tried where the share is at most `SMALL_SHARE` overheads, or `EVEN_SHARE`
blocks if all tiles are as long: from the one with which the tiles fit if no CTA has anything
left, in `STEPS` steps of an overhead. So 64 sequences of 32 blocks are cut in 16 and 16 for 132
CTAs, not in 18 and 14. Tiles of other lengths seldom fit, and each budget is a pass. It leaves room
for an overhead of blocks at least: with half as many, 16 sequences of 16 blocks took longer.
"""

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from mla_fusion.attention.plan import buffers, heads
from mla_fusion.attention.plan.buffers import MOST_TOKENS, PLANNED, PlanBuffers, Rules, Settings

Numbers = np.ndarray[Any, np.dtype[np.int32]]

PROVIDERS = ("reference", "triton")
MERGED_AT_ONCE = 32  # splits, by a CTA of the reduction
SMALL_SHARE, EVEN_SHARE, STEPS = 4, 64, 4
# Columns of work_info_set.
BATCH, PARTIAL_ROW, QO_START, QO_END, KV_START, KV_END, KV_OFFSET, KV_FIRST = range(8)


def allocate(settings: Settings) -> dict[str, Any]:
    """The fields of a plan, its buffers zeroed; raises as `heads.layout` and `Settings.rules`."""
    layout = heads.layout(settings.num_heads, settings.max_query_len, settings.heads_per_work)
    fields = buffers.common_buffers(settings, layout, portable=True)
    for name, shape in shapes(fields["rules"], settings.max_batch).items():
        fields[name] = torch.zeros(shape, dtype=torch.int32, device=settings.device)
    addresses = [fields[name].data_ptr() for name in ("work_indptr", "work_info_set")]
    pointers = torch.tensor(addresses, device=settings.device).view(torch.uint64)
    return {**fields, "work_metadata_ptrs": pointers}


def shapes(rules: Rules, max_batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the buffers that a refresh writes, by name."""
    tiles = max_batch * rules.fold
    return {
        "work_indptr": (rules.ctas + 1,),
        "work_info_set": (rules.max_works(max_batch), 8),
        "reduce_indptr": (tiles + 1,),
        "reduce_final_map": (tiles, 2),
        "reduce_partial_map": (rules.partial_map_size(max_batch),),
        **dict.fromkeys(("qo_indptr", "kv_indptr"), (max_batch + 1,)),
    }


def fill(
    plan: PlanBuffers, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """Write the plan of one step in place: `fill_arrays` for tensors on the CPU."""
    if (tokens := int(seq_lens.sum(dtype=torch.int64))) > MOST_TOKENS:
        raise ValueError(
            f"the step has {tokens} KV tokens, and a plan counts them in 32 bits: {MOST_TOKENS} at "
            "most; decode fewer sequences at once"
        )
    arrays = SimpleNamespace(**{name: getattr(plan, name).numpy() for name in PLANNED})
    fill_arrays(arrays, plan.rules, qo_indptr.numpy(), seq_lens.numpy(), max_query_len)


def fill_arrays(
    plan: Any, rules: Rules, qo_indptr: Numbers, seq_lens: Numbers, max_query_len: int
) -> None:
    """Write the plan of one step, as of `PersistentDecodePlan.refresh`, into the buffers `PLANNED`
    of `plan`, NumPy arrays. Sequences without rows cost nothing; at the end they get no item."""
    kv_indptr = np.concatenate(([0], np.cumsum(seq_lens)))
    for buffer, values in (plan.qo_indptr, qo_indptr), (plan.kv_indptr, kv_indptr):
        buffer[:] = np.pad(values, (0, len(buffer) - len(values)), mode="edge")

    is_live = np.diff(qo_indptr) > 0
    blocks = np.where(is_live, -(-seq_lens // rules.granularity), 0)
    live = int(np.flatnonzero(is_live)[-1]) + 1 if is_live.any() else 0
    fixed = rules.overhead * is_live
    each = zip(blocks.tolist(), seq_lens.tolist(), fixed.tolist(), strict=True)
    tiles = [_Tile(*tile) for tile in list(each)[:live] for _ in range(rules.fold)]
    longest = -(-int(seq_lens.max(initial=0)) // rules.granularity)
    busy = rules.busy_ctas(len(seq_lens))
    if rules.chunk:
        items = _chunks(tiles, rules, busy)
    else:
        items = _pack_tightly(tiles, rules, busy, longest, max_query_len)
    cta, tile, begin, end, is_last = np.array(items, np.int64).reshape(-1, 5).T
    ends = is_last > 0
    sequence, block = np.divmod(tile, rules.fold)
    token, first = plan.qo_indptr[sequence], plan.kv_indptr[sequence]
    rows = plan.qo_indptr[sequence + 1] - token
    last = np.where(rows > 0, plan.kv_indptr[sequence + 1], first)
    query = token * rules.fold + block * rows
    start, stop = first + begin * rules.granularity, first + end * rules.granularity
    stop = np.minimum(stop, last)
    is_split = (begin > 0) | ~ends
    after = np.cumsum(is_split)  # partial rows up to and with an item's
    partial = (after - 1) * max_query_len
    row = np.where(is_split, partial, -1)
    columns = tile, row, query, query + rows, start, stop, last - stop, first
    plan.work_info_set[: len(items)] = np.stack(columns, 1)
    plan.work_indptr[:] = np.searchsorted(cta, np.arange(rules.ctas + 1))
    plan.reduce_partial_map[: is_split.sum()] = partial[is_split]
    plan.reduce_indptr[0] = 0
    plan.reduce_indptr[tile[ends] + 1] = after[ends]
    plan.reduce_indptr[len(tiles) + 1 :] = is_split.sum()
    plan.reduce_final_map[tile[is_split]] = np.stack((query, query + rows), 1)[is_split]


_Item = tuple[int, int, int, int, bool]  # CTA, tile, its blocks from and to, whether its last


class _Tile(NamedTuple):
    """A head block of a sequence; without query rows blocks and the fixed cost of an item are 0."""

    blocks: int
    tokens: int
    overhead: int


def _chunks(tiles: list[_Tile], rules: Rules, busy: int) -> list[_Item]:
    """The items of a batch-invariant plan for `busy` CTAs."""
    cuts = [[at // rules.granularity for at in rules.cuts(tile.blocks and tile.tokens)]
            for tile in tiles]  # fmt: skip
    total = sum(x.blocks + len(of) * x.overhead for x, of in zip(tiles, cuts, strict=True))
    items: list[_Item] = []
    at = 0
    for number, tile in enumerate(tiles):
        for begin, end in itertools.pairwise([*cuts[number], tile.blocks]):
            items.append((at * busy // total, number, begin, end, end == tile.blocks))
            at += end - begin + tile.overhead
    return items


def _pack_tightly(
    tiles: list[_Tile], rules: Rules, busy: int, longest: int, max_query_len: int
) -> list[_Item]:
    """The items for `busy` CTAs by the smallest budget tried; longest: of the longest sequence."""
    overhead = rules.overhead
    total = sum(tile.blocks + tile.overhead for tile in tiles)
    share = max(-(-total // busy) if busy else 0, 1 + (longest > MERGED_AT_ONCE))

    def least_cost(budget: int) -> int:
        cuts = (max(0, -(-tile.blocks // (budget - overhead)) - 1) for tile in tiles)
        return total + overhead * sum(cuts)

    budget = largest = share + overhead
    kept = overhead
    is_even = total == len(tiles) * (longest + overhead)
    if len(tiles) <= busy and longest <= share + overhead // 2:
        kept = budget = max(largest, longest + overhead)
    elif share <= (EVEN_SHARE if is_even else SMALL_SHARE * overhead):
        budget = min(largest, max(share, 2 * overhead))
        while budget < largest and least_cost(budget) > busy * budget:
            budget += 1
    while (items := _pack(tiles, rules, busy, budget, kept, max_query_len)) is None:
        budget = min(largest, budget + -(-overhead // STEPS))
    return items


def _pack(
    tiles: list[_Tile], rules: Rules, busy: int, budget: int, kept: int, max_query_len: int
) -> list[_Item] | None:
    """The items by the three rules, or None if a budget is too small for `busy` CTAs. kept: what a
    CTA that cuts a tile keeps of its budget: an overhead; or all: it cuts none."""
    items: list[_Item] = []
    number = done = 0  # done: blocks of this tile that are taken
    for cta in range(busy):
        left = budget
        while number < len(tiles) and left >= 0:
            tile = tiles[number]
            remaining = tile.blocks - done
            if left >= (cost := remaining + tile.overhead):
                taken, left = remaining, left - cost
            elif left > kept:
                taken, left = left - kept, -1
                if tile.tokens - (done + taken) * rules.granularity < max_query_len:
                    taken = remaining
            else:
                break
            begin, done = done, done + taken
            is_last = taken == remaining
            items.append((cta, number, begin, done, is_last))
            if is_last:
                number, done = number + 1, 0
    return items if number == len(tiles) else None
