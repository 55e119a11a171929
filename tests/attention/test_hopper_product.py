"""The product with W_UV for Hopper: executed on a CPU, compiled, and where it is launched."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion import gpu
from mla_fusion.attention import cards as attention_cards
from mla_fusion.attention import triton as provider
from mla_fusion.attention.hopper import cards, product
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.measure.distances import distance
from tests.attention.decodes import BF16, FN, Launches
from tests.attention.epilogue_cases import Case, check_quantized, expected, make
from tests.attention.test_specialized_run import InStep
from tests.attention.without_memory import behind, inputs, meta
from tests.gpus import imitate
from tests.kernels.compiled import LDS, compile_report


class Machine(InStep):
    """W_UV may be copied before the kernel in front has ended: nothing else is copied by TMA."""

    def tma_load(self, *args):
        pdl, self.pdl = self.pdl, False
        super().tma_load(*args)
        self.pdl = pdl


def weights(dense, heads, latent, values, dtype=BF16):
    """W_UV as vLLM has it, half of a larger matrix: dense in "L", or, dequantized, in "V"."""
    both = values + 128
    if dense == "L":
        return torch.randn(heads, both, latent).to(dtype)[:, 128:].transpose(1, 2)
    return torch.randn(latent, heads, both).to(dtype)[..., 128:].transpose(0, 1)


def case(tokens, w_uv):
    """Latents of so many tokens, as inputs of a decode."""
    heads, latent, values = w_uv.shape
    latents = torch.randn(tokens, heads, latent).to(w_uv.dtype)
    out = torch.full((tokens, heads * values), torch.nan, dtype=w_uv.dtype)
    given = behind("sm_90", heads, values=values, latent=latent)
    return dataclasses.replace(given, out=latents, epilogue=Epilogue(w_uv, out))


@pytest.mark.parametrize("dense", "LV")
@pytest.mark.parametrize(
    ("tokens", "heads", "latent", "values", "dtype"),
    [(1, 3, 256, 128, BF16), (9, 2, 512, 256, torch.float16), (70, 1, 256, 256, BF16)],
)
def test_the_product(dense, tokens, heads, latent, values, dtype):
    torch.manual_seed(0)
    given = case(tokens, weights(dense, heads, latent, values, dtype))
    assert not cards.product(given)
    out = given.epilogue.out
    Machine(0).launch(product.launch_of(given))
    want = torch.einsum("thl,hlv->thv", given.out.double(), given.epilogue.w_uv.double())
    assert distance(out, want.flatten(1)) < 2.5e-3


MERGED = {
    "ragged": Case((1, 1, 1, 1, 1), (3, 0, 8, 2, 0), values=128, latent=256),
    "drafts": Case((4, 1, 0, 3), (9, 0, 0, 17), heads=3, values=128, latent=256),
    "outweighed": Case((2, 2), (32, 65), values=128, latent=256, outweighed=True),
    "padding": Case((2, 1, 2), (2, 0, 3), values=128, latent=256, padding=4),
    "folded heads": Case((1, 2), (2, 3), heads=18, values=128, latent=256),
    "200 sequences": Case((1,) * 200, (0, 2) * 100, values=128, latent=256),
}


@pytest.mark.parametrize("name", MERGED)
def test_splits_are_merged(name, monkeypatch):
    monkeypatch.setattr(cards, "MERGED_TILES", 1)
    monkeypatch.setattr(cards, "MERGED_SIZE", 1)
    monkeypatch.setattr(product, "merges", lambda given: True)
    wide, given = make(MERGED[name], lse=True)
    want = expected(given)
    Machine(0).launch(product.launch_of(given))
    assert not (wrong := want.wrong(wide, given)), wrong


MERGING = {"heads": 16, "dtype": FN, "tokens": 64}


@pytest.mark.parametrize(
    ("changed", "merges"),
    [({}, True), ({"heads": 20, "dtype": BF16}, True), ({"page": 8}, True), ({"tokens": 63}, False),
     ({"dtype": BF16, "tokens": 256}, True), ({"tokens": 257}, False),
     ({"heads": 64, "tokens": 32}, True), ({"heads": 64, "tokens": 31}, False),
     ({"batch_invariant": True}, False), ({"sparse": True}, False)],
)  # fmt: skip
def test_where_splits_are_merged(changed, merges, monkeypatch):
    """By the product, or by the reduction. The decode lets in the product early."""
    imitate(monkeypatch, "sm_90")
    options = MERGING | changed
    heads, tokens = options["heads"], options["tokens"]
    given, launched = inputs(**options, max_batch=512, max_kv_len=9), []
    given.plan.step = Step(tokens, tokens, 1)
    epilogue = Epilogue(meta(heads, 512, 128), meta(tokens, heads * 128))
    given = dataclasses.replace(given, lse=None, epilogue=epilogue)
    for name in ("decode", "merge", "multiply"):
        monkeypatch.setattr(provider, name, lambda given, name=name: launched.append(name))
    provider.launch(given)
    assert launched == ["decode", *["merge"] * (not merges), "multiply"]
    assert not merges or not cards.product(given)
    assert product.launch_of(given).arguments["MERGES"] == merges
    module = attention_cards.chosen(gpu.of("cuda"), given).module
    assert module.launch_of(given).arguments["early"] == merges


@pytest.mark.parametrize("left_out", ["gdc_wait", "fence_async_shared"])
def test_what_the_kernel_may_not_leave_out(left_out):
    machine, given = Machine(0), case(3, weights("L", 1, 256, 128))
    setattr(machine.gdc if left_out == "gdc_wait" else machine, left_out, lambda: None)
    with pytest.raises(AssertionError, match=r"before the kernel in front|without fence"):
        machine.launch(product.launch_of(given))


@pytest.mark.parametrize("quantization", ["tensor", "group", "group_ue8m0"])
def test_a_quantized_product(quantization):
    """What a quantization of the product gives, to the bit; padding has rows of zeros."""
    torch.manual_seed(0)
    given = case(9, weights("L", 2, 256, 256))
    given.out[2] = 0
    Machine(0).launch(product.launch_of(given))
    plain = given.epilogue
    scale = torch.tensor([0.37]) if quantization == "tensor" else torch.empty(4, 9).T
    out = torch.empty(9, 512, dtype=FN)
    quantized = Epilogue(plain.w_uv, out, scale, quantization == "group_ue8m0")
    given = dataclasses.replace(given, epilogue=quantized)
    Machine(0).launch(product.launch_of(given))
    check_quantized(plain.out, quantized, quantization)


@pytest.mark.parametrize("dense, quantization", [("latent", "none"), ("columns", "tensor"),
                                                 ("latent", "group")])  # fmt: skip
def test_w_uv_alone_is_read_before_the_reduction_has_ended(dense, quantization):
    """And a given scale. Nothing may be launched before the end of the product."""
    given = behind("sm_90", 16, dense=dense, quantization=quantization)
    given = dataclasses.replace(given, out=torch.empty(64, 16, 512, dtype=BF16, device="meta"))
    launch = product.launch_of(given)
    report = compile_report("sm_90", launch.kernel, launch.positional, launch.options)
    before, after = " ".join(report.order).split("ACQBULK")
    assert set(before.split()) <= {"UTMALDG", "LDG"} and "UTMALDG" not in after
    assert "PREEXIT" not in after and report.spills == 0
    assert report.shared <= LDS["sm_90"]


@pytest.mark.parametrize(
    ("tokens", "w_uv", "why"),
    [
        (1, (2, 320, 128), "256 or 512 latents"),
        (1, (2, 512, 192), "multiples of 128 columns"),
        (33, (128, 512, 128), "up to 4096 rows of its CTAs, got 4224"),
        (65, (32, 512, 128), "up to 4096 rows of its CTAs, got 4160"),
    ],
)
def test_what_it_leaves_to_torch(tokens, w_uv, why):
    assert why in cards.product(case(tokens, weights("L", *w_uv))).detail


def test_strides_that_it_leaves_to_torch():
    odd = torch.randn(3, 128 * 512 + 8).to(BF16)[:, : 128 * 512].view(3, 128, 512).transpose(1, 2)
    assert "whole rows of 16 bytes apart" in cards.product(case(1, odd)).detail
    latents = torch.empty(2, 3, 260, dtype=BF16)[..., :256]
    given = dataclasses.replace(case(2, weights("L", 3, 256, 128)), out=latents)
    assert "16 aligned bytes" in cards.product(given).detail


@pytest.mark.parametrize(
    ("target", "tokens", "scale", "launched"),
    [("sm_90", 4, None, 1), ("sm_90", 33, None, 0), ("sm_90", 64, torch.ones(1), 1),
     ("sm_80", 4, None, 0)],
)  # fmt: skip
def test_where_it_is_launched(target, tokens, scale, launched, monkeypatch):
    given, grids = case(tokens, weights("L", 128, 512, 128)), []
    epilogue = dataclasses.replace(given.epilogue, scale=scale)
    given = dataclasses.replace(given, epilogue=epilogue)
    products = Launches(product.mla_product.arg_names)
    monkeypatch.setattr(product, "mla_product", products)
    monkeypatch.setattr(torch, "bmm", lambda *_, **__: grids.append("bmm"))
    imitate(monkeypatch, target)
    provider.multiply(given)
    assert products.grids == [(1, 128, 1)] * launched and len(grids) == 1 - launched
