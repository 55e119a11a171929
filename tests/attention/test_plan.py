import collections
import dataclasses
import functools
import inspect

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.attention.plan import planner
from mla_fusion.attention.plan.buffers import Rules, Settings

from .decodes import addresses, plan_for, refresh
from .plan_checks import GARBAGE, buffers, check_plan

EXAMPLES = 600  # each is two batches
seen: collections.Counter[str] = collections.Counter()


@st.composite
def batches(draw):
    """Rules, the longest query, and two ragged batches of (query rows, KV tokens)."""
    # CTAs, fold, granularity, overhead, cap.
    choices = (1, 1, 2, 8), (1, 16, 64, 2**16), (1, 2, 16, 1024), (-1, -1, 1, 4, 16)
    rules = [draw(st.integers(1, 40)), *(draw(st.sampled_from(each)) for each in choices)]
    if not draw(st.integers(0, 2)):
        chunk = rules[2] * draw(st.sampled_from((1, 4, 16)))
        rules += chunk, chunk * draw(st.sampled_from((1, 4))), 7 * chunk, 2000
    longest = draw(st.sampled_from((1, 1, 2, 4, 8)))
    rows = st.sampled_from((longest, longest, 1, 0)) | st.integers(0, longest)
    tokens = st.integers(0, 70) | st.integers(0, 2000) | st.sampled_from((0, 1, 15, 16, 17, 512))
    batch = st.lists(st.tuples(rows, tokens), min_size=1, max_size=9)
    return Rules(*rules), longest, [draw(batch), draw(batch)]


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(batches())
def check_ragged_batches(case):
    rules, longest, steps = case
    max_batch = max(map(len, steps))
    plan = buffers(rules, max_batch)
    for step in steps:
        query_lens, seq_lens = map(list, zip(*step, strict=True))
        indptr = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        plan.reduce_final_map[:] = GARBAGE
        seen["tried"] = 0
        planner.fill_arrays(plan, rules, indptr, np.array(seq_lens, np.int32), longest)
        check_plan(plan, rules, query_lens, seq_lens, longest)
        seen["batches"] += 1
        seen["split"] += int(plan.reduce_indptr[-1] > 0)
        seen["smaller than before"] += step is steps[1] and len(step) < len(steps[0])


def plan_of(rules, seq_lens):
    """A plan that was checked, the sequences of its items, and the tokens of each."""
    plan, batch = buffers(rules, len(seq_lens)), len(seq_lens)
    indptr = np.arange(batch + 1, dtype=np.int32)
    planner.fill_arrays(plan, rules, indptr, np.array(seq_lens, np.int32), 1)
    check_plan(plan, rules, [1] * batch, seq_lens, 1)
    items = plan.work_info_set[: plan.work_indptr[-1]]
    return plan, items[:, planner.BATCH], items[:, planner.KV_END] - items[:, planner.KV_START]


@pytest.mark.parametrize(
    "ctas, lengths, most, is_level",
    [
        (132, [1024] * 64, 8, True),  # not 10 and 6
        (132, [1024] * 16, 3, False),  # not 2: a split costs more than a block saves
        (132, [2048] * 64, 16, True),  # not 18 and 14
        (132, [8192] * 64, 64, True),
        (12, [2256, 2394, 741, 376], 9, False),  # the second budget that is tried
        (4, [108, 423, 1038, 638], 10, False),  # the third
    ],
)
def test_the_largest_split_is_the_smallest_that_fits(ctas, lengths, most, is_level):
    _, _, tokens = plan_of(Rules(ctas, 1, 64, 4, -1), lengths)
    blocks = -(-tokens // 64)
    assert blocks.max() == most and (blocks.min() == most) == is_level, blocks


def test_every_plan_covers_its_batch_once(monkeypatch):
    seen.clear()
    pack = planner._pack

    def limited(*arguments):
        """Of at most `STEPS` budgets and the largest one: a refresh ends."""
        seen["tried"] += 1
        assert seen["tried"] <= planner.STEPS + 1
        return pack(*arguments)

    monkeypatch.setattr(planner, "_pack", limited)
    check_ragged_batches()
    assert seen["batches"] >= 1200
    assert min(seen["split"], seen["smaller than before"]) > 100, seen


@pytest.mark.parametrize(
    "ctas, batch, blocks, splits, rows",
    # Public figures of AITER's planner, contexts of 8192: blocks of the largest split, splits of
    # one sequence, partial rows in all.
    [
        (304, 1, 2, 256, 256), (304, 8, 14, 37, 296), (304, 64, 112, 6, 341),
        (304, 256, 445, 3, 550), (256, 1, 3, 171, 171), (256, 64, 132, 4, 256),
        (256, 256, 512, 1, 0),
    ],
)  # fmt: skip
def test_the_published_examples(ctas, batch, blocks, splits, rows):
    plan, tiles, tokens = plan_of(Rules(ctas, 1, 16, 16, -1), [8192] * batch)
    found = tokens.max() // 16, np.bincount(tiles).max(), plan.reduce_indptr[-1]
    assert found == (blocks, splits, rows)


def test_a_cap_is_a_budget_of_the_whole_batch():
    _, tiles, _ = plan_of(Rules(304, 1, 16, 16, 4), [8192, 16])
    assert np.bincount(tiles).tolist() == [8, 1]


@pytest.mark.parametrize(
    "tiles, longest, cut", [(132, 1600, False), (133, 1400, True), (132, 1700, True)]
)
def test_nothing_is_cut_where_whole_tiles_are_within_the_budget(tiles, longest, cut):
    """Lengths that differ by less than an item costs, as after a common prompt: a CTA that
    fills its budget would cut a block from nearly every sequence."""
    plan, *_ = plan_of(Rules(132, 1, 64, 4, -1), [1100] * (tiles - 2) + [longest] * 2)
    splits = plan.reduce_indptr[-1]
    assert splits > 200 if cut else splits == 0


@pytest.mark.parametrize("tokens, splits", [(2048, 32), (2049, 17), (16384, 128)])
def test_a_worker_takes_two_blocks_where_one_is_not_worth_merging(tokens, splits):
    plan, *_ = plan_of(Rules(264, 1, 64, 4, -1), [tokens])
    assert plan.reduce_indptr[-1] == splits


make = functools.partial(plan_for, max_query_len=2, v_head_dim=32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class TestPlan:
    def test_buffers_have_the_published_shapes(self):
        plan, tiles, ctas = make(num_heads=128, heads_per_work=64, max_split_per_batch=4), 4 * 2, 8
        shapes = {
            "work_indptr": (ctas + 1,), "work_info_set": (tiles + ctas - 1, 8),
            "reduce_indptr": (tiles + 1,), "reduce_final_map": (tiles, 2),
            "reduce_partial_map": (tiles + ctas,), "partial_output": (2 * (ctas - 1) * 2, 64, 32),
        }  # fmt: skip
        assert {name: getattr(plan, name).shape for name in shapes} == shapes
        assert plan.work_metadata_ptrs.dtype == torch.uint64
        assert make().reduce_partial_map.shape == (4 + ctas - 1,)

    @pytest.mark.parametrize(
        ("heads", "rows", "per_work", "fold"),
        [(8, 1, 16, 1), (8, 2, 8, 1), (4, 8, 8, 1), (8, 40, 8, 1), (9, 4, 16, 1), (24, 2, 32, 1),
         (32, 8, 16, 2), (80, 1, 16, 5)],
    )  # fmt: skip
    def test_heads_of_an_item(self, heads, rows, per_work, fold):
        """Several rows of up to 8 heads have no padding to 16: 8 of them are a block of 64."""
        plan = make(num_heads=heads, max_query_len=rows)
        assert (plan.layout.per_work, plan.layout.fold) == (per_work, fold)

    def test_help_shows_the_arguments_of_a_plan(self):
        shown = inspect.signature(PersistentDecodePlan.allocate).parameters
        assert [*shown] == [field.name for field in dataclasses.fields(Settings)]

    def test_a_plan_shows_itself_in_a_line(self):
        plan = make()
        assert repr(plan).count("\n") == 0 and len(repr(plan)) < 200
        assert "never refreshed" in repr(plan)
        refresh(plan, [1], [5])
        assert "refreshed for 1 sequences" in repr(plan)

    def test_refresh_moves_nothing(self):
        plan = make()
        before = addresses(plan)
        for lens in ((300, 20, 7, 90), (50,)):
            refresh(plan, [1] * len(lens), lens)
        assert addresses(plan) == before
        pointers = plan.work_metadata_ptrs.view(torch.int64).tolist()
        assert pointers == [before["work_indptr"], before["work_info_set"]]

    def test_refresh_copies_the_lengths(self):
        """Lengths that change after the refresh do not change the plan."""
        plan, seq_lens = make(), ints(40, 9)
        plan.refresh(qo_indptr=ints(0, 1, 3), seq_lens=seq_lens, num_tokens=3, max_query_len=2)
        seq_lens.fill_(1000)
        assert plan.kv_indptr.tolist() == [0, 40, 49, 49, 49]
        assert plan.qo_indptr.tolist() == [0, 1, 3, 3, 3]

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"max_batch": 0}, "max_batch must be at least 1"),
            ({"num_heads": 16.0}, "num_heads must be a whole number, got 16.0"),
            ({"max_query_len": True}, "max_query_len must be a whole number, got True"),
            ({"q_dtype": "bfloat16"}, "q_dtype must be a type such as torch.bfloat16, got 'b"),
            ({"q_dtype": torch.int32}, "q_dtype must be bf16, fp16, fp32 or fp8, got torch.int32"),
            ({"kv_dtype": torch.float64}, "kv_dtype must be bf16, fp16, fp32 or fp8"),
            ({"device": None}, "device must be one such as 'cuda' or 'cpu', got None"),
            ({"device": "gpu"}, "device must be one such as 'cuda' or 'cpu', got 'gpu'"),
            ({"cta": 8}, "allocate has no cta: it takes max_batch, "),
            ({"overhead": 1025}, "overhead must be at most 1024 for 8 tiles"),
            ({"max_batch": 2**24}, "overhead must be at most 8 for 33554432 tiles"),
            ({"kv_granularity": 2**16 + 1}, "kv_granularity must be at most 65536"),
            ({"ctas": None}, "ctas must be given on cpu"),
            ({"heads_per_work": 24}, "multiple of 16"),
            ({"max_split_per_batch": 0}, "max_split_per_batch must be -1"),
            ({"max_kv_len": 2**30}, "4294967296, and a plan counts them in 32 bits"),
            ({"batch_invariant": True}, "max_kv_len must be given, with chunks"),
            ({"batch_invariant": True, "max_kv_len": 9, "chunks": (32, 48, 64)}, "chunks must"),
            ({"batch_invariant": True, "planner": "aiter"}, 'planner must be "portable"'),
        ],
    )
    def test_allocate_refuses(self, changes, message):
        with pytest.raises(TypeError if "cta" in changes else ValueError, match=message):
            make(**changes)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"qo_indptr": ints(0, 1)}, "qo_indptr must be a dense int32 tensor of 3"),
            ({"seq_lens": [4, 5]}, r"seq_lens must be a tensor of one dimension, got \[4, 5\]"),
            ({"seq_lens": ints(4)[0]}, "seq_lens must be a tensor of one dimension, got torch.int"),
            ({"qo_indptr": ints(1, 2, 3)}, "qo_indptr must be 0 at its start, got 1"),
            ({"qo_indptr": ints(0, 2, 1), "max_query_len": 2}, "0 to 2 .* one before, got -1"),
            ({"qo_indptr": ints(0, 2, 3), "num_tokens": 3}, "0 to 1 .* one before, got 2"),
            ({"seq_lens": ints(4, -5)}, "seq_lens must be 0 or more, got -5"),
            ({"num_tokens": 1}, "num_tokens must be at least 2, the query rows of qo_indptr"),
            ({"num_tokens": -1}, "num_tokens must be 0 or more"),
            ({"num_tokens": 2.0}, "num_tokens must be a whole number, got 2.0"),
            ({"max_query_len": "1"}, "max_query_len must be a whole number, got '1'"),
            ({"seq_lens": torch.tensor([4, 5])}, "seq_lens must be a dense int32"),
            ({"seq_lens": ints(*[1] * 5), "qo_indptr": ints(*range(6))}, "1 to 4 sequences"),
            ({"max_query_len": 3}, "max_query_len must be 1 to 2"),
            ({"seq_lens": ints(2**31 - 1, 1)}, "2147483648 KV tokens"),
            ({"seq_lens": ints(4, 1025)}, "at most 600 .max_kv_len., got 1025"),
        ],
    )
    def test_refresh_refuses(self, changes, message):
        given = {"qo_indptr": ints(0, 1, 2), "seq_lens": ints(4, 5), "num_tokens": 2}
        chunks = {"batch_invariant": True, "max_kv_len": 600} if "max_kv_len" in message else {}
        with pytest.raises(ValueError, match=message):
            make(**chunks).refresh(**{"max_query_len": 1, **given, **changes})
