"""Shapes of the fused region: many layers in one CUDA graph, with distinct weights per layer.

Distinct weights and caches keep the L2 cache from holding what a real model would have to fetch
from memory in every layer; the activations rotate over a few sets, because in a model the layer
before has just produced them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from mla_fusion.cli.bench import kit
from mla_fusion.kernels import get_provider
from mla_fusion.kernels.dispatch import Widths
from mla_fusion.kernels.inputs import Inputs

DEEPSEEK, BLOCK = Widths(nope=128, rope=64, latent=512), 64
# By the names in a model's config.json.
FIELDS = {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "latent": "kv_lora_rank"}
ACTIVATION_SETS = 4
MAX_POSITION = 8192


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of the benchmark: bf16 activations, and fp8 or bf16 for cache and query."""

    tokens: int
    heads: int
    fp8: bool = True
    widths: Widths = DEEPSEEK

    @property
    def target(self) -> torch.dtype:
        """Type of the cache and of the query."""
        return kit.fp8_type() if self.fp8 else torch.bfloat16

    def bytes(self) -> int:
        """Fewest bytes of one layer: every input read once, every output written once."""
        out, (nope, rope, latent) = 1 if self.fp8 else 2, self.widths
        per_token = (
            2 * self.heads * (nope + rope)
            + out * self.heads * (latent + rope)
            + (2 + out) * (latent + rope)
            + 4 * rope  # one fp32 row of cosines and sines
            + 16  # slot and position
        )
        return 2 * self.heads * nope * latent + self.tokens * per_token

    def flops(self) -> int:
        """Floating-point operations of one layer's product; RoPE and casts are noise beside it."""
        return 2 * self.tokens * self.heads * self.widths.nope * self.widths.latent


@dataclasses.dataclass
class Activations:
    """The per-step inputs of a layer and its output buffer; shapes as in `kernels`."""

    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    q_out: torch.Tensor


@dataclasses.dataclass
class Region:
    """Inputs of all layers of one case, on the current CUDA device."""

    case: Case
    weights: list[torch.Tensor]
    caches: list[torch.Tensor]
    sets: list[Activations]
    cos_sin: torch.Tensor
    k_scale: torch.Tensor
    q_scale: torch.Tensor

    def inputs(self, w_uk_t: torch.Tensor, kv_cache: torch.Tensor, a: Activations) -> Inputs:
        """The arguments of a provider for one layer."""
        return Inputs(
            a.q,
            w_uk_t,
            a.kv_c,
            a.k_pe,
            kv_cache,
            a.slots,
            a.positions,
            self.cos_sin,
            self.k_scale,
            self.q_scale,
            is_neox=False,
            q_out=a.q_out,
        )


def make_weights(heads: int, layers: int, widths: Widths = DEEPSEEK) -> list[torch.Tensor]:
    """`layers` random W_UK of [heads, P, L], bf16."""
    nope, _, latent = widths
    return [
        torch.randn(heads, nope, latent, device="cuda", dtype=torch.bfloat16) / nope**0.5
        for _ in range(layers)
    ]


def make_region(case: Case, weights: list[torch.Tensor]) -> Region:
    """Random inputs for `case`; tokens go to distinct random slots."""
    (nope, rope, latent), device, act = case.widths, weights[0].device, torch.bfloat16
    blocks = max(16, 2 * -(-case.tokens // BLOCK))
    entries = blocks, BLOCK, (latent + rope) * case.target.itemsize  # in bytes
    angles = torch.randn(MAX_POSITION, rope // 2, device=device)
    sets = [
        Activations(
            q=torch.randn(case.tokens, case.heads, nope + rope, device=device, dtype=act),
            kv_c=torch.randn(case.tokens, latent, device=device, dtype=act),
            k_pe=torch.randn(case.tokens, rope, device=device, dtype=act),
            slots=torch.randperm(blocks * BLOCK, device=device)[: case.tokens],
            positions=torch.randint(0, MAX_POSITION, (case.tokens,), device=device),
            q_out=torch.empty(
                case.tokens, case.heads, latent + rope, device=device, dtype=case.target
            ),
        )
        for _ in range(ACTIVATION_SETS)
    ]
    return Region(
        case=case,
        weights=weights,
        caches=[
            torch.zeros(entries, device=device, dtype=torch.uint8).view(case.target)
            for _ in weights
        ],
        sets=sets,
        # Exact in bf16 too, so that peers which want bf16 angles compute the same rotation.
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16().float(),
        k_scale=torch.full((1,), 0.02, device=device),
        q_scale=torch.full((1,), 0.02, device=device),
    )


Layer = Callable[[torch.Tensor, torch.Tensor, Activations], torch.Tensor | None]
"""One layer of a candidate: (w_uk_t, kv_cache, activations); the query is what it returns, or else
it is in `q_out`."""


def provider_layer(region: Region, function: Callable[..., torch.Tensor], **extra: object) -> Layer:
    """A candidate from the function of a provider of `mla_fusion.kernels`."""

    def layer(w_uk_t: torch.Tensor, kv_cache: torch.Tensor, a: Activations) -> None:
        function(region.inputs(w_uk_t, kv_cache, a), **extra)

    return layer


def agreement(region: Region, layer: Layer, expected: Layer | None = None) -> tuple[float, int]:
    """One layer of a candidate against `expected`, which is the reference unless given, on the GPU
    and from fresh buffers.

    Returns the share of equal elements, and the largest distance in units in the last place (fp8
    or bf16 steps) over query and cache. The inputs are copied, because some peers rotate q in
    place.
    """
    source, weight = region.sets[0], region.weights[0]
    if expected is None:
        expected = provider_layer(region, get_provider("reference").fused_mla_decode_prep)
    results = []
    for run in (layer, expected):
        a = dataclasses.replace(
            source,
            q=source.q.clone(),
            k_pe=source.k_pe.clone(),
            q_out=kit.poisoned(source.q_out),
        )
        cache = kit.poisoned(region.caches[0])
        query = run(weight, cache, a)
        results.append((a.q_out if query is None else query, cache))
    return kit.agreement(*zip(*results, strict=True))


def capture(region: Region, layer: Layer) -> torch.cuda.CUDAGraph:
    """All layers of one candidate in a CUDA graph."""

    def call(i: int) -> None:
        layer(region.weights[i], region.caches[i], region.sets[i % len(region.sets)])

    return kit.capture_calls(call, len(region.weights))
