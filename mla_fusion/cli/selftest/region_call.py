"""Calls of the fused region with random inputs, and the criterion that holds their results.

The tests of all providers use them too.
"""

import dataclasses
from typing import Any

import torch

from mla_fusion.cli.bench.kit import POISON, agreement, poisoned, steps
from mla_fusion.kernels import get_provider
from mla_fusion.kernels.inputs import Inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the fused region. kv: type of the cache; query: type of q_out; gap: elements
    before each row of a strided input; factor: type of the query's factors, if it has some."""

    tokens: int = 5
    heads: int = 3
    nope: int = 32
    rope: int = 16
    latent: int = 64
    act: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.float8_e4m3fn
    query: torch.dtype = torch.float8_e4m3fn
    angles: torch.dtype | None = torch.float32
    neox: bool = False
    block_size: int = 4
    strided: bool = False
    gap: int = 8
    padded: tuple[int, ...] = (1,)
    seed: int = 0
    factor: torch.dtype | None = None
    context_parallel: bool = False  # the rows of `padded` are tokens of another rank


@dataclasses.dataclass
class Call:
    """Arguments of one call, and the storage that `inputs.kv_cache` is a view of."""

    inputs: Inputs
    storage: torch.Tensor


def build(case: Case, device: str = "cpu") -> Call:
    """Random inputs; the cache and all gaps of its storage are poisoned."""
    generator = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def rows(*shape: int) -> torch.Tensor:
        """A tensor of `shape`, cut out of wider rows if the case is strided."""
        extra = case.gap if case.strided else 0
        wide = random(shape[0], *shape[1:-1], shape[-1] + extra).to(case.act).to(device)
        return wide[..., extra:]

    width = case.latent + case.rope
    blocks = -(-case.tokens // case.block_size) + 3
    entry, gap = (width + 16, 32) if case.strided else (width, 0)
    size = torch.empty((), dtype=case.kv).element_size()
    block_stride = case.block_size * entry + gap
    storage = torch.full((blocks * block_stride * size,), POISON, dtype=torch.uint8, device=device)
    cache = storage.view(case.kv).as_strided(
        (blocks, case.block_size, width), (block_stride, entry, 1)
    )
    slots = torch.randperm(blocks * case.block_size, generator=generator)[: case.tokens]
    positions = torch.randint(0, 64, (case.tokens,), generator=generator)
    for row in case.padded:
        if row < case.tokens:
            slots[row] = -1
            positions[row] = 7 if case.context_parallel else 10**12
    weight = (random(case.heads, case.nope, case.latent) / case.nope**0.5).to(case.act)
    angles = (
        None
        if case.angles is None
        else random(64, case.rope).clamp(-1, 1).to(case.angles).to(device)
    )
    factor = (
        None if case.factor is None else (1 + random(case.tokens).abs()).to(case.factor).to(device)
    )
    inputs = Inputs(
        q=rows(case.tokens, case.heads, case.nope + case.rope),
        w_uk_t=weight.to(device),
        kv_c=rows(case.tokens, case.latent),
        k_pe=rows(case.tokens, case.rope),
        kv_cache=cache,
        slot_mapping=slots.to(device),
        positions=positions.to(device),
        cos_sin_cache=angles,
        k_scale=torch.tensor([0.031], device=device),
        q_scale=torch.tensor([0.017], device=device),
        is_neox=case.neox,
        q_out=torch.empty(case.tokens, case.heads, width, dtype=case.query, device=device),
        q_factor=factor,
        context_parallel=case.context_parallel,
    )
    return Call(inputs, storage)


def run(module: Any, call: Call, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a provider on copies of the outputs; returns the query and the raw cache storage."""
    out = poisoned(call.inputs.q_out)
    cache, storage = call.inputs.kv_cache, call.storage.clone()
    copy = storage.view(cache.dtype).as_strided(cache.shape, cache.stride())
    inputs = call.inputs._replace(kv_cache=copy, q_out=out)
    assert module.fused_mla_decode_prep(inputs, **extra) is out
    return out, storage


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
    are held to the same interval.
    """
    q, w = q_nope.double().transpose(0, 1), w_uk_t.double()
    terms = w_uk_t.shape[1] * 2.0**-24
    exact = torch.bmm(q, w).transpose(0, 1)
    bound = terms / (1 - terms) * torch.bmm(q.abs(), w.abs()).transpose(0, 1)
    return (exact - bound).to(q_nope.dtype), (exact + bound).to(q_nope.dtype)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A query against the reference.

    equal: share of equal elements. bounded: elements of the absorbed half more than one step off,
    but inside `absorb_interval`. wrong: all other deviations. worst: largest distance in steps.
    """

    equal: float
    bounded: int
    wrong: int
    worst: int


def judge(inputs: Inputs, got: torch.Tensor, want: torch.Tensor) -> Judgement:
    """Hold a query `got` [T, H, L + R] to the specification; `want` is the reference's.

    The rotated half must be equal. The absorbed half must be within one step, or within what an
    fp32 sum in some order gives; in fp8 within one step, and equal in 99.9 % of the elements.
    """
    q, w = inputs.q, inputs.w_uk_t
    nope, latent = w.shape[1:]
    if inputs.q_factor is not None:
        q = get_provider("reference").scale(q, inputs.q_factor, q.dtype)
    distance = steps(got, want)
    equal, worst = agreement((got, want))
    absorbed = distance[..., :latent]
    off = absorbed > 1
    if got.element_size() > 1:
        low, high = absorb_interval(q[..., :nope], w)
        value = got[..., :latent]
        off = off & ~((low <= value) & (value <= high))
    wrong = int(off.sum()) + int((distance[..., latent:] > 0).sum())
    if got.element_size() == 1 and equal < 0.999:
        wrong += int((absorbed > 0).sum())
    return Judgement(
        equal=equal,
        bounded=int((absorbed > 1).sum()) - int(off.sum()),
        wrong=wrong,
        worst=worst,
    )


def different_bytes(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many bytes differ; NaN equals a NaN of the same bits."""
    return int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
