"""The AITER adapter of `mla_fusion.attention` on the double: it keeps every rule, and is right."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention import selection
from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES, broken, uses
from tests.aiter_double.rule import RAISED
from tests.aiter_double.uses import Use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.aiter_double import Double
    from tests.aiter_double.rule import Rule

PLACES = list(itertools.product(ARCHITECTURES, RELEASES))
RULES = [(op, r, *at) for op, rs in broken.ADAPTER_RULES.items() for r in rs for at in PLACES
         if r.hostile and r.holds(*at)]  # fmt: skip


@pytest.fixture
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """The double of an architecture and a release, on a machine that seems to be one of its."""
    attention.get_provider.cache_clear()
    with aiter_double.installed(*request.param) as double:
        monkeypatch.setattr(selection, "architecture", lambda device: double.arch.name)
        monkeypatch.setattr(selection, "multiprocessors", lambda device: double.arch.compute_units)
        yield double
    attention.get_provider.cache_clear()


def assert_right(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 4e-3  # one rounding to bf16


@pytest.mark.parametrize(
    "op, rule, double",
    [(op, rule, at) for op, rule, *at in RULES],
    ids=[f"{op}-{rule.name}-{arch}-{release}" for op, rule, arch, release in RULES],
    indirect=["double"],
)
def test_the_adapter_keeps_the_rule(op: str, rule: Rule, double: Double) -> None:
    if rule.library == RAISED:
        with pytest.raises(ValueError, match=re.escape(rule.refused)):
            uses.run(rule.hostile, double)
        assert not double.calls(op)
    else:
        assert_right(*uses.run(rule.hostile, double))
        assert double.calls(op)


FN, FNUZ, BF16 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16
WIDE = {"q_dtype": BF16, "kv_dtype": BF16}
SHAPES = [
    ("gfx942", {**WIDE, "num_heads": 12}),
    ("gfx942", {**WIDE, "num_heads": 64, "max_query_len": 4}),
    ("gfx942", {"max_query_len": 1}),
    ("gfx942", {"max_query_len": 1, "num_heads": 64}),
    ("gfx942", {"q_dtype": BF16}),
    ("gfx950", {"max_query_len": 4}),
    ("gfx950", {"max_query_len": 4, "num_heads": 32}),
    ("gfx950", {**WIDE, "num_heads": 48, "max_query_len": 3}),
]


@pytest.mark.parametrize(
    "changes, double",
    [(changes, (arch, release)) for arch, changes in SHAPES for release in RELEASES],
    indirect=["double"],
)
def test_the_adapter_plans_and_decodes(changes: dict[str, Any], double: Double) -> None:
    rows = (changes.get("max_query_len", 2), 1, 1)
    assert_right(*uses.run(Use(changes, lengths=(700, 33, 5), rows=rows), double))
    assert double.counts()["mla_decode_fwd"] == double.counts()["get_mla_metadata_v1"] == 1


@pytest.mark.parametrize("double", [("gfx942", r) for r in RELEASES], indirect=True, ids="-".join)
def test_a_plan_for_drafts_serves_steps_without(double: Double) -> None:
    """There AITER folds 64 heads in fp8 for two tokens, and not for one."""
    assert_right(*uses.run(Use({"num_heads": 64}, rows=(1, 1, 1)), double))


@pytest.mark.parametrize("double", PLACES, indirect=True, ids="-".join)
def test_a_row_that_sees_no_key_is_zero(double: Double) -> None:
    """AITER leaves NaN there, and a log-sum-exp of +inf."""
    out, expected = uses.run(Use(lengths=(70, 1, 200)), double)
    assert_right(out, expected)
    assert not out[2].any()
    [call] = double.calls("mla_decode_fwd")
    assert call["o"][2].isnan().all()
