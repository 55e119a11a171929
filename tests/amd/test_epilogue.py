"""The epilogue and the quantization: the machine code for gfx942 and gfx950, executed."""

import itertools

import pytest

pytest.importorskip("triton")

from mla_fusion.attention import triton_epilogue as epilogues
from tests.amd import epilogue
from tests.amd.execute import Settings

SHAPES = {
    quantization: list(dict.fromkeys(row.shape for row in epilogues.MEASURED if row.group == group))
    for quantization, group in (("none", False), ("group", True))
}
# Whole rows of up to 32 pieces, of more in slices; all rows in slices, with groups.
SOME = [
    ("none", epilogues.choose(1, 16, 512, 128)),
    ("group", epilogues.choose(8, 8, 512, 128, "group")),
]
EVERY = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def check(target, shape, quantization, settings, step="tokens", **more):
    given = epilogue.case(shape, step, **more)
    if quantization == "none":
        return epilogue.check(target, given, settings)
    return epilogue.check_quantization(target, given, quantization, settings)


@pytest.mark.parametrize("quantization, shape", SOME, ids=str)
def test_epilogue(target, quantization, shape):
    """In both orders of the programs, so that another one is the last of the slices."""
    for step, backwards, pauses in itertools.product(epilogue.STEPS, *[(False, True)] * 2):
        settings = Settings(backwards=backwards, pauses=pauses)
        launches = check(target, shape, quantization, settings, step)
    code = launches[0].kernel.program.instructions
    assert ("global_atomic_add" in {each.name for each in code}) == (shape.slices > 1)


def test_an_epilogue_of_more_heads_is_the_same_code(target):
    """What few heads show holds for as many as `choose` takes the shape for."""
    shape = SOME[0][1]
    few, many = (
        check(target, shape, "none", None, heads=heads)[0].kernel.program for heads in (2, 16)
    )
    assert few is many


@pytest.mark.nightly
@pytest.mark.parametrize("rounding", [-1, 1])
@pytest.mark.parametrize("quantization, shape", EVERY, ids=str)
def test_epilogues_with_other_approximations(target, quantization, shape, rounding):
    for step, backwards in itertools.product(epilogue.STEPS, (False, True)):
        settings = Settings(backwards=backwards, rounding=rounding, seed=7)
        check(target, shape, quantization, settings, step)


@pytest.mark.nightly
@pytest.mark.parametrize("dense", ["latent", "values"])
@pytest.mark.parametrize("quantization", ["none", "tensor", "group"])
def test_epilogues_of_other_layouts(target, quantization, dense):
    for slots, slices in ((1, 4), (4, 1)):
        shape = epilogues.Shape(slots, 128, slices, 4, 4)
        check(target, shape, quantization, None, dense=dense, values=256)
