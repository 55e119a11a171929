"""`benchmarks/hopper_fp8.py`: sums of Hopper's tensor core, and what is known of their error."""

import math
import re
from fractions import Fraction

import hopper_fp8
import pytest
import torch

FN = torch.float8_e4m3fn


def exponent(x):
    """Of e4m3 values, as hardware has it."""
    return max(math.frexp(x)[1] - 1, -6)


def cut(x, unit):
    """A fraction without what is below `unit`."""
    return int(x / unit) * unit


def added(total, pairs):
    """The rules, in fractions: a sum and 32 pairs of factors."""
    known = [exponent(a) + exponent(b) for a, b in pairs if a * b]
    if total:
        known.append(math.frexp(float(total))[1] - 1)
    if not known:
        return Fraction(0)
    unit = Fraction(2) ** (max(known) - 13)
    result = sum((cut(Fraction(a) * Fraction(b), unit) for a, b in pairs), cut(total, unit))
    if result:
        result = cut(result, Fraction(2) ** (math.frexp(float(result))[1] - 1 - 13))
    return result


@pytest.mark.parametrize("sizes", [(1, 1), (40, 40), (0.004, 0.004), (0.01, 100)], ids=str)
def test_products_are_those_of_the_rules(sizes):
    torch.manual_seed(0)
    q, keys = (
        (torch.randn(rows, 96) * size).to(FN).float()
        for rows, size in zip((2, 3), sizes, strict=True)
    )
    got = hopper_fp8.products(q, keys)
    for row, query in enumerate(q.tolist()):
        for column, key in enumerate(keys.tolist()):
            total = Fraction(0)
            for start in range(0, 96, 32):
                total = added(total, list(zip(query, key, strict=True))[start : start + 32])
            assert got[row, column] == float(total)


@pytest.mark.parametrize(
    ("small", "sum_of_both"),
    [(2.0**-5, 256 + 2.0**-5), (2.0**-6, 256), (-(2.0**-6), 256), (-(2.0**-5), 256 - 2.0**-5)],
)
def test_what_is_below_the_fourteenth_bit_is_lost(small, sum_of_both):
    q, keys = torch.zeros(2, 1, 64)
    q[0, [0, 1]], keys[0, [0, 1]] = 1.0, torch.tensor([256.0, small])
    assert hopper_fp8.products(q, keys).item() == sum_of_both
    later = keys.clone()
    later[0, 1], later[0, 33], q[0, 33] = 0, small, 1
    assert hopper_fp8.products(q, later).item() == sum_of_both


def test_a_subnormal_value_has_the_exponent_of_normal_ones():
    """2^-9 counts as 2^-6: beside 2^-9 * 256 a sum keeps 2^-11, and not 2^-14."""
    q, keys = torch.zeros(2, 1, 32)
    q[0, :2], keys[0, :2] = 2.0**-9, torch.tensor([256, 2.0**-4])
    assert hopper_fp8.products(q, keys).item() == 0.5
    keys[0, 1] = 2.0**-2
    assert hopper_fp8.products(q, keys).item() == 0.5 + 2.0**-11


@pytest.mark.parametrize("amplitude", [1, 8])
def test_the_error_is_as_expected_and_within_its_bound(amplitude):
    torch.manual_seed(1)
    q = (torch.randn(8, 576) * amplitude).to(FN).float()
    keys = (torch.randn(256, 576) * 8).to(FN).float()
    error = hopper_fp8.products(q, keys).double() - q.double() @ keys.double().T
    bound, shrinking, deviation = hopper_fp8.expected(q, keys)
    assert (error.abs() <= bound).all()
    beyond = (error - shrinking) / deviation
    assert beyond.mean().abs() < 0.1 and 0.8 < beyond.std() < 1.2 and beyond.abs().max() < 6
    # What is expected is most of the error of the largest scores.
    large = (q @ keys.T).abs().flatten().topk(50).indices
    rest = (error - shrinking).flatten()[large].norm() / error.flatten()[large].norm()
    assert rest < 0.8


def test_the_table(capsys):
    hopper_fp8.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line in lines[1:]:
        size, _, error, *_, bound, largest, rms = re.split(r" \| | \+- ", line)
        assert float(rms) < float(largest) < float(bound) and float(error) <= float(largest)
        assert float(largest) < 6e-3 * max(1, float(size))
