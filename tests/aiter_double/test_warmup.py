"""The warm-up calls every op of AITER, so that it is built before the first request."""

from functools import partial

import pytest
import torch

from mla_fusion import kernels, runtime
from mla_fusion.kernels import aiter as provider
from mla_fusion.kernels.inputs import padded_batch
from mla_fusion.report import Variant
from tests import aiter_double
from tests.aiter_double import Aborted, calls
from tests.aiter_double.calls import H, L, R, packed
from tests.aiter_double.versions import FP4_PRODUCT, FP8_PRODUCT, FUSED
from tests.passes.fake_engine import Engine
from tests.passes.graphs import HEADS, LATENT, ROPE, Spec

BF16 = torch.bfloat16
PRODUCTS = {"plain": None, "fp4": FP4_PRODUCT, "fp8": FP8_PRODUCT}


def layer(double, kind, cache, query):
    given = calls.provider(cache, query)
    kept = ("kv_cache", "cos_sin_cache", "k_scale", "q_scale")
    weight = given["w_uk_t"]
    if kind != "plain":
        weight, _ = packed(kind, weight, double.arch.fp8)
    others = {"rope_dim": R, "is_neox": False, "q_dtype": query}
    return {"w_uk_t": weight} | {name: given[name] for name in kept} | others


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("types", ["bf16", "fp8 cache", "fp8"])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_every_op_is_called_as_a_step_calls_it(kind, types, rotated):
    lines: list[str] = []
    with aiter_double.installed("gfx950") as double:
        cache = BF16 if types == "bf16" else double.arch.fp8
        given = layer(double, kind, cache, cache if types == "fp8" else BF16)
        if not rotated:
            given["cos_sin_cache"] = None
        before = given["kv_cache"].view(torch.uint8).clone()
        provider.warmup(partial(padded_batch, **given), 5, progress=lines.append)
        made = double.calls(FUSED)
        assert [call["q_nope"].shape for call in made] == [(n, H, L) for n in (1, 2, 4, 5)]
        assert all((call["slot_mapping"] == -1).all() for call in made)
        assert torch.equal(given["kv_cache"].view(torch.uint8), before)
        product = PRODUCTS[kind]
        if product is not None:
            assert double.counts()[product] == 8  # by itself, and in front of the op
    named = [FUSED] if product is None else [product, FUSED]
    assert [name for line in lines for name in named if name in line] == named * 4


@pytest.mark.parametrize("kind, op", [("plain", FUSED), ("fp4", FP4_PRODUCT), ("fp4", FUSED)])
def test_the_last_line_names_the_call_that_ended_the_process(monkeypatch, kind, op):
    lines: list[str] = []

    def abort(*args, **kwargs):
        raise Aborted("a check failed")

    with aiter_double.installed("gfx950") as double:
        given = layer(double, kind, BF16, BF16)
        module = "aiter" if op == FUSED else f"aiter.ops.triton.{op}"
        monkeypatch.setattr(double.modules[module], op, abort)
        with pytest.raises(Aborted):
            provider.warmup(partial(padded_batch, **given), 5, progress=lines.append)
    assert f"AITER's {op} for 1 tokens (8 heads, torch.bfloat16, cache torch.bfloat16)" in lines[-1]


@pytest.fixture
def ask_again():
    """A provider that was found stays found, and the double does not."""
    kernels.get_provider.cache_clear()
    yield
    kernels.get_provider.cache_clear()


@pytest.mark.usefixtures("ask_again")
@pytest.mark.parametrize(
    "rope, table, factor", [("native", "float32", ""), ("nope", "", ""), ("nope", "", "float32")]
)
def test_an_engine_calls_it_for_each_variant(capsys, rope, table, factor):
    engine = Engine(Spec(rope, dtype=BF16, layers=2))
    before = [cache.clone() for cache in engine.caches()]
    variant = Variant(True, ROPE, table, "bfloat16", "auto", factor)
    with aiter_double.installed() as double:
        runtime.warm_up(engine.layers, [variant], "aiter", 2)
        shapes = [call["q_out"].shape for call in double.calls(FUSED)]
    assert shapes == [(n, HEADS, LATENT + ROPE) for n in (1, 2)], "one layer of the two"
    assert all(map(torch.equal, engine.caches(), before))
    said = capsys.readouterr().err
    assert all(f"{FUSED} for {n} tokens" in said for n in (1, 2))
