"""The epilogue and the quantization: the machine code for gfx942 and gfx950, executed."""

import itertools

import pytest

pytest.importorskip("triton")

from mla_fusion.attention.triton import epilogue as epilogues
from tests.amd import epilogue
from tests.amd.execute import Settings
from tests.amd.provider import launched
from tests.attention.epilogue_cases import make

SHAPES = {
    quantization: list(dict.fromkeys(row.shape for row in epilogues.MEASURED if row.group == group))
    for quantization, group in (("none", False), ("group", True))
}
# Whole rows of up to 32 splits, of more in slices; all rows in slices, with groups.
SOME = [
    ("none", epilogues.choose(1, 16, 512, 128)),
    ("group", epilogues.choose(8, 8, 512, 128, "group")),
]
OTHER_ORDERS = [(False, False), (True, True), (True, False)]
EVERY = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def check(target, shape, quantization, settings, step="tokens", **more):
    given = epilogue.case(shape, step, **more)
    if quantization == "none":
        return epilogue.check(target, given, settings)
    return epilogue.check_quantization(target, given, quantization, settings)


@pytest.mark.parametrize(
    "backwards, pauses",
    [(False, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_ORDERS)],
)
@pytest.mark.parametrize("quantization, shape", SOME, ids=str)
def test_epilogue(target, quantization, shape, backwards, pauses):
    """In both orders of the programs, so that another one is the last of the slices."""
    settings = Settings(backwards=backwards, pauses=pauses)
    for step in epilogue.STEPS:
        launches = check(target, shape, quantization, settings, step)
    code = launches[0].kernel.program.instructions
    assert ("global_atomic_add" in {each.name for each in code}) == (shape.slices > 1)


def test_an_epilogue_of_more_heads_is_the_same_code(target):
    """What few heads show holds for as many as `choose` takes the shape for."""
    shape = SOME[0][1]
    with launched(target) as launches:
        for heads in (2, 16):
            _, inputs = make(epilogue.case(shape, heads=heads))
            epilogues.launch(inputs, shape)
    few, many = (each.kernel.program for each in launches)
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
