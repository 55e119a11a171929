"""Kernels under the repaired interpreter; test_interpreted.py runs this in its own process.

The interpreter is chosen when `@triton.jit` decorates, so this file must be loaded with
TRITON_INTERPRET=1; its name keeps it out of a plain pytest run.
"""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from mla_fusion.cli.bench import two_launches
from mla_fusion.gpu import Gpu
from mla_fusion.kernels import dispatch
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan
from mla_fusion.kernels.inputs import padded_batch
from mla_fusion.measure.distances import POISON, storage
from tests.gpus import described, imitate
from tests.kernels import cases, interpreter
from tests.nightly import daily

interpreter.install()
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def stray(out, OFFSET: tl.constexpr, STEP: tl.constexpr):
    """Every program stores 4 elements at OFFSET + STEP * program."""
    tl.store(out + OFFSET + STEP * tl.program_id(0) + tl.arange(0, 4), 1.0)


def test_bounds_check_bites():
    out = torch.zeros(8)
    stray[(2,)](out, 0, 4)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="out of bounds"):
        stray[(2,)](out, 4, 4)


def test_race_check_bites():
    with pytest.raises(triton.runtime.errors.InterpreterError, match="store to one byte"):
        stray[(2,)](torch.zeros(8), 0, 2)


CASES = {
    "gptj-fp8": cases.Case(),
    "neox-fp8": cases.Case(neox=True),
    "nope-fp8": cases.Case(angles=None),
    "fnuz": cases.Case(kv=FNUZ, query=FNUZ),
    "activation-query": cases.Case(query=BF16),
    "bf16-all": cases.Case(kv=BF16, query=BF16, neox=True),
    "fp16": cases.Case(act=FP16, kv=FP16, query=FP16),
    "fp16-fp8": cases.Case(act=FP16),
    "bf16-angles": cases.Case(angles=BF16),
    "fp32": cases.Case(act=torch.float32, kv=torch.float32, query=torch.float32),
    "strided": cases.Case(strided=True, neox=True),
    "odd-sizes": cases.Case(nope=24, rope=12, latent=40, block_size=3, strided=True),
    "misaligned": cases.Case(strided=True, gap=3),
    "all-padded": cases.Case(padded=(0, 1, 2, 3, 4)),
    "one-token": cases.Case(tokens=1, padded=()),
    "one-padded-token": cases.Case(tokens=1, padded=(0,)),
    "many-tokens": cases.Case(tokens=37, heads=2, padded=(0, 17, 36)),
    "many-heads": cases.Case(heads=16, padded=(0, 3)),
    "scaled-fp8": cases.Case(factor=torch.float32),
    "scaled-neox": cases.Case(factor=torch.float32, neox=True, tokens=20, heads=1),
    "scaled-nope": cases.Case(factor=torch.float32, query=BF16, angles=None, strided=True),
    "scaled-bf16": cases.Case(factor=BF16, heads=16, tokens=2),
    "scaled-fp16": cases.Case(factor=torch.float32, act=FP16, kv=FP16, query=FP16),
    "scaled-fp32": cases.Case(factor=FP32, act=FP32, kv=FP32, query=FP32),
    "normed-fp8": cases.Case(norm=1e-6, heads=16),
    "normed-strided": cases.Case(norm=1e-5, strided=True, gap=3, kv=BF16, query=BF16, latent=40),
    "normed-fp16": cases.Case(norm=1e-6, act=FP16, kv=FP16, query=FP16, tokens=20),
    "normed-fp32": cases.Case(norm=1e-6, act=FP32, kv=FP32, query=FP32, angles=None),
    "other-ranks-fp8": cases.Case(context_parallel=True, padded=(0, 3), neox=True),
    "other-ranks-bf16": cases.Case(context_parallel=True, padded=(1,), kv=BF16, query=BF16),
    "other-ranks": cases.Case(context_parallel=True, tokens=20, heads=2, padded=tuple(range(20))),
}
PLANS = {
    "sum": Plan(block_m=1, block_n=32, num_warps=2),
    "dot": Plan(block_m=16, block_n=32),
    "walk": Plan(block_m=16, block_n=32, m_tiles=2, cache_tokens=2, rope_rows=4, rest_last=True),
    "folded": Plan(block_m=32, block_n=32, cache_tokens=4),
}


WIDTHS = {
    "mistral-small-4": (cases.Case(nope=64, rope=64, latent=256), PLANS["walk"]),
    "minicpm3": (cases.Case(nope=64, rope=32, latent=256, neox=True), PLANS["folded"]),
    "320": (cases.Case(nope=96, rope=64, latent=320), PLANS["dot"]),
    "1024": (cases.Case(nope=256, rope=128, latent=1024, heads=1), PLANS["folded"]),
    "192": (cases.Case(nope=192, rope=96, latent=448, heads=1, neox=True), PLANS["sum"]),
    "576": (cases.Case(nope=64, rope=128, latent=576, kv=BF16, query=BF16), PLANS["dot"]),
    "no-rotated-part": (cases.Case(rope=0, latent=64), PLANS["dot"]),
    "chosen": (cases.Case(nope=64, rope=64, latent=256, tokens=20), None),
}


@pytest.mark.parametrize("name", daily(WIDTHS, "mistral-small-4", "320"))
def test_widths(name):
    case, plan = WIDTHS[name]
    cases.check_against_reference(provider, cases.build(case), plan=plan)


# By default the other cases run with one plan each, in turn.
EVERY_PLAN = ("gptj-fp8", "strided", "scaled-fp8", "other-ranks-fp8")


def matrix():
    """Every case with every plan, most of them marked nightly."""
    for i, (name, case) in enumerate(CASES.items()):
        chosen = PLANS if name in EVERY_PLAN else [[*PLANS][i % len(PLANS)]]
        for of, plan in PLANS.items():
            marks = () if of in chosen else pytest.mark.nightly
            yield pytest.param(case, plan, id=f"{name}-{of}", marks=marks)


@pytest.mark.parametrize("case, plan", list(matrix()))
def test_provider_agrees_with_the_reference(case, plan):
    cases.check_against_reference(provider, cases.build(case), plan=plan)


HOPPER = described("sm_90")
DIRECT = {
    "walk": Plan(block_m=64, block_n=64, m_tiles=2, rope_rows=4, cache_tokens=4),
    "beside": Plan(block_m=64, block_n=256, m_tiles=2, num_warps=8, rope_rows=4, rest_last=True),
    "tall": Plan(block_m=128, block_n=128, num_warps=8, cache_tokens=4),
}
DIRECT_CASES = {
    "even": cases.Case(128, 1, latent=256, padded=()),
    "odd": cases.Case(150, 2, latent=208, nope=24, strided=True, padded=(0, 17, 149)),
    "other-ranks": cases.Case(70, 1, latent=256, padded=(17, 69), context_parallel=True),
    "scaled": cases.Case(70, 1, latent=256, padded=(17,), factor=FP32),
}


@pytest.fixture
def hopper(monkeypatch):
    """Plans of a Hopper GPU; conversions, PTX there, are the interpreter's."""
    limit = provider._limit
    monkeypatch.setattr(provider, "_limit", lambda *of: abs(limit(*of)))
    monkeypatch.setattr(provider, "early_launch", lambda device: {"PDL": False})
    imitate(monkeypatch, "sm_90")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "names",
    daily(itertools.product(DIRECT_CASES, DIRECT),
          ("even", "walk"), ("odd", "tall"), ("other-ranks", "tall"), ("scaled", "beside")),
)  # fmt: skip
def test_direct_stores_agree(names):
    case, plan = DIRECT_CASES[names[0]], DIRECT[names[1]]
    call = cases.build(case)
    assert provider._direct(plan, call.w_uk_t, call.q_out.dtype, HOPPER)
    cases.check_against_reference(provider, call, plan=plan)


def test_what_is_not_stored_directly():
    plan, of = DIRECT["walk"], (FN, HOPPER)
    w = torch.empty(2, 32, 1024, dtype=BF16)[..., :256]
    assert provider._direct(plan, w, *of)
    for fields in ({"block_m": 32}, {"block_m": 128}, {"block_n": 32}, {"num_warps": 8}):
        assert not provider._direct(dataclasses.replace(plan, **fields), w, *of)
    assert not provider._direct(plan, w.to(FP16), *of)
    assert not provider._direct(plan, w, BF16, HOPPER)
    assert not provider._direct(plan, w, FN, described("sm_100"))
    unaligned = torch.empty(2, 32, 264, dtype=BF16)
    for other in (w[..., :200], w[..., 1:241], unaligned[..., :256], w.mT, w[..., ::2]):
        assert not provider._direct(plan, other, *of)


def test_default_plans_agree():
    for tokens in (1, 2, 20):
        cases.check_against_reference(provider, cases.build(cases.Case(tokens=tokens, seed=tokens)))


@pytest.mark.parametrize("kind", [FN, BF16])
@pytest.mark.parametrize("tokens", [1, 150])
def test_the_benchmarks_two_launches_agree(tokens, kind):
    case = cases.Case(tokens=tokens, padded=(), kv=kind, query=kind)
    cases.check_against_reference(two_launches, cases.build(case))


def test_no_tokens_no_launch():
    out, cache = cases.run(provider, cases.build(cases.Case(tokens=0, padded=())))
    assert out.shape[0] == 0 and bool((cache == POISON).all())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_overflow_saturates_and_nan_stays_nan(plan):
    call = cases.build(cases.Case(tokens=3, padded=()))
    q, kv_c = call.q, call.kv_c
    q[0] = 1e6
    q[1, 0, 0] = torch.nan
    q[1, 1, -1] = torch.nan
    kv_c[0], kv_c[2, 3] = -1e9, torch.nan
    cases.check_against_reference(provider, call, plan=plan)
    out, _ = cases.run(provider, call, plan=plan)
    assert not out[0].float().isnan().any() and out[0].float().abs().max() == 448
    assert out[1, 0, :64].float().isnan().all()


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_row_has_the_same_bits_in_every_batch(batch_invariant):
    """Without the argument a single token is summed without matrix instructions. A row keeps its
    place in a tile of 64, because the interpreter's product, NumPy's, differs from row to row."""
    case = cases.Case(tokens=70, heads=2, act=FP32, kv=FP32, query=FP32, padded=(9,))
    call = cases.build(case)._replace(batch_invariant=batch_invariant)
    (want, _), different = cases.run(provider, call), 0
    for some in (slice(0, 1), slice(0, 33), slice(64, 65), slice(64, 70)):
        names = ("q", "kv_c", "k_pe", "slot_mapping", "positions", "q_out")
        part = call._replace(**{name: getattr(call, name)[some] for name in names})
        got, _ = cases.run(provider, part)
        different += cases.different_bytes(got, want[some])
    assert (different == 0) == batch_invariant


@pytest.mark.parametrize("kind", [BF16, FN])
@pytest.mark.parametrize("latent", [64, 40])
def test_hostile_rows_are_normalized(latent, kind):
    """Zeros, a NaN, an infinity, squares beyond fp32, below epsilon; no column beyond the row."""
    case = cases.Case(tokens=7, padded=(), norm=1e-6, latent=latent, kv=kind, strided=True)
    call = cases.build(case)
    kv_c, weight = call.kv_c, call.kv_norm_weight
    kv_c[0], kv_c[1, 3], kv_c[2, 5] = 0, torch.nan, torch.inf
    kv_c[3] *= 1e30
    kv_c[4] *= 1e-6
    weight[7], weight[8] = 0, -1e3
    for plan in (PLANS["sum"], PLANS["walk"]):
        cases.check_against_reference(provider, call, plan=plan)
    other = cases.build(case)._replace(kv_norm_epsilon=1e-3)
    other.kv_c.copy_(kv_c)
    other.kv_norm_weight.copy_(weight)
    results = [cases.run(provider, each, plan=PLANS["sum"])[1] for each in (call, other)]
    assert cases.judge_cache(call, *results), "epsilon has no effect"


def test_the_judge_sees_a_norm_that_is_rounded_twice():
    call = cases.build(cases.Case(tokens=40, norm=1e-6, kv=BF16, query=BF16, padded=()))
    want = cases.run(provider, call)[1]
    wide = call.kv_c.float()
    root = torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6)
    twice = call._replace(kv_c=(wide * root).to(BF16) * call.kv_norm_weight)
    twice = twice._replace(kv_norm_weight=None)
    assert cases.judge_cache(call, cases.run(provider, twice)[1], want)


@pytest.mark.parametrize("factor", [None, torch.float32])
def test_warmup_covers_the_bucket_and_leaves_the_cache_alone(factor):
    call, lines = cases.build(cases.Case(factor=factor)), []
    names = ("w_uk_t", "kv_cache", "cos_sin_cache", "k_scale", "q_scale", "is_neox")
    layer = {name: getattr(call, name) for name in names}
    layer |= {"rope_dim": call.k_pe.shape[1], "q_dtype": FN, "factor_dtype": factor}
    layer["kv_norm_epsilon"] = None if factor is None else 1e-6
    provider.warmup(partial(padded_batch, **layer), 17, progress=lines.append)
    widths = provider.widths_of(call)
    plans = {dispatch.choose(tokens, 3, True, widths, Gpu()) for tokens in range(1, 18)}
    assert lines == [f"mla-fusion: compiling {len(plans)} Triton configurations (3 heads)"]
    assert bool((storage(call.kv_cache) == POISON).all())


def test_rejects_what_it_cannot_address():
    call = cases.build(cases.Case())
    call = call._replace(kv_c=call.kv_c.t().contiguous().t())
    with pytest.raises(ValueError, match="kv_c must have a dense last dimension"):
        cases.run(provider, call)
