"""The AITER adapter of `mla_fusion.attention` on the double: it keeps every rule, and is right."""

import itertools
import random
import re
from dataclasses import replace

import pytest
import torch

from mla_fusion.attention.aiter import selection
from mla_fusion.measure.distances import distance
from tests.aiter_double import heads, uses
from tests.aiter_double.uses import RULES, WIDE, Use
from tests.aiter_double.versions import DECODE, PLANNER


@pytest.fixture(autouse=True)
def machine(double, monkeypatch):
    uses.found(double, monkeypatch)


def assert_right(out, expected):
    assert distance(out, expected) < 4e-3  # one rounding to bf16


def test_the_adapter_keeps_every_rule(double):
    for op, rule in ((op, r) for op, rules in RULES.items() for r in rules if r.holds(double.at)):
        double.forget()
        if rule.refused:
            with pytest.raises(ValueError, match=re.escape(rule.refused)):
                uses.run(rule.hostile, double)
                pytest.fail(f"not refused: {rule.says}")
        else:
            assert_right(*uses.run(rule.hostile, double))
        assert bool(double.calls(op)) != bool(rule.refused), rule.says


SHAPES = {
    "gfx942": [
        Use({**WIDE, "num_heads": 12}, rows=(2, 1, 1)),
        Use({**WIDE, "num_heads": 64, "max_query_len": 4}, rows=(4, 1, 1)),
        Use({"max_query_len": 1}),
        Use({"max_query_len": 1, "num_heads": 64}),
        Use({"q_dtype": torch.bfloat16}, rows=(2, 1, 1)),
        # A plan for drafts in a step without: two tokens are folded, and one is not.
        Use({"num_heads": 64}, rows=(1, 1, 1)),
    ],
    "gfx950": [
        Use({"max_query_len": 4}, rows=(4, 1, 1)),
        Use({"max_query_len": 4, "num_heads": 32}, rows=(4, 1, 1)),
        Use({**WIDE, "num_heads": 48, "max_query_len": 3}, rows=(3, 1, 1)),
    ],
}


def test_the_adapter_plans_and_decodes(double):
    cap = 4 if double.at.has("split_budget") else -1
    for use in SHAPES[double.arch.name]:
        double.forget()
        settings = {**use.allocate, "max_split_per_batch": cap}
        assert_right(*uses.run(replace(use, allocate=settings, lengths=(700, 33, 5)), double))
        [plan], [call] = double.calls(PLANNER), double.calls(DECODE)
        assert (plan["page_size"], plan["max_split_per_batch"]) == (1, cap)
        assert (plan["is_causal"], plan["fast_mode"], plan["topk"]) == (True, True, -1)
        # Without it AITER leaves the plan of some batches aside.
        assert call["num_kv_splits"] == double.arch.compute_units


def test_random_ragged_steps(double):
    """Any heads, and rows of any lengths up to that of the plan, some of none."""
    rng, tried, folded = random.Random(double.at.release), 0, 0
    while tried < 12:
        drafts, dtype = rng.randint(1, 4), rng.choice((torch.bfloat16, double.arch.fp8))
        fields = {"num_heads": rng.randint(1, 128), "max_query_len": drafts, "max_batch": 4}
        rows = tuple(
            rng.choice((drafts, 0, rng.randint(0, drafts))) for _ in range(rng.randint(1, 4))
        )
        lengths = tuple(rng.choice((n, n + 1, 16, rng.randint(n, 400))) for n in rows)
        use = Use({**fields, "q_dtype": dtype, "kv_dtype": dtype}, rows=rows, lengths=lengths)
        if not any(rows):
            continue
        verdict = selection.aiter_verdict(
            fields["num_heads"], drafts, dtype, dtype, double.arch.name
        )
        if verdict.unsupported:
            continue
        tried, folded = tried + 1, folded + (verdict.layout.fold > 1)
        assert_right(*uses.run(use, double))
    assert folded


def test_every_shape_that_the_library_plans_has_a_kernel(double):
    """The two tables were written apart: `selection` is the library's, `heads` the double's."""
    planned, at, arch, fp8 = 0, double.at, double.arch.name, double.arch.fp8
    for query, cache in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, fp8), (fp8, fp8)):
        for count, qlen, lse in itertools.product(range(1, 145), range(1, 9), (False, True)):
            verdict = selection.aiter_verdict(count, qlen, query, cache, arch, return_lse=lse)
            if verdict.unsupported or (lse and not at.has("split_budget")):
                continue  # the adapter asks for v0.1.16 where a log-sum-exp is wanted
            assert verdict.query_len >= qlen
            kind = heads.kinds(query, cache)
            shape = heads.Shape(at, verdict.layout.padded, verdict.query_len, kind)
            assert shape.heads % at.heads_multiple == 0
            assert shape.kind != "mixed" or shape.heads == 16
            shape.check_supported()
            shape.check_planned()
            shape.check_persistent(lse)
            planned += 1
    assert planned > 300
