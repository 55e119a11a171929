"""The provider with W_UK packed for AITER's Triton products, as vLLM 0.32 packs it on ROCm."""

import re
from pathlib import Path

import pytest
import torch

from mla_fusion.kernels import aiter as provider
from mla_fusion.kernels import reference
from mla_fusion.kernels.inputs import Inputs
from tests import aiter_double
from tests.aiter_double import calls, numbers
from tests.aiter_double.calls import L, P, packed
from tests.aiter_double.versions import FP4_PRODUCT, FP8_PRODUCT, FUSED

PAGE = (Path(__file__).parents[2] / "docs/aiter.md").read_text()
# Of the absorbed query, then in fp8, each for W_UK in bf16, fp8 and mxfp4.
ERRORS = re.findall(r"[\d.]+ %", PAGE.split("For normal random values")[1])[:6]


def rounded_query(kind, q_nope, fp8):
    """The query as the product sees it: quantized in groups."""
    if kind == "fp8":
        return numbers.grouped_fp8(q_nope, fp8, 128)
    return numbers.from_mxfp4(*numbers.to_mxfp4(q_nope))


@pytest.mark.parametrize("arch, kind", [("gfx950", "fp4"), ("gfx950", "fp8"), ("gfx942", "fp8")])
@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_the_query_is_the_product_that_vllm_asks_for(arch, kind, cache):
    """With an fp8 cache vLLM hands the scale of the query to the fp4 product."""
    with aiter_double.installed(arch) as double:
        fp8 = double.arch.fp8
        dtype = torch.bfloat16 if cache == "bf16" else fp8
        given = calls.provider(dtype, dtype)
        plain = given["w_uk_t"]
        given["w_uk_t"], wide = packed(kind, plain, fp8)
        for name in ("shape", "dtype", "device"):
            assert getattr(given["w_uk_t"], name) == getattr(plain, name), name
        q = rounded_query(kind, given["q"][..., :P], fp8)
        absorbed = torch.einsum("thp,hpl->thl", q, wide)
        provider.fused_mla_decode_prep(Inputs(**given, is_neox=False))
        [call] = double.calls(FP4_PRODUCT if kind == "fp4" else FP8_PRODUCT)
        [fused] = double.calls(FUSED)
    assert fused["q_nope"].is_contiguous(), "the product hands back a transposed view"
    assert call["transpose_bm"] is True
    if kind == "fp4":
        assert call["prequant"] is True
        assert call["y_scale"] is (None if cache == "bf16" else given["q_scale"])
        absorbed = absorbed / (1 if cache == "bf16" else given["q_scale"])
    live = torch.tensor(calls.SLOTS) >= 0
    got = given["q_out"][live][..., :L].float()
    if cache == "bf16":
        torch.testing.assert_close(got, absorbed[live], rtol=2**-7, atol=1e-3)
    else:
        expected = reference.cast(absorbed.bfloat16(), dtype, given["q_scale"])[live].float()
        # Sums in another order round a bf16 tie otherwise.
        assert (got == expected).float().mean() > 0.99
        torch.testing.assert_close(got, expected, rtol=0.13, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "fp8", "wanted"),
    [
        ("bf16", torch.float8_e4m3fn, ("0.2 %", "2.7 %")),
        ("fp8", torch.float8_e4m3fn, ("3.7 %", "4.5 %")),
        ("fp8", torch.float8_e4m3fnuz, ("3.7 %", "4.5 %")),
        ("mxfp4", torch.float8_e4m3fn, ("16 %", "17 %")),
    ],
)
def test_what_packed_weights_cost(kind, fp8, wanted):
    """The errors in docs/aiter.md."""
    g = torch.Generator().manual_seed(0)
    w = (torch.randn(8, 128, 512, generator=g) / 128**0.5).bfloat16()
    q = torch.randn(64, 8, 128, generator=g).bfloat16()
    exact = torch.einsum("thp,hpl->thl", q.double(), w.double())
    absorbed = exact
    if kind != "bf16":
        kind_of = kind.removeprefix("mx")
        _, wide = packed(kind_of, w, fp8)
        absorbed = torch.einsum("thp,hpl->thl", rounded_query(kind_of, q, fp8), wide)
    absorbed = absorbed.bfloat16().float()
    query = numbers.clamped_fp8(absorbed / 0.02, fp8).float() * 0.02
    shown = []
    for got in (absorbed, query):
        error = ((got.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
        shown.append(f"{100 * error:.2g} %" if error > 0.01 else f"{100 * error:.1g} %")
    assert tuple(shown) == wanted
    at = ("bf16", "fp8", "mxfp4").index(kind)
    assert wanted == (ERRORS[at], ERRORS[at + 3])
