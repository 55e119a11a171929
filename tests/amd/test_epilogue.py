"""The reduction and the quantization: the machine code for gfx942 and gfx950, executed."""

import itertools

import pytest

pytest.importorskip("triton")

from tests.amd import epilogue
from tests.amd.execute import Settings

OTHER_ORDERS = [(False, False), (True, True), (True, False)]
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


@pytest.mark.parametrize(
    "backwards, pauses",
    [(False, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_ORDERS)],
)
def test_what_follows_a_decode(target, backwards, pauses):
    settings = Settings(backwards=backwards, pauses=pauses)
    for step, quantization in zip(epilogue.STEPS, ("group", "tensor"), strict=True):
        epilogue.check(target, step, quantization, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("rounding", [-1, 1])
@pytest.mark.parametrize("quantization", ["none", "tensor", "group", "group_ue8m0"])
def test_other_approximations(target, quantization, rounding):
    for step, backwards in itertools.product(epilogue.STEPS, (False, True)):
        settings = Settings(backwards=backwards, rounding=rounding, seed=7)
        epilogue.check(target, step, quantization, settings, dense="values", values=256)
