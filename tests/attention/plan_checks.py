"""The properties of every plan, by any planner, checked only from its buffers."""

import itertools
from types import SimpleNamespace

import numpy as np

from mla_fusion.attention.plan import planner

GARBAGE = -77


def buffers(rules, max_batch):
    """Buffers of exactly the sizes a plan has, full of garbage."""
    shapes = planner.shapes(rules, max_batch)
    return SimpleNamespace(**{n: np.full(s, GARBAGE, np.int32) for n, s in shapes.items()})


def check_plan(plan, rules, query_lens, seq_lens, max_query_len):
    """Assert every property of a plan for sequences of these lengths."""
    batch, fold = len(seq_lens), rules.fold
    max_batch = len(plan.qo_indptr) - 1
    query = np.concatenate(([0], np.cumsum(query_lens)))
    tokens = np.concatenate(([0], np.cumsum(seq_lens)))
    assert (plan.qo_indptr == np.pad(query, (0, max_batch - batch), mode="edge")).all()
    assert (plan.kv_indptr == np.pad(tokens, (0, max_batch - batch), mode="edge")).all()

    assert plan.work_indptr[0] == 0 and (np.diff(plan.work_indptr) >= 0).all()
    count = int(plan.work_indptr[-1])
    assert count <= rules.max_works(max_batch)
    items = plan.work_info_set[:count].tolist()
    by_tile = {}
    for item in items:
        by_tile.setdefault(item[planner.BATCH], []).append(item)
    assert [item[planner.BATCH] for item in items] == sorted(i[planner.BATCH] for i in items)

    splits = []
    for sequence, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for block in range(fold):
            tile = sequence * fold + block
            mine = by_tile.pop(tile, [])
            assert mine or rows == 0
            assert len(mine) <= 1 or length > rules.granularity, "`is_whole` launches no reduction"
            first_row = int(query[sequence]) * fold + block * rows
            seen = np.zeros((rows, length), int)
            for item in mine:
                _, partial, qo_start, qo_end, kv_start, kv_end, kv_offset, kv_first = item
                assert kv_first == tokens[sequence]
                assert (qo_start, qo_end) == (first_row, first_row + rows)
                assert tokens[sequence] <= kv_start <= kv_end <= tokens[sequence + 1]
                assert rows == 0 or kv_offset == tokens[sequence + 1] - kv_end
                assert (partial >= 0) == (len(mine) > 1)
                start, end = kv_start - tokens[sequence], kv_end - tokens[sequence]
                for row in range(rows):
                    causal_end = end + kv_offset - (rows - 1 - row)
                    seen[row, start : max(0, min(end, causal_end))] += 1
            expected = np.arange(length) < length - (rows - 1 - np.arange(rows))[:, None]
            assert (seen == expected).all(), "each visible (row, token) once, no other"
            starts = [item[planner.KV_START] for item in mine]
            assert starts == sorted(starts)
            if rules.chunk and rows:
                assert starts == [tokens[sequence] + cut for cut in rules.cuts(length)]
            begin, end = plan.reduce_indptr[tile : tile + 2]
            partials = [item[planner.PARTIAL_ROW] for item in mine if len(mine) > 1]
            assert plan.reduce_partial_map[begin:end].tolist() == partials
            if partials:
                assert plan.reduce_final_map[tile].tolist() == [first_row, first_row + rows]
                # No split but the last may lie where the first row of the query sees nothing.
                left = [tokens[sequence + 1] - start for start in starts[1:]]
                assert rules.chunk or min(left) >= max_query_len
            else:
                assert (plan.reduce_final_map[tile] == GARBAGE).all(), "not a split tile"
            splits += partials
    assert not by_tile, "items of sequences that are not there"
    assert plan.reduce_indptr[0] == 0 and (np.diff(plan.reduce_indptr) >= 0).all()
    assert (plan.reduce_indptr[batch * fold :] == len(splits)).all()
    assert len(splits) <= rules.max_partials(max_batch)
    rows = sorted(splits)
    assert all(b - a >= max_query_len for a, b in itertools.pairwise(rows))
    assert not rows or rows[-1] + max_query_len <= rules.max_partials(max_batch) * max_query_len

    load = np.array(worker_load(plan, rules))
    busy = rules.busy_ctas(batch)
    assert not load[busy:].any()
    if rules.chunk:
        most = min(max(rules.chunk, rules.middle, rules.far), max(seq_lens))
        assert load.max() <= load[:busy].mean() + -(-most // rules.granularity) + rules.overhead
        return
    spare = max(-(-(max_query_len - 1) // rules.granularity), 0 if splits else rules.overhead // 2)
    if load.any():
        is_long = max(seq_lens) > planner.MERGED_AT_ONCE * rules.granularity
        assert load.max() <= max(load[:busy].mean() + 1, 1 + is_long) + rules.overhead + spare


def worker_load(plan, rules):
    """Cost of each CTA's items in blocks, with the fixed cost of each."""
    load = []
    for begin, end in zip(plan.work_indptr, plan.work_indptr[1:], strict=False):
        items = plan.work_info_set[begin:end]
        tokens = items[:, planner.KV_END] - items[:, planner.KV_START]
        has_rows = items[:, planner.QO_END] > items[:, planner.QO_START]
        blocks = -(-tokens // rules.granularity) + rules.overhead
        load.append(int((blocks * has_rows).sum()))
    return load
