"""The choice of a launch plan."""

import dataclasses

import pytest
import torch
import tune_dispatch

from mla_fusion.gpu import Gpu
from mla_fusion.kernels import ProviderUnavailable, dispatch, get_provider
from mla_fusion.kernels.dispatch import Plan, Widths
from tests.gpus import described

DEEPSEEK, MISTRAL_SMALL = Widths(128, 64, 512), Widths(64, 64, 256)


@pytest.fixture
def table(monkeypatch):
    """A table with two head counts and two token limits."""
    rows = {
        8: [(1, Plan(block_m=1)), (16, Plan(block_n=32))],
        64: [(1, Plan(block_m=1, block_n=128)), (16, Plan(block_n=16))],
    }
    small = {8: [(1, Plan(block_n=16))]}
    by_widths = {DEEPSEEK: rows, MISTRAL_SMALL: small}
    device = dispatch.Measured("sm_00", {True: by_widths, False: {DEEPSEEK: {8: [(1, Plan())]}}})
    monkeypatch.setattr(dispatch, "measured", lambda: {"a gpu": device})
    dispatch.choose.cache_clear()
    return Gpu("a gpu")


def test_choose_uses_the_row_of_the_batch(table):
    assert dispatch.choose(1, 8, True, DEEPSEEK, table) == Plan(block_m=1)
    assert dispatch.choose(2, 8, True, DEEPSEEK, table) == Plan(block_n=32)
    assert dispatch.choose(16, 64, True, DEEPSEEK, table) == Plan(block_n=16)
    assert dispatch.choose(1, 8, True, MISTRAL_SMALL, table) == Plan(block_n=16)


def test_choose_extends_to_unmeasured_shapes(table):
    assert dispatch.choose(500, 8, True, DEEPSEEK, table) == Plan(block_n=32)
    assert dispatch.choose(2, 16, True, DEEPSEEK, table) == Plan(block_n=32)
    assert dispatch.choose(2, 128, True, DEEPSEEK, table) == Plan(block_n=16)
    assert dispatch.choose(7, 3, False, DEEPSEEK, table) == Plan()
    # Widths that were not measured: the nearest that were.
    assert dispatch.choose(1, 64, True, Widths(64, 32, 256), table) == Plan(block_n=16)
    assert dispatch.choose(1, 8, True, Widths(192, 64, 512), table) == Plan(block_m=1)
    assert dispatch.choose(1, 8, True, Widths(256, 0, 1024), table) == Plan(block_m=1)
    assert dispatch.choose(1, 8, False, MISTRAL_SMALL, table) == Plan()


OF_CDNA = Plan(block_m=64, rope_rows=64, cache_tokens=4, rest_last=True)


@pytest.mark.parametrize(
    ("arch", "tokens", "own"),
    [("gfx942", 64, True), ("gfx942", 256, True), ("gfx950", 64, True), ("gfx950", 256, False),
     ("gfx942", 1, False)],
)  # fmt: skip
def test_amd_has_plans_of_its_own(arch, tokens, own):
    wanted = OF_CDNA if own else dispatch.default_plan(tokens, 128, 512)
    assert dispatch.choose(tokens, 128, True, DEEPSEEK, described(arch)) == wanted


def test_fit_shrinks_tiles_of_deeper_or_wider_operands():
    plan = Plan(block_m=64, block_n=256)
    assert dispatch.fit(plan, 128, 64, 2) == dispatch.fit(plan, 64, 32, 2) == plan
    assert dispatch.fit(plan, 256, 64, 4) == Plan(block_m=16, block_n=64)
    assert dispatch.fit(Plan(block_m=1), 128, 64, 4).block_m == 1
    assert dispatch.fit(Plan(rope_rows=64), 128, 128, 2) == Plan(rope_rows=32)


def test_measured_tables_are_complete():
    assert dispatch.measured()["NVIDIA H200"].arch == "sm_90"
    for name, device in dispatch.measured().items():
        for by_heads in (b for by_widths in device.rows.values() for b in by_widths.values()):
            assert by_heads, name
            for rows in by_heads.values():
                limits = [limit for limit, _ in rows]
                assert limits == sorted(set(limits)) and limits[0] == 1


def test_the_file_is_read_as_the_tuner_writes_it(monkeypatch, tmp_path):
    monkeypatch.setattr(dispatch, "FOLDER", tmp_path)
    plan = Plan(block_m=64, rest_last=True, num_warps=8)
    for widths, height in ((DEEPSEEK, 16), (MISTRAL_SMALL, 16), (DEEPSEEK, 64)):
        written = [
            tune_dispatch.row(query, widths, 16, tokens, dataclasses.replace(plan, block_m=height))
            for query in ("fp8", "bf16")
            for tokens in (1, 32)
        ]
        tune_dispatch.write_table(tmp_path, "a gpu", "sm_00", written)
    small = dataclasses.replace(plan, block_m=16)
    rows = {w: {16: [(1, p), (32, p)]} for w, p in ((DEEPSEEK, plan), (MISTRAL_SMALL, small))}
    assert dispatch.measured.__wrapped__() == {
        "a gpu": dispatch.Measured("sm_00", {True: rows, False: rows})
    }


def test_an_unknown_provider_is_refused():
    with pytest.raises(ValueError, match="unknown provider"):
        get_provider("fastest")


def test_triton_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderUnavailable, match="reference"):
        get_provider("triton")
