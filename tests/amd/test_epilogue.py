"""The reduction and the quantization: the machine code for gfx942 and gfx950, executed, against the
formula that the interpreted ones are compared with.
"""

import itertools

import pytest

pytest.importorskip("triton")

from mla_fusion.attention import triton as provider
from tests.amd.execute import Settings
from tests.amd.provider import machine
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels.compiled import FP8

# Of a step, with splits: none; one turn of the reduction and two; more, of which the last turn has
# few and many; drafts, of which one is missing; padding behind.
STEPS = {
    "tokens": {"rows": (1, 1, 1, 1), "splits": (17, 0, 1, 128), "padding": 1},
    "drafts": {
        "rows": (2, 2, 1, 0), "splits": (32, 65, 33, 0), "padding": 2, "outweighed": True,
    },
}  # fmt: skip
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


def check(target, step="tokens", quantization="none", settings=None, **more):
    """Execute the reduction, and the quantization of a product, if there is one."""
    # A layer of DeepSeek's of which the rank has two heads, whose number is not compiled in.
    layer = {"heads": 2, "values": 128, "latent": 512, "per_work": 16}
    case = Case(**STEPS[step] | layer | more)
    wide, plain = make(case, lse=True)
    want = expected(plain)
    with machine(target, settings):
        provider.merge(plain)
        provider.multiply(plain)
        if quantization != "none":
            _, quantized = make(case, quantization, FP8[target])
            quantized.out.copy_(plain.out)
            provider.multiply(quantized)
            check_quantized(plain.epilogue.out.contiguous(), quantized.epilogue, quantization)
    assert not (wrong := want.wrong(wide, plain)), wrong


@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_what_follows_a_decode(target, backwards):
    settings = Settings(backwards=backwards)
    for step, quantization in zip(STEPS, ("group", "tensor"), strict=True):
        check(target, step, quantization, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("rounding", [-1, 1])
@pytest.mark.parametrize("quantization", ["none", "tensor", "group", "group_ue8m0"])
def test_other_approximations(target, quantization, rounding):
    for step, backwards in itertools.product(STEPS, (False, True)):
        settings = Settings(backwards=backwards, rounding=rounding, seed=7)
        check(target, step, quantization, settings, dense="values", values=256)
