"""The provider keeps every rule of AITER's fused op, and is right."""

import re

import pytest
import torch

from mla_fusion.kernels import aiter as provider
from mla_fusion.kernels import reference
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.measure.distances import steps
from tests.aiter_double import calls
from tests.aiter_double.versions import FUSED


def test_the_provider_keeps_every_rule(double):
    for name, (changes, refused) in calls.BROKEN.items():
        double.forget()
        ours = calls.provider()
        given = {**ours, "fp8": double.arch.fp8}
        ours |= {argument: make(given) for argument, make in changes.items()}
        if refused:
            with pytest.raises(ValueError, match=re.escape(refused)):
                provider.fused_mla_decode_prep(Inputs(**ours, is_neox=False))
                pytest.fail(f"not refused: {name}")
        else:
            theirs = {**ours, **{n: ours[n].clone() for n in ("kv_cache", "q_out")}}
            assert_equal_to_the_reference(double, ours, theirs, is_neox=False)
        assert len(double.calls(FUSED)) == (not refused), name


def assert_equal_to_the_reference(double, ours, theirs, is_neox):
    """Both compute from equal arguments; AITER takes cosines in the activation type."""
    if theirs["cos_sin_cache"] is not None:
        theirs["cos_sin_cache"] = theirs["cos_sin_cache"].bfloat16()
    provider.fused_mla_decode_prep(Inputs(**ours, is_neox=is_neox))
    reference.fused_mla_decode_prep(Inputs(**theirs, is_neox=is_neox))
    # Equal bytes; but gfx942 truncates the rotated key of a bf16 cache, so one unit there.
    assert torch.equal(ours["q_out"].view(torch.uint8), theirs["q_out"].view(torch.uint8))
    a, b = ours["kv_cache"], theirs["kv_cache"]
    truncates = double.arch.truncates_key and a.dtype == torch.bfloat16
    rope = calls.L if truncates else a.shape[-1]
    assert torch.equal(a[..., :rope].view(torch.uint8), b[..., :rope].view(torch.uint8))
    if truncates:
        assert steps(a[..., rope:].contiguous(), b[..., rope:].contiguous()).max() <= 1


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("cache, query", [("act", "act"), ("fp8", "act"), ("fp8", "fp8")])
def test_equal_to_the_reference(double, is_neox, cache, query):
    types = {"act": torch.bfloat16, "fp8": double.arch.fp8}
    ours, theirs = (calls.provider(types[cache], types[query]) for _ in range(2))
    assert_equal_to_the_reference(double, ours, theirs, is_neox)
    assert ours["q_out"][2].float().abs().max() == 0  # the padded row


@pytest.mark.parametrize("cache, query", [("act", "act"), ("fp8", "fp8")])
def test_a_scaled_query(double, cache, query):
    """It is scaled before the product: vLLM rotates it first, which swaps two roundings there."""
    types = {"act": torch.bfloat16, "fp8": double.arch.fp8}
    factor = torch.linspace(1, 1.1, calls.T)
    ours, theirs, vllms = (calls.provider(types[cache], types[query]) for _ in range(3))
    given = ours["q"].clone()
    theirs["q"] = reference.scale(given, factor, given.dtype)
    assert_equal_to_the_reference(double, {**ours, "q_factor": factor}, theirs, is_neox=False)
    assert torch.equal(ours["q"], given)
    vllms |= {"cos_sin_cache": vllms["cos_sin_cache"].bfloat16(), "q_factor": factor}
    reference.fused_mla_decode_prep(Inputs(**vllms, is_neox=False))
    off = (ours["q_out"].float() - vllms["q_out"].float()).abs()
    assert not off[..., : calls.L].any()
    if query == "act":
        # Two roundings here, two there, each of 2**-9 of a rotated value: of two products.
        largest = 2 * theirs["q"].abs().max() * vllms["cos_sin_cache"].abs().max()
        assert 0 < off.max() < 4 * 2.0**-9 * largest


def test_a_padded_row_is_left_alone_by_aiter_and_zeroed_by_the_provider(double):
    ours = calls.provider()
    ours["positions"][2] = 2**40  # nothing may read it
    provider.fused_mla_decode_prep(Inputs(**ours, is_neox=False))
    assert ours["q_out"][2].eq(0).all()
    untouched = calls.provider()["kv_cache"].flatten(0, 1)[41:]
    assert torch.equal(ours["kv_cache"].flatten(0, 1)[41:], untouched)
    [call] = double.calls(FUSED)
    call["q_out"].fill_(7)
    double.ops[FUSED](**call)
    assert call["q_out"][2].eq(7).all() and not call["q_out"][3].eq(7).all()


def test_an_engine_has_its_tables_split_and_cast_once(double):
    """And another engine has its own; outside of one nothing is kept."""
    given, one = calls.provider(), {}
    for derived in (one, one, {}, None):
        provider.fused_mla_decode_prep(Inputs(**given, is_neox=False, derived=derived))
    first, second, *others = (call["cos_cache"].data_ptr() for call in double.calls(FUSED))
    assert first == second and first not in others


def test_tables_of_models_without_rope_fit_each_width(double):
    derived = {}
    for rope in (calls.R, calls.R // 2):
        given = {**calls.provider(), "cos_sin_cache": None}
        before = {"q": calls.P, "k_pe": 0, "kv_cache": calls.L, "q_out": calls.L}
        for name, width in before.items():
            given[name] = given[name][..., : width + rope].contiguous()
        provider.fused_mla_decode_prep(Inputs(**given, is_neox=True, derived=derived))
    assert [call["cos_cache"].shape for call in double.calls(FUSED)] == [(1, 32), (1, 16)]
    assert all(call["positions"].eq(0).all() for call in double.calls(FUSED))
