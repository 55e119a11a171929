"""The choice of a launch plan."""

import pytest
import torch

from mla_fusion.gpu import Gpu
from mla_fusion.kernels import ProviderUnavailable, dispatch, get_provider
from mla_fusion.kernels.dispatch import Plan, Row, Widths
from tests.gpus import described

DEEPSEEK, MISTRAL_SMALL = Widths(128, 64, 512), Widths(64, 64, 256)


@pytest.fixture
def device(monkeypatch):
    """A GPU measured with two head counts and two token limits; in bf16 with one of each."""
    of = "a gpu", "sm_00"
    rows = [
        Row(*of, True, DEEPSEEK, 8, 1, Plan(block_m=1)),
        Row(*of, True, DEEPSEEK, 8, 16, Plan(block_n=32)),
        Row(*of, True, DEEPSEEK, 64, 1, Plan(block_m=1, block_n=128)),
        Row(*of, True, DEEPSEEK, 64, 16, Plan(block_n=16)),
        Row(*of, True, MISTRAL_SMALL, 8, 1, Plan(block_n=16)),
        Row(*of, False, DEEPSEEK, 8, 1, Plan()),
    ]
    other = Row("another gpu", "sm_00", True, DEEPSEEK, 8, 2, Plan(rope_rows=1))
    monkeypatch.setattr(dispatch, "measured", lambda: [other, *rows])
    dispatch.choose.cache_clear()
    dispatch._nearest.cache_clear()
    return Gpu(*of)


@pytest.mark.parametrize(
    ("tokens", "heads", "fp8", "widths", "plan"),
    [
        (1, 8, True, DEEPSEEK, Plan(block_m=1)),
        (2, 8, True, DEEPSEEK, Plan(block_n=32)),
        (16, 64, True, DEEPSEEK, Plan(block_n=16)),
        (1, 8, True, MISTRAL_SMALL, Plan(block_n=16)),
        # More tokens and other heads than were measured.
        (500, 8, True, DEEPSEEK, Plan(block_n=32)),
        (2, 16, True, DEEPSEEK, Plan(block_n=32)),
        (2, 128, True, DEEPSEEK, Plan(block_n=16)),
        (7, 3, False, DEEPSEEK, Plan()),
        # Widths that were not measured: the nearest that were.
        (1, 64, True, Widths(64, 32, 256), Plan(block_n=16)),
        (1, 8, True, Widths(192, 64, 512), Plan(block_m=1)),
        (1, 8, True, Widths(256, 0, 1024), Plan(block_m=1)),
        (1, 8, False, MISTRAL_SMALL, Plan()),
    ],
)
def test_the_nearest_measurement_is_chosen(device, tokens, heads, fp8, widths, plan):
    assert dispatch.choose(tokens, heads, fp8, widths, device) == plan


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
    rows = [row[:-1] for row in dispatch.measured()]
    assert len(rows) == len(set(rows)) and ("NVIDIA H200", "sm_90") in {row[:2] for row in rows}
    assert all((*row[:-1], 1) in rows for row in rows)
    for name in {row[0] for row in rows}:
        assert {fp8 for gpu, _, fp8, *_ in rows if gpu == name} == {True, False}


def test_an_unknown_provider_is_refused():
    with pytest.raises(ValueError, match="unknown provider"):
        get_provider("fastest")


def test_triton_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    get_provider.cache_clear()  # of tests that imitate a GPU
    with pytest.raises(ProviderUnavailable, match="reference"):
        get_provider("triton")
