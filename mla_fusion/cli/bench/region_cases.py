"""Shapes of the fused region: many layers in one CUDA graph, with distinct weights per layer.

Distinct weights and caches keep the L2 cache from holding what a real model would have to fetch
from memory in every layer; the activations rotate over a few sets, because in a model the layer
before has just produced them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

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
SCALE = 0.02  # of query and cache


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
class Region:
    """A case and the call of each layer, on the current CUDA device: weights, cache and, in turns,
    one of a few sets of activations."""

    case: Case
    calls: list[Inputs]

    @property
    def angles(self) -> torch.Tensor:
        """Cosines and sines [n, R] in fp32, exact in bf16 too."""
        cos_sin = self.calls[0].cos_sin_cache
        assert cos_sin is not None
        return cos_sin


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
    blocks, tokens, heads = max(16, 2 * -(-case.tokens // BLOCK)), case.tokens, case.heads
    entries = blocks, BLOCK, (latent + rope) * case.target.itemsize  # in bytes
    angles = torch.randn(MAX_POSITION, rope // 2, device=device)
    # Peers which want bf16 angles compute the same rotation.
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).bfloat16().float()
    scale = torch.full((1,), SCALE, device=device)
    sets: list[dict[str, Any]] = [
        {
            "q": torch.randn(tokens, heads, nope + rope, device=device, dtype=act),
            "kv_c": torch.randn(tokens, latent, device=device, dtype=act),
            "k_pe": torch.randn(tokens, rope, device=device, dtype=act),
            "slot_mapping": torch.randperm(blocks * BLOCK, device=device)[:tokens],
            "positions": torch.randint(0, MAX_POSITION, (tokens,), device=device),
            "q_out": torch.empty(tokens, heads, latent + rope, device=device, dtype=case.target),
        }
        for _ in range(ACTIVATION_SETS)
    ]
    calls = [
        Inputs(
            w_uk_t=weight,
            kv_cache=torch.zeros(entries, device=device, dtype=torch.uint8).view(case.target),
            cos_sin_cache=cos_sin,
            k_scale=scale,
            q_scale=scale,
            is_neox=False,
            **sets[i % ACTIVATION_SETS],
        )
        for i, weight in enumerate(weights)
    ]
    return Region(case, calls)


Layer = Callable[[Inputs], torch.Tensor | None]
"""One layer of a candidate; the query is what it returns, or else it is in `q_out`."""


def agreement(region: Region, layer: Layer, expected: Layer | None = None) -> tuple[float, int]:
    """One layer of a candidate against `expected`, which is the reference unless given, on the GPU
    and from fresh buffers.

    Returns the share of equal elements, and the largest distance in units in the last place (fp8
    or bf16 steps) over query and cache. The inputs are copied, because some peers rotate q in
    place.
    """
    source, results = region.calls[0], []
    for run in (layer, expected or get_provider("reference").fused_mla_decode_prep):
        given = source._replace(
            q=source.q.clone(),
            k_pe=source.k_pe.clone(),
            q_out=kit.poisoned(source.q_out),
            kv_cache=kit.poisoned(source.kv_cache),
        )
        query = run(given)
        results.append((given.q_out if query is None else query, given.kv_cache))
    return kit.agreement(*zip(*results, strict=True))


def capture(region: Region, layer: Layer) -> torch.cuda.CUDAGraph:
    """All layers of one candidate in a CUDA graph."""
    return kit.capture_calls(lambda i: layer(region.calls[i]), len(region.calls))
