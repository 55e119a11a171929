"""The reference provider against formulas written out element by element in float64."""

import math
import types

import cases
import pytest
import torch
from test_arithmetic import rotated

from mla_fusion import kernels
from mla_fusion.kernels import reference
from mla_fusion.measure.distances import POISON


@pytest.mark.parametrize(
    "neox, factor, context_parallel, norm",
    [
        (False, None, False, None), (True, None, False, None), (True, torch.float32, False, None),
        (False, None, True, None), (False, None, False, 0.5),
    ],
)  # fmt: skip
def test_reference_is_the_formula(neox, factor, context_parallel, norm):
    case = cases.Case(
        act=torch.float32, kv=torch.float32, query=torch.float32, neox=neox, strided=True,
        factor=factor, context_parallel=context_parallel, norm=norm,
    )  # fmt: skip
    call = cases.build(case)
    a = call._asdict()
    out, storage = cases.run(reference, call)
    cache = storage.view(torch.float32).as_strided(a["kv_cache"].shape, a["kv_cache"].stride())
    for t, slot in enumerate(a["slot_mapping"].tolist()):
        if slot < 0 and not context_parallel:
            assert not out[t].any()
            continue
        angles = a["cos_sin_cache"][a["positions"][t]].tolist()
        if slot >= 0:
            row = cache[slot // case.block_size, slot % case.block_size]
            latents = a["kv_c"][t].tolist()
            if norm is not None:
                mean = math.fsum(x * x for x in latents) / case.latent
                weights = a["kv_norm_weight"].tolist()
                scaled = zip(latents, weights, strict=True)
                latents = [x / math.sqrt(mean + norm) * w for x, w in scaled]
            want = latents + rotated(a["k_pe"][t].tolist(), angles, neox)
            torch.testing.assert_close(row, torch.tensor(want), rtol=1e-6, atol=1e-6)
        for h in range(case.heads):
            q, w = a["q"][t, h].tolist(), a["w_uk_t"][h].tolist()
            latent = [
                math.fsum(q[p] * w[p][c] for p in range(case.nope)) for c in range(case.latent)
            ]
            by = 1.0 if factor is None else float(a["q_factor"][t])
            want = [by * x for x in latent + rotated(q[case.nope :], angles, neox)]
            torch.testing.assert_close(out[t, h], torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_only_addressed_slots_change():
    call = cases.build(cases.Case(strided=True))
    _, storage = cases.run(reference, call)
    assert call.kv_cache.view(torch.uint8).eq(POISON).all()  # it runs on a copy
    assert not storage.eq(POISON).all()
    cache, slots = call.kv_cache, call.slot_mapping
    written = storage.as_strided(cache.shape, cache.stride())
    slots = slots[slots >= 0]
    written[slots // cache.shape[1], slots % cache.shape[1]] = POISON
    assert storage.eq(POISON).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w_uk_t", torch.zeros(3, 32, 64)),
        ("w_uk_t", torch.zeros(3, 64, 32, dtype=torch.bfloat16)),  # its last dimensions swapped
        ("q", [1.0]),
        ("k_scale", 1.0),
        ("q_scale", torch.ones(2)),
        ("kv_c", torch.zeros(5, 63, dtype=torch.bfloat16)),
        ("is_neox", "gptj"),
        ("batch_invariant", 1),
        ("batch_invariant", True),
        ("context_parallel", None),
        ("provider", ["triton"]),
        ("positions", torch.zeros(5, dtype=torch.int64, device="meta")),
        ("q_scale", torch.ones(1, device="meta")),
        ("slot_mapping", torch.zeros(5, dtype=torch.int32)),
        ("kv_cache", torch.zeros(2, 4, 80, dtype=torch.uint8)),
        ("kv_cache", torch.zeros(2, 0, 80, dtype=torch.bfloat16)),
        ("kv_cache", torch.zeros(2, 80, 4, dtype=torch.bfloat16).mT),
        ("cos_sin_cache", torch.zeros(8, 16, dtype=torch.float16)),
        ("q_factor", torch.ones(5, 1, 1)),
        ("q_factor", torch.ones(5, dtype=torch.float16)),
        ("q_factor", torch.ones(10)[::2]),
        ("kv_norm_weight", torch.ones(64)),
        ("kv_norm_weight", torch.ones(128, dtype=torch.bfloat16)[::2]),
        ("kv_norm_epsilon", 1),
        ("kv_norm_epsilon", -1e-6),
    ],
)
def test_wrong_arguments_are_named(name, value):
    inputs = {"provider": "reference", **cases.build(cases.Case())._asdict(), name: value}
    del inputs["derived"], inputs["kept"]  # an engine's
    with pytest.raises(ValueError, match=f"{name} must be"):
        kernels.fused_mla_decode_prep(**inputs)


def dropped(q_nope, w_uk_t):
    """A product without its last term."""
    return absorb(q_nope[..., :-1], w_uk_t[:, :-1])


def bf16_sum(q_nope, w_uk_t):
    """A product accumulated in bf16."""
    total = torch.zeros(*q_nope.shape[:2], w_uk_t.shape[2], dtype=torch.bfloat16)
    for i in range(w_uk_t.shape[1]):
        total += q_nope[..., i, None] * w_uk_t[:, i]
    return total


def tf32(q_nope, w_uk_t):
    """A product of fp32 operands cut to 10 bits of mantissa."""
    q, w = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q_nope, w_uk_t))
    return absorb(q, w)


def contracted(x, positions, cos_sin_cache, is_neox):
    """A NeoX rotation whose first products are not rounded, as a fused multiply-add leaves them."""
    cos, sin = (c.double() for c in cos_sin_cache[positions].chunk(2, dim=-1))
    shape = (x.shape[0], *(1,) * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    a, b = x.double().chunk(2, dim=-1)
    second = ((b * sin).float(), (a * sin).float())
    return torch.cat((a * cos - second[0], b * cos + second[1]), dim=-1).float()


def test_a_query_is_held_to_its_steps():
    """A rotated element may not differ; absorbed ones in fp8 by a step, and in a thousandth."""
    call = cases.build(cases.Case(padded=()))
    want, _ = cases.run(reference, call)
    for column, changed, wrong in ((-1, 1, 1), (0, 1, 0), (0, 3, 3)):
        got = want.clone()
        got.view(torch.uint8)[0, :changed, column] ^= 1
        assert cases.judge(call, got, want)[0] == wrong
        assert cases.different_bytes(got, want) == changed


absorb = reference.absorb
ALL = {
    dtype: cases.Case(
        tokens=64, heads=2, nope=128, latent=256, rope=64, act=dtype, kv=dtype, query=dtype,
        neox=True,
    )
    for dtype in (torch.bfloat16, torch.float32)
}  # fmt: skip


@pytest.mark.parametrize(
    "name, function, act",
    [
        ("absorb", dropped, torch.bfloat16),
        ("absorb", bf16_sum, torch.bfloat16),
        ("absorb", tf32, torch.float32),
        ("rotate", contracted, torch.float32),
    ],
)
def test_planted_errors_are_seen(name, function, act, monkeypatch):
    def wrong(inputs):
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, function)
            return reference.fused_mla_decode_prep(inputs)

    module = types.SimpleNamespace(fused_mla_decode_prep=wrong)
    with pytest.raises(AssertionError):
        cases.check_against_reference(module, cases.build(ALL[act]))


@pytest.mark.parametrize("act", ALL, ids=str)
def test_another_order_of_summation_is_right(act, monkeypatch):
    """Also where products cancel: the first row of the query sums to nearly zero."""

    def backwards(q_nope, w_uk_t):
        total = torch.zeros(*q_nope.shape[:2], w_uk_t.shape[2])
        for i in reversed(range(w_uk_t.shape[1])):
            total += q_nope[..., i, None].float() * w_uk_t[:, i].float()
        return total.to(q_nope.dtype)

    call = cases.build(ALL[act])
    q, w = call.q, call.w_uk_t
    q[..., 64:128], w[:, 64:] = -q[..., :64].flip(-1), w[:, :64].flip(1)
    want, _ = cases.run(reference, call)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "absorb", backwards)
        got, _ = cases.run(reference, call)
    wrong, bounded = cases.judge(call, got, want)
    assert wrong == 0 and bounded > 0
