"""Time of the fused region alone: many layers in one CUDA graph, with distinct weights per layer.

Distinct weights and caches keep the L2 cache from holding what a real model would have to fetch
from memory in every layer; the activations rotate over a few sets, because in a model the layer
before has just produced them. Candidates take turns round by round, so that clock changes and
neighbours meet all of them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence

import torch

from mla_fusion.attention.selection import FP8_OF, architecture
from mla_fusion.cli import compare
from mla_fusion.kernels import get_provider
from mla_fusion.kernels.dispatch import Widths
from mla_fusion.kernels.inputs import Inputs

DEEPSEEK, BLOCK = Widths(nope=128, rope=64, latent=512), 64
# By the names in a model's config.json.
FIELDS = {"nope": "qk_nope_head_dim", "rope": "qk_rope_head_dim", "latent": "kv_lora_rank"}
ACTIVATION_SETS = 4
MAX_POSITION = 8192


@functools.cache
def fp8_type() -> torch.dtype:
    """The fp8 type that this GPU computes in: e4m3fnuz on gfx942, e4m3fn on all others."""
    return FP8_OF.get(architecture(torch.device("cuda")), torch.float8_e4m3fn)


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
        return fp8_type() if self.fp8 else torch.bfloat16

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
class Ceilings:
    """What this GPU was measured to do: GB/s of a copy (read plus write) and bf16 TFLOP/s."""

    gbps: float
    tflops: float

    def floor_us(self, case: Case) -> float:
        """No version of the region runs faster than this, in microseconds per layer."""
        return max(case.bytes() / self.gbps / 1e3, case.flops() / self.tflops / 1e6)


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
            q_out=compare.poisoned(source.q_out),
        )
        cache = compare.poisoned(region.caches[0])
        query = run(weight, cache, a)
        results.append((a.q_out if query is None else query, cache))
    return compare.agreement(*zip(*results, strict=True))


def capture(region: Region, layer: Layer) -> torch.cuda.CUDAGraph:
    """All layers of one candidate in a CUDA graph."""

    def call(i: int) -> None:
        layer(region.weights[i], region.caches[i], region.sets[i % len(region.sets)])

    return capture_calls(call, len(region.weights))


def capture_calls(call: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, after a first one that is not captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph


def interleave(
    graphs: dict[str, torch.cuda.CUDAGraph], layers: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per layer of every graph, one sample per round."""
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The first replay keeps the GPU busy while the CPU enqueues the second.
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            samples[name].append((begin, end))
        torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) * 1e3 / layers for begin, end in pairs]
        for name, pairs in samples.items()
    }


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """p20, median and p80."""
    if len(samples) == 1:  # an error before Python 3.13
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def measure_ceilings() -> Ceilings:
    """Copy bandwidth and bf16 matrix rate of this GPU, on random data."""

    def seconds(step: Callable[[], object], repeat: int = 10) -> float:
        for _ in range(3):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeat

    source = torch.randint(0, 256, (2**31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = seconds(lambda: a @ b)
    return Ceilings(gbps=2 * source.numel() / copy / 1e9, tflops=2 * 8192**3 / product / 1e12)
