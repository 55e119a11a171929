"""The comparisons bite: errors of known size, planted."""

import pytest
import torch

from mla_fusion.measure import distances

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_neighbours_are_one_step_apart(dtype):
    x = torch.cat((torch.randn(100).to(dtype), torch.tensor([0.0, 1.0, -2.0], dtype=dtype)))
    above = torch.nextafter(x, torch.full_like(x, torch.inf))
    assert distances.steps(x, x).eq(0).all()
    assert distances.steps(above, x).eq(1).all() and distances.steps(x, above).eq(1).all()


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_steps_of_fp8_count_its_values(dtype):
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique().to(dtype)
    assert distances.steps(values[1:], values[:-1]).eq(1).all()
    assert distances.steps(values[-1:], values[:1]).item() == len(values) - 1


def test_zeros_are_equal_and_nan_is_nan_only():
    got = torch.tensor([0.0, torch.nan, torch.nan, 1.0])
    want = torch.tensor([-0.0, torch.nan, 1.0, torch.nan])
    assert distances.steps(got, want)[:2].tolist() == [0, 0]
    assert distances.steps(got, want)[2:].gt(2**32).all()


def test_a_planted_error_is_counted():
    want = torch.randn(40).bfloat16()
    got = want.clone()
    got.view(torch.int16)[7] += 3
    assert distances.agreement((got, want)) == (39 / 40, 3)
    assert distances.agreement((want, want), (got, want)) == (79 / 80, 3)
    assert distances.agreement((want[:0], want[:0])) == (1.0, 0)


def test_the_distance_is_relative_and_keeps_nan():
    want = torch.tensor([3.0, 4.0])
    assert distances.distance(want, want) == 0
    assert distances.distance(want + torch.tensor([0.0, 0.5]), want) == 0.1
    for got in (torch.tensor([torch.nan, 4.0]), want / 0):
        assert not distances.distance(got, want) <= 1e300
    assert (
        distances.distance(torch.zeros(2), torch.zeros(2)) == 0 < distances.distance(want, want * 0)
    )
