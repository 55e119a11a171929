"""The fused region against its specification, with the product in float64: the query as `judge`
wants it, the cache as `judge_cache` does, for the tests of all providers too."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.kernels import get_provider
from mla_fusion.kernels.card import Card
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.measure.distances import POISON, agreement, steps, storage
from mla_fusion.measure.outcome import Outcome, different_bytes
from mla_fusion.measure.region_cases import Case, build, run
from mla_fusion.measure.timing import capture_calls

reference = get_provider("reference")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HUGE = 2**32 + 2**28  # bytes of a cache
# Bytes of an element -> steps that a normalized latent may be off.
_STEPS = {1: 1, 2: 1, 4: 64}
NEEDED = 6 * HUGE  # that must be free: the inputs, three results and the comparison


def cases(card: Card, kind: torch.dtype, thorough: bool) -> dict[str, Case]:
    """Hostile calls by name, of layers that the provider takes. kind: of query and cache; BF16:
    both of the activation type."""
    real = Case(nope=128, rope=64, latent=512, block_size=64, heads=16, kv=kind, query=kind)
    found = {
        f"{n} tokens, {heads} heads": dataclasses.replace(real, tokens=n, heads=heads, seed=n)
        for n, heads in card.shapes + (card.thorough if thorough else ())
    }
    many = dataclasses.replace(real, tokens=40, padded=tuple(range(0, 40, 3)))
    options: dict[str, dict[str, Any]] = {
        "strided": {"strided": True, "neox": True},
        "misaligned": {"strided": True, "gap": 3},
        "odd widths": {"nope": 24, "rope": 12, "latent": 40, "block_size": 3},
        "scaled": {"factor": FP32},
        "normalized": {"norm": 1e-6, "strided": True},
        "all padded": {"padded": tuple(range(40))},
        "256 latents": {"nope": 64, "latent": 256, "block_size": 16},
    }
    if kind == BF16:
        options["fp16"] = {"act": FP16, "kv": FP16, "query": FP16}
    if thorough:
        options |= {
            "no rope": {"angles": None},
            "bf16 query": {"query": BF16},
            "1024 latents": {"nope": 256, "rope": 128, "latent": 1024},
            "320 latents": {"rope": 96, "latent": 320},
            "one tile of tokens": {"tokens": 128, "block_size": 128},
        }
    found |= {name: dataclasses.replace(many, **each) for name, each in options.items()}
    here = gpu.of("cuda")
    return {name: x for name, x in found.items() if not card.why_not(x.widths, x.kv, here)}


def check(provider: Any, calls: Mapping[str, Case], device: str = "cuda") -> Iterator[Outcome]:
    """Each call of a provider's module twice, bit by bit; then those that a GPU alone can run."""
    for name, case in calls.items():
        yield against(provider, name, build(case, device))
    if device == "cpu":
        return
    first = next(iter(calls.values()))
    if torch.cuda.mem_get_info()[0] >= NEEDED:
        large = dataclasses.replace(first, tokens=40, least=HUGE)
        yield against(provider, "a cache of 2^32 bytes", build(large, device))
    for tokens in (1, 256):
        yield from replayed(provider, dataclasses.replace(first, tokens=tokens, padded=()))


def against(provider: Any, name: str, given: Inputs) -> Outcome:
    """One call against the specification; error: elements and bytes that are wrong."""
    want = run(reference, given, product=absorb)
    got, cache = run(provider, given)
    again, _ = run(provider, given)
    written = bool(got.view(torch.uint8)[given.slot_mapping < 0].any())
    notes = ["padded rows are not zero"] if written else []
    notes += ["two launches differ"] if different_bytes(got, again) else []
    return Outcome(name, deviating(given, (got, cache), want), 0, "; ".join(notes))


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """`reference.absorb` in float64, rounded once."""
    out = torch.einsum("thp,hpl->thl", q_nope.double(), w_uk_t.double())
    return out.to(q_nope.dtype)


def replayed(provider: Any, case: Case) -> Iterator[Outcome]:
    """A captured launch, replayed with other inputs in place."""
    given = build(case, "cuda")
    raw = storage(given.kv_cache)
    graph = capture_calls(lambda _: provider.fused_mla_decode_prep(given), 1)
    for number in range(3):
        given.q.normal_()
        given.kv_c.normal_()
        given.positions.random_(0, 64)
        slots = torch.randperm(given.kv_cache.shape[0] * case.block_size, device="cuda")
        given.slot_mapping.copy_(slots[: case.tokens])
        raw.fill_(POISON)
        want = run(reference, given, product=absorb)
        graph.replay()
        wrong = deviating(given, (given.q_out, raw), want)
        yield Outcome(f"{case.tokens} tokens, replay {number}", wrong, 0)


def deviating(
    inputs: Inputs, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]
) -> int:
    """Elements of a query, and bytes or elements of a cache's storage, that are wrong."""
    return judge(inputs, got[0], want[0])[0] + judge_cache(inputs, got[1], want[1])


def judge_cache(inputs: Inputs, got: torch.Tensor, want: torch.Tensor) -> int:
    """Number of bytes of a cache's storage `got` that deviate from `want`, the reference's: those
    that differ. Latents that were normalized may be a few steps off, since the order of a sum of
    squares is free, but of 16 bits or fewer only one in 1,000, and two."""
    if inputs.kv_norm_weight is None:
        return different_bytes(got, want)
    cache, got = inputs.kv_cache, got.clone()
    latents, wanted = (
        raw.view(cache.dtype).as_strided(cache.shape, cache.stride())[..., : inputs.kv_c.shape[1]]
        for raw in (got, want)
    )
    distance = steps(latents.contiguous(), wanted.contiguous())
    wrong = int((distance > _STEPS[cache.element_size()]).sum())
    off = int((distance > 0).sum())
    if cache.element_size() < 4 and off > 2 + distance.numel() // 1000:
        wrong += off
    latents.view(torch.uint8).copy_(wanted.view(torch.uint8))
    return wrong + different_bytes(got, want)


def absorb_interval(
    q_nope: torch.Tensor, w_uk_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest result of the absorb product, [T, H, L] each, activation type.

    An fp32 sum of P exact products is within gamma_P * sum |q_i * w_i| of the exact sum s, in any
    order: gamma_n = n u / (1 - n u), u = 2^-24 (N. Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd edition, sections 3.1 and 4.2). Rounding to the activation type is monotonic.
    The two results are nearly always equal or neighbours. Where the products cancel, they are many
    units in the last place of s apart: a limit of one unit would demand one order of summation.
    The bound also covers rounded fp32 products. Matrix units that truncate have no such proof and
    are held to the same interval."""
    q, w = q_nope.double().transpose(0, 1), w_uk_t.double()
    terms = w_uk_t.shape[1] * 2.0**-24
    exact = torch.bmm(q, w).transpose(0, 1)
    bound = terms / (1 - terms) * torch.bmm(q.abs(), w.abs()).transpose(0, 1)
    return (exact - bound).to(q_nope.dtype), (exact + bound).to(q_nope.dtype)


def judge(inputs: Inputs, got: torch.Tensor, want: torch.Tensor) -> tuple[int, int]:
    """Number of elements of a query `got` [T, H, L + R] that deviate from `want`, the reference's,
    and number of elements of its absorbed half that do not, though over a step off. The rotated
    half must be equal; the absorbed half within one step, or within what an fp32 sum in some order
    gives; in fp8 within one step, and equal in 99.9 % of the elements."""
    q, w = inputs.q, inputs.w_uk_t
    nope, latent = w.shape[1:]
    if inputs.q_factor is not None:
        q = reference.scale(q, inputs.q_factor, q.dtype)
    distance = steps(got, want)
    absorbed = distance[..., :latent]
    off = far = absorbed > 1
    if got.element_size() > 1:
        low, high = absorb_interval(q[..., :nope], w)
        value = got[..., :latent]
        off = far & ~((low <= value) & (value <= high))
    wrong = int(off.sum()) + int((distance[..., latent:] > 0).sum())
    if got.element_size() == 1 and agreement((got, want))[0] < 0.999:
        wrong += int((absorbed > 0).sum())
    return wrong, int(far.sum()) - int(off.sum())
