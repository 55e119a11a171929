"""The kernels of products under Triton's interpreter, with hostile inputs, against float64.

Run by tests/kernels/test_interpreted.py: the interpreter is chosen when Python starts."""

import pytest
import torch

from mla_fusion.projections import reference
from mla_fusion.projections.plans import PLANS
from mla_fusion.projections.triton import launch
from tests.kernels import interpreter

interpreter.install()
BF16 = torch.bfloat16
VECTOR, MATRIX = PLANS[1], PLANS[4]


def inputs(tokens, k, sizes, dtype=BF16, norm=False, odd=False):
    """Rows of x and of the weights lie between NaN, which nobody may read; with `odd` they begin
    anywhere."""
    torch.manual_seed(tokens)

    def rows(n):
        wide = torch.full((n, k + (11 if odd else 16)), float("nan"), dtype=dtype)
        wide[:, 8 : 8 + k] = torch.randn(n, k) / k**0.5
        return wide[:, 8 : 8 + k]

    weight = (1 + torch.randn(k) / 8).to(dtype) if norm else None
    return 40 * rows(tokens), [rows(n) for n in sizes], weight, 1e-5


def same(plan, given):
    """Sums in fp32 of up to 2,048 terms, and one rounding."""
    for got, want in zip(launch(plan, *given), reference.in_float64(*given), strict=True):
        assert got.is_contiguous() and got.dtype == given[0].dtype and got.shape == want.shape
        step = torch.finfo(got.dtype).eps / 2
        assert ((got - want).abs() <= 1.01 * step * want.abs() + 1e-5 * want.abs().max()).all()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan(plan):
    same(plan, inputs(1 if plan in PLANS[:3] else 16, 512, [64]))


@pytest.mark.parametrize("plan, tokens", [(VECTOR, 1), (MATRIX, 1), (MATRIX, 5), (MATRIX, 9)])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("k", [768, 1100], ids=["whole", "rest of K"])
def test_two_weights_with_a_rest_of_their_rows(plan, tokens, norm, k):
    same(plan, inputs(tokens, k, [37, 18], norm=norm))


@pytest.mark.parametrize("plan, tokens", [(VECTOR, 1), (MATRIX, 3)])
def test_rows_that_begin_anywhere_and_fp16(plan, tokens):
    same(plan, inputs(tokens, 300, [37], torch.float16, odd=True))


@pytest.mark.parametrize("plan, tokens", [(VECTOR, 1), (MATRIX, 12)])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_nan_and_infinity_stay_in_their_row(plan, tokens, norm):
    x, weights, *rest = inputs(tokens, 640, [24], norm=norm)
    x[-1, 3], x[0, 637] = float("nan"), float("inf")
    weights[0][5, 2] = float("nan")
    [got], [want] = launch(plan, x, weights, *rest), reference.project(x, weights, *rest)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


@pytest.mark.parametrize("plan, tokens", [(VECTOR, 1), (MATRIX, 4)])
def test_the_norm_rounds_where_the_reference_does(plan, tokens):
    """An identity instead of a weight shows the normalized x: equal but for the last bits of the
    sum of squares, which round few elements the other way."""
    x, _, weight, epsilon = inputs(tokens, 256, [], norm=True)
    [got] = launch(plan, x, [torch.eye(256, dtype=BF16)], weight, epsilon)
    want = reference.rms_norm(x, weight, epsilon)
    assert (got != want).float().mean() < 0.01
