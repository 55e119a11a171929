"""Calls of the fused region with random inputs, for its checks; and many layers, for its benchmark:
there distinct weights and caches keep the L2 cache from holding what a model would have to fetch in
every layer; activations rotate over a few sets, because the layer before has just produced them."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.kernels import get_provider
from mla_fusion.kernels.dispatch import Widths
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.measure import distances
from mla_fusion.measure.distances import POISON, poisoned

DEEPSEEK, BLOCK = Widths(nope=128, rope=64, latent=512), 64
# By the names in a model's config.json.
FIELDS = {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "latent": "kv_lora_rank"}
ACTIVATION_SETS = 4
MAX_POSITION = 8192
SCALE = 0.02  # of query and cache


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the fused region."""

    tokens: int = 5
    heads: int = 3
    nope: int = 32
    rope: int = 16
    latent: int = 64
    act: torch.dtype = torch.bfloat16
    kv: torch.dtype = torch.float8_e4m3fn  # of the cache
    query: torch.dtype = torch.float8_e4m3fn  # of q_out
    angles: torch.dtype | None = torch.float32
    neox: bool = False
    block_size: int = 4
    strided: bool = False
    gap: int = 8  # elements before each row of a strided input
    padded: tuple[int, ...] = (1,)
    seed: int = 0
    factor: torch.dtype | None = None  # of the query's factors, if it has some
    context_parallel: bool = False  # the rows of `padded` are tokens of another rank
    norm: float | None = None  # epsilon of the norm of kv_c, if there is one
    least: int = 0  # bytes of the cache, of which the last entry is written then

    @property
    def fp8(self) -> bool:
        return self.query.itemsize == 1

    @property
    def widths(self) -> Widths:
        return Widths(self.nope, self.rope, self.latent)

    def bytes(self) -> int:
        """Fewest bytes of one layer in bf16: every input read once, every output written once."""
        out, width = self.query.itemsize, self.latent + self.rope
        per_token = 2 * self.heads * (self.nope + self.rope) + out * self.heads * width
        per_token += (2 + out) * width
        per_token += 4 * self.rope + 16  # fp32 cosines and sines; slot and position
        return 2 * self.heads * self.nope * self.latent + self.tokens * per_token

    def flops(self) -> int:
        """Floating-point operations of one layer's product; RoPE and casts are noise beside it."""
        return 2 * self.tokens * self.heads * self.nope * self.latent


def timed(tokens: int, heads: int, fp8: bool = True, widths: Widths = DEEPSEEK) -> Case:
    """A case of the benchmark: bf16 activations, and fp8 or bf16 for cache and query."""
    kind = gpu.fp8_type() if fp8 else torch.bfloat16
    return Case(tokens, heads, *widths, kv=kind, query=kind, block_size=BLOCK, padded=())


def build(case: Case, device: str = "cpu") -> Inputs:
    """Random inputs; the cache and all gaps of its storage are poisoned."""
    drawn: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(case.seed)}
    drawn["device"] = device

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, **drawn)

    def rows(*shape: int) -> torch.Tensor:
        """A tensor of `shape`, cut out of wider rows if the case is strided."""
        extra = case.gap if case.strided else 0
        return random(*shape[:-1], shape[-1] + extra).to(case.act)[..., extra:]

    width = case.latent + case.rope
    entry, gap = (width + 16, 32) if case.strided else (width, 0)
    step = case.block_size * entry + gap
    page = step * case.kv.itemsize
    blocks = max(-(-case.tokens // case.block_size) + 3, -(-case.least // page))
    raw = torch.full((blocks * page,), POISON, dtype=torch.uint8, device=device)
    cache = raw.view(case.kv).as_strided((blocks, case.block_size, width), (step, entry, 1))
    slots = torch.randperm(blocks * case.block_size, **drawn)[: case.tokens]
    if case.least:
        slots[0] = blocks * case.block_size - 1
    positions = torch.randint(0, 64, (case.tokens,), **drawn)
    for row in case.padded:
        if row < case.tokens:
            slots[row] = -1
            positions[row] = 7 if case.context_parallel else 10**12
    weight = (random(case.heads, case.nope, case.latent) / case.nope**0.5).to(case.act)
    angles = factor = None
    if case.angles is not None:
        angles = random(64, case.rope).clamp(-1, 1).to(case.angles)
    if case.factor is not None:
        factor = (1 + random(case.tokens).abs()).to(case.factor)
    return Inputs(
        q=rows(case.tokens, case.heads, case.nope + case.rope), w_uk_t=weight,
        kv_c=rows(case.tokens, case.latent), k_pe=rows(case.tokens, case.rope),
        kv_cache=cache, slot_mapping=slots, positions=positions, cos_sin_cache=angles,
        k_scale=torch.tensor([0.031], device=device), q_scale=torch.tensor([0.017], device=device),
        q_out=torch.empty(case.tokens, case.heads, width, dtype=case.query, device=device),
        is_neox=case.neox, q_factor=factor, context_parallel=case.context_parallel,
        kv_norm_weight=None if case.norm is None else random(case.latent).to(case.act),
        kv_norm_epsilon=case.norm or 0.0,
    )  # fmt: skip


def run(module: Any, inputs: Inputs, **extra: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a provider on copies of the outputs; returns the query and the raw cache storage."""
    cache, out = inputs.kv_cache, poisoned(inputs.q_out)
    raw = distances.storage(cache).clone()
    copy = raw.view(cache.dtype).as_strided(cache.shape, cache.stride())
    given = inputs._replace(kv_cache=copy, q_out=out)
    assert module.fused_mla_decode_prep(given, **extra) is out
    return out, raw


@dataclasses.dataclass
class Region:
    """A case and the call of each layer, on the current CUDA device: weights, cache and, in turns,
    a few sets of activations. angles: cosines and sines [n, R] in fp32, exact in bf16 too."""

    case: Case
    calls: list[Inputs]
    angles: torch.Tensor


def make_weights(heads: int, layers: int, widths: Widths = DEEPSEEK) -> list[torch.Tensor]:
    """`layers` random W_UK of [heads, P, L], bf16."""
    nope, _, latent = widths
    weights = torch.randn(layers, heads, nope, latent, device="cuda", dtype=torch.bfloat16)
    return [*weights / nope**0.5]


def make_region(case: Case, weights: list[torch.Tensor]) -> Region:
    """Random inputs for `case`; tokens go to distinct random slots."""
    angles = torch.randn(MAX_POSITION, case.rope // 2, device="cuda")
    # Peers which want bf16 angles compute the same rotation.
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16().float()
    scale = torch.full((1,), SCALE, device="cuda")
    sets = []
    for seed in range(ACTIVATION_SETS):
        given = build(dataclasses.replace(case, seed=seed), "cuda")
        given.positions.random_(0, MAX_POSITION)
        sets.append(given._replace(cos_sin_cache=cos_sin, k_scale=scale, q_scale=scale))
    calls = [
        given._replace(w_uk_t=weight, kv_cache=poisoned(given.kv_cache))
        for weight, given in zip(weights, itertools.cycle(sets), strict=False)
    ]
    return Region(case, calls, cos_sin)


# One layer of a candidate; the query is what it returns, or else it is in `q_out`.
Layer = Callable[[Inputs], torch.Tensor | None]


def agreement(region: Region, layer: Layer, expected: Layer | None = None) -> tuple[float, int]:
    """`distances.agreement` of query and cache of one layer with those of `expected`, by default
    the reference, on copies: some peers rotate q in place."""
    source, results = region.calls[0], []
    for run in (layer, expected or get_provider("reference").fused_mla_decode_prep):
        given = source._replace(q=source.q.clone(), k_pe=source.k_pe.clone())
        given = given._replace(q_out=poisoned(given.q_out), kv_cache=poisoned(given.kv_cache))
        query = run(given)
        results.append((given.q_out if query is None else query, given.kv_cache))
    return distances.agreement(*zip(*results, strict=True))
