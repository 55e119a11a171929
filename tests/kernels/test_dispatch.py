"""The choice of a launch plan."""

from pathlib import Path

import pytest
import torch
import tune_dispatch

from mla_fusion.kernels import ProviderUnavailable, dispatch, get_provider
from mla_fusion.kernels.dispatch import Plan


@pytest.fixture
def table(monkeypatch):
    """A table with two head counts and two token limits."""
    rows = {
        8: [(1, Plan(block_m=1)), (16, Plan(block_n=32))],
        64: [(1, Plan(block_m=1, block_n=128)), (16, Plan(mode="split"))],
    }
    device = dispatch.Measured("sm_00", {True: rows, False: {8: [(1, Plan())]}})
    monkeypatch.setattr(dispatch, "measured", lambda: {"a gpu": device})
    dispatch.choose.cache_clear()
    return "a gpu"


def test_choose_uses_the_row_of_the_batch(table):
    assert dispatch.choose(1, 8, True, table) == Plan(block_m=1)
    assert dispatch.choose(2, 8, True, table) == Plan(block_n=32)
    assert dispatch.choose(16, 64, True, table) == Plan(mode="split")


def test_choose_extends_to_unmeasured_shapes(table):
    assert dispatch.choose(500, 8, True, table) == Plan(block_n=32)
    assert dispatch.choose(2, 16, True, table) == Plan(block_n=32)
    assert dispatch.choose(2, 128, True, table) == Plan(mode="split")
    assert dispatch.choose(7, 3, False, table) == Plan()


def test_representatives_cover_every_batch_of_the_bucket(table):
    plans = dispatch.representatives(20, 8, True, table)
    assert plans == {Plan(block_m=1): 1, Plan(block_n=32): 2}
    for measured in (None, table):
        covered = dispatch.representatives(64, 16, True, measured)
        assert {dispatch.choose(t, 16, True, measured) for t in range(1, 65)} == set(covered)


def test_fit_shrinks_tiles_of_deeper_or_wider_operands():
    plan = Plan(block_m=64, block_n=256)
    assert dispatch.fit(plan, 128, 2) == plan
    assert dispatch.fit(plan, 256, 4) == Plan(block_m=16, block_n=64)
    assert dispatch.fit(Plan(block_m=1), 128, 4).block_m == 1


def test_measured_tables_are_complete():
    assert dispatch.measured()["NVIDIA H200"].arch == "sm_90"
    for name, device in dispatch.measured().items():
        for by_heads in device.rows.values():
            assert by_heads, name
            for rows in by_heads.values():
                limits = [limit for limit, _ in rows]
                assert limits == sorted(set(limits)) and limits[0] == 1


def test_the_table_is_read_as_the_tuner_writes_it():
    plan = Plan(mode="split", block_m=64, rest_last=True, num_warps=8)
    written = [
        tune_dispatch.row("a gpu", "sm_00", query, 16, tokens, plan if tokens > 1 else Plan())
        for query in ("fp8", "bf16")
        for tokens in (1, 32)
    ]
    lines = [{name: str(value) for name, value in row.items()} for row in written]
    rows = {16: [(1, Plan()), (32, plan)]}
    assert dispatch.read(lines) == {"a gpu": dispatch.Measured("sm_00", {True: rows, False: rows})}
    file = Path(dispatch.__file__).with_name("dispatch.csv")
    assert file.read_text().splitlines()[0].split(",") == list(written[0])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="mode must be"):
        Plan(mode="maybe")
    with pytest.raises(ValueError, match="unknown provider"):
        get_provider("fastest")


def test_triton_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderUnavailable, match="reference"):
        get_provider("triton")
