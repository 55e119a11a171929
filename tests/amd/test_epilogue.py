"""The epilogue and the quantization: the machine code for gfx942 and gfx950, executed, against the
formula that the interpreted one is compared with.
"""

import itertools

import pytest

pytest.importorskip("triton")

from mla_fusion.attention.triton import epilogue as epilogues
from tests.amd.execute import Settings
from tests.amd.provider import compared, launched, machine
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels.compiled import FP8

SHAPES = {
    quantization: list(dict.fromkeys(row.shape for row in epilogues.MEASURED if row.group == group))
    for quantization, group in (("none", False), ("group", True))
}
# Whole rows of up to 32 splits, of more in slices; all rows in slices, with groups.
SOME = [
    ("none", epilogues.choose(1, 16, 512, 128)),
    ("group", epilogues.choose(8, 8, 512, 128, "group")),
]
# Of a step, with splits: none; those of whole rows, in one turn and in two; more, of which the last
# turn has few and many; drafts, of which one is missing; padding, in a sequence's slot and behind.
STEPS = {
    "tokens": {"rows": (1, 1, 1, 1), "splits": (17, 0, 1, 128), "padding": 1},
    "drafts": {
        "rows": (2, 2, 1, 0), "splits": (32, 65, 33, 0), "padding": 2, "outweighed": True,
    },
}  # fmt: skip
OTHER_ORDERS = [(False, False), (True, True), (True, False)]
EVERY = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def case(shape, step="tokens", **more):
    """A layer of DeepSeek's of which the rank has two heads: their number is not compiled in. That
    of a work item is, and the same for every step.
    """
    given = {"shape": shape, "heads": 2, "values": 128, "latent": 512, "per_work": 16}
    return Case(**{**given, **STEPS[step], **more})


def check(target, shape, quantization="none", settings=None, step="tokens", **more):
    """Execute an epilogue that does not quantize and, with a quantization, one that does, and the
    quantization alone: these two give what a quantization of the first one's result does.
    """
    given = case(shape, step, **more)
    wide, plain = make(given, lse=True)
    quantizes = quantization != "none"
    if quantizes:
        fused, separate = (make(given, quantization, FP8[target])[1] for _ in range(2))
        plain.out[-1] = fused.out[-1] = 0  # a group whose maximum is zero
    want = expected(plain)
    with machine(target, settings) as launches:
        epilogues.launch(plain, shape)
        if quantizes:
            epilogues.launch(fused, shape)
            product = plain.epilogue.out.contiguous()
            epilogues.quantize(product, separate.epilogue)
    counts = int(plain.plan.epilogue_counts.count_nonzero())
    wrong = want.wrong(wide, plain) | ({"counts": counts} if counts else {})
    compared(wrong, wide, plain.lse)
    for got in (fused.epilogue, separate.epilogue) if quantizes else ():
        check_quantized(product, got, quantization)
    return launches


@pytest.mark.parametrize(
    "backwards, pauses",
    [(False, True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_ORDERS)],
)
@pytest.mark.parametrize("quantization, shape", SOME, ids=str)
def test_epilogue(target, quantization, shape, backwards, pauses):
    """In both orders of the programs, so that another one is the last of the slices."""
    settings = Settings(backwards=backwards, pauses=pauses)
    for step in STEPS:
        launches = check(target, shape, quantization, settings, step)
    code = launches[0].kernel.program.instructions
    assert ("global_atomic_add" in {each.name for each in code}) == (shape.slices > 1)


def test_an_epilogue_of_more_heads_is_the_same_code(target):
    """What few heads show holds for as many as `choose` takes the shape for."""
    shape = SOME[0][1]
    with launched(target) as launches:
        for heads in (2, 16):
            _, inputs = make(case(shape, heads=heads))
            epilogues.launch(inputs, shape)
    few, many = (each.kernel.program for each in launches)
    assert few is many


@pytest.mark.nightly
@pytest.mark.parametrize("rounding", [-1, 1])
@pytest.mark.parametrize("quantization, shape", EVERY, ids=str)
def test_epilogues_with_other_approximations(target, quantization, shape, rounding):
    for step, backwards in itertools.product(STEPS, (False, True)):
        settings = Settings(backwards=backwards, rounding=rounding, seed=7)
        check(target, shape, quantization, settings, step)


@pytest.mark.nightly
@pytest.mark.parametrize("dense", ["latent", "values"])
@pytest.mark.parametrize("quantization", ["none", "tensor", "group"])
def test_epilogues_of_other_layouts(target, quantization, dense):
    for slots, slices in ((1, 4), (4, 1)):
        shape = epilogues.Shape(slots, 128, slices, 4, 4)
        check(target, shape, quantization, None, dense=dense, values=256)
