"""What follows a decode under the repaired interpreter; test_interpreted.py runs this."""

import pytest

from mla_fusion.attention import triton as provider
from tests.attention.decodes import FN, FNUZ, FP16
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()

CASES = {
    "one split": Case((1,), (1,)),
    "not split": Case((1,), (0,)),
    "33 splits": Case((1,), (33,), values=16),
    "ragged": Case((1, 1, 1, 1, 1), (3, 0, 8, 1, 0)),
    "tokens of two sequences": Case((1, 1, 1), (2, 0, 5), dense="values"),
    "drafts": Case((4, 1, 0, 3), (3, 0, 0, 9), heads=3),
    "outweighed": Case((2, 2), (32, 65), outweighed=True),
    "padding": Case((2, 1, 2), (2, 0, 1), padding=4),
    "folded heads": Case((1, 2), (2, 3), heads=18, values=16, latent=16),
    "320 latents": Case((1, 1), (4, 0), latent=320),
    "fp16": Case((1, 1), (2, 3), dtype=FP16),
}


@pytest.mark.parametrize(
    "name", daily(CASES, "33 splits", "ragged", "drafts", "outweighed", "320 latents", "fp16")
)
def test_result(name):
    wide, given = make(CASES[name], lse=True)
    want = expected(given)
    provider.merge(given)
    provider.multiply(given)
    assert not (wrong := want.wrong(wide, given)), wrong
    assert want.is_near(CASES[name].dtype)


QUANTIZED = {
    "bf16": (Case((1, 1, 1), (3, 0, 1), values=128, heads=3), FN),
    "fnuz": (Case((2, 0, 1), (3, 0, 1), values=256, padding=2), FNUZ),
    "fp16": (Case((1, 1), (2, 0), values=128, dtype=FP16), FN),
}


@pytest.mark.parametrize("quantization", ["tensor", "group", "group_ue8m0"])
@pytest.mark.parametrize("name", daily(QUANTIZED, "bf16"))
def test_quantized(name, quantization):
    """What a quantization of the result that is not quantized gives, to the bit."""
    case, fp8 = QUANTIZED[name]
    results = [make(case, kind, fp8)[1] for kind in ("none", quantization)]
    for given in results:
        provider.merge(given)
        given.out[-1] = 0  # a group whose maximum is zero
        provider.multiply(given)
    plain, quantized = (given.epilogue for given in results)
    check_quantized(plain.out.contiguous(), quantized, quantization)
