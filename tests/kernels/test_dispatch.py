"""The choice of a launch plan."""

from __future__ import annotations

import pytest
import torch

from mla_fusion.kernels import ProviderUnavailable, dispatch, dispatch_table, get_provider
from mla_fusion.kernels.dispatch import Plan


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> str:
    """A table with two head counts and two token limits."""
    rows = {
        8: [[1, {"block_m": 1}], [16, {"block_n": 32}]],
        64: [[1, {"block_m": 1, "block_n": 128}], [16, {"mode": "split"}]],
    }
    entry = {"arch": "sm_00", "fp8_query": rows, "activation_query": {8: [[1, {}]]}}
    monkeypatch.setitem(dispatch_table.TABLE, "a gpu", entry)
    dispatch.choose.cache_clear()
    return "a gpu"


def test_choose_uses_the_row_of_the_batch(table: str) -> None:
    assert dispatch.choose(1, 8, True, table) == Plan(block_m=1)
    assert dispatch.choose(2, 8, True, table) == Plan(block_n=32)
    assert dispatch.choose(16, 64, True, table) == Plan(mode="split")


def test_choose_extends_to_unmeasured_shapes(table: str) -> None:
    assert dispatch.choose(500, 8, True, table) == Plan(block_n=32)
    assert dispatch.choose(2, 16, True, table) == Plan(block_n=32)
    assert dispatch.choose(2, 128, True, table) == Plan(mode="split")
    assert dispatch.choose(7, 3, False, table) == Plan()


def test_representatives_cover_every_batch_of_the_bucket(table: str) -> None:
    plans = dispatch.representatives(20, 8, True, table)
    assert plans == {Plan(block_m=1): 1, Plan(block_n=32): 2}
    for measured in (None, table):
        covered = dispatch.representatives(64, 16, True, measured)
        assert {dispatch.choose(t, 16, True, measured) for t in range(1, 65)} == set(covered)


def test_fit_shrinks_tiles_of_deeper_or_wider_operands() -> None:
    plan = Plan(block_m=64, block_n=256)
    assert dispatch.fit(plan, 128, 2) == plan
    assert dispatch.fit(plan, 256, 4) == Plan(block_m=16, block_n=64)
    assert dispatch.fit(Plan(block_m=1), 128, 4).block_m == 1


def test_measured_tables_are_complete() -> None:
    for name, entry in dispatch_table.TABLE.items():
        assert entry["arch"], name
        for query in ("fp8_query", "activation_query"):
            for rows in entry[query].values():
                limits = [limit for limit, _ in rows]
                assert limits == sorted(limits) and limits[0] == 1
                assert all(isinstance(Plan(**fields), Plan) for _, fields in rows)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        Plan(mode="maybe")
    with pytest.raises(ValueError, match="unknown provider"):
        get_provider("fastest")


def test_triton_without_a_gpu_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderUnavailable, match="reference"):
        get_provider("triton")
