"""Checks of the norms beside products: against float64, then in a chain with products, in which
each launch must wait for the one in front."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.cli.selftest.projections import CHAIN, INFINITY, NAN, REPLAYS
from mla_fusion.config import vllm_compat
from mla_fusion.measure.outcome import CannotRun, Outcome, different_bytes
from mla_fusion.measure.timing import capture_calls
from mla_fusion.projections import reference
from mla_fusion.projections.plans import Plan
from mla_fusion.projections.triton import launch, normalize
from mla_fusion.runtime import projection


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. widths: K of each x. adds: terms beside the first x. wide: the last of them and the
    sum are fp32. odd: rows begin at no multiple of 16 bytes. hostile: rows of zeros, with a NaN,
    and with an infinity. factor: of the first x."""

    tokens: int
    widths: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    adds: int = 0
    wide: bool = False
    odd: bool = False
    hostile: bool = False
    factor: float = 1.0


CASES = (
    Case(1, (2048,), adds=1, wide=True), Case(3, (7168,), adds=2, hostile=True), Case(1, (512,)),
    Case(2, (7168,), adds=2, factor=2.5),
    Case(5, (768, 512)), Case(40, (512, 1536), torch.float16, odd=True),
    Case(4, (100, 33), hostile=True), Case(4, (1100,), odd=True, adds=2, wide=True),
)  # fmt: skip


def check_all(thorough: bool) -> Iterator[Outcome]:
    """The kernel on this GPU; CannotRun where it does not run."""
    here = gpu.of("cuda")
    if here.capability < (9, 0):
        raise CannotRun(f"the norms are for NVIDIA GPUs from sm_90 on, not for {here.arch}")
    for case in CASES:
        yield against(case, "cuda")
    rounds = 10 if thorough else 1
    yield from chained(rounds)
    with contextlib.suppress(ImportError):
        if vllm_compat.is_gpu() and projection.has_qkv_a():
            yield from chained(rounds, projection.qkv_a)


def against(case: Case, device: str) -> Outcome:
    """One call, twice, against float64. error: the largest distance of an element over what fp32
    gives in some order of the sum, with one rounding."""
    given = build(case, device)
    results, again = normalize(*given), normalize(*given)
    xs, weights, epsilons, added, factor, wide = given
    doubled = _doubled(xs), _doubled(weights), epsilons, _doubled(added), factor, wide
    exact = reference.normalize(*doubled, within=torch.float64)
    # A sum of few terms near 1 may be near 0.
    notes, worst, least = [], 0.0, 2.0**-19 if added else torch.finfo(case.dtype).tiny
    for got, want in zip(results, exact, strict=True):
        other = ~want.isfinite()
        if not torch.allclose(got[other].double(), want[other], equal_nan=True):
            notes.append("another NaN or infinity than float64's")
        terms, step = (want.shape[1] + 8) * 2.0**-24, torch.finfo(got.dtype).eps
        limit = want.abs() * (terms + step / 2 * 1.001) + least
        worst = max(worst, float(((got.double() - want).abs() / limit).masked_fill(other, 0).max()))
    if any(map(different_bytes, results, again)):
        notes.append("two launches differ")
    return Outcome(str(case), worst, 1.0, "; ".join(notes))


def build(case: Case, device: str) -> tuple[Any, ...]:
    """Arguments of `normalize`. Rows lie between NaN, which nobody reads."""
    torch.manual_seed(sum(case.widths))

    def rows(k: int) -> torch.Tensor:
        x = torch.full((case.tokens, k + 11 + 5 * (not case.odd)), NAN, dtype=case.dtype)
        x[:, 8 : 8 + k] = torch.randn(case.tokens, k)
        return x.to(device)[:, 8 : 8 + k]

    xs = [rows(k) for k in case.widths]
    weights = [torch.randn(k).to(device, case.dtype) for k in case.widths]
    added = [rows(case.widths[0]) for _ in range(case.adds)]
    if case.wide:
        added[-1] = added[-1].float().mul_(1 + 2.0**-10)  # what bf16 has not
    if case.hostile:
        for x in (*xs, *added):
            x[0] = 0
        xs[-1][1, 3], xs[0][2, 5] = NAN, INFINITY
    return xs, weights, [1e-6, 1e-3][: len(xs)], added, case.factor, case.wide


def _doubled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.double() for x in tensors]


def chained(rounds: int, qkv_a: Callable[..., torch.Tensor] | None = None) -> Iterator[Outcome]:
    """A graph of products and norms in turns, replayed with other inputs in place, against the same
    launches one by one. qkv_a: vLLM's op, which is in front of each product then."""
    (k, n), plan = (7168, 2112) if qkv_a else (1024, 1024), Plan("vector", 8, 4)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(k, n, **options) / n**0.5 for _ in range(CHAIN)]
    fronts = [torch.randn(n, k, **options) / k**0.5 for _ in range(CHAIN if qkv_a else 0)]
    x, gain, results = torch.zeros(1, k, **options), torch.ones(k, **options), [torch.empty(0)]

    def chain(_: int, between: Any = lambda: None) -> torch.Tensor:
        y = added = x
        for i, weight in enumerate(weights):
            y, added = normalize([y], [gain], [1e-6], [added], 1.0, True)
            between()
            if qkv_a:
                y = qkv_a(y, fronts[i])
                between()
            [y] = launch(plan, y, [weight])
            between()
        results[0] = torch.cat([y.float(), added])
        return results[0]

    graph = capture_calls(chain, 1)
    captured, wrong = results[0], 0
    for _ in range(REPLAYS * rounds):
        x.normal_()
        graph.replay()
        wrong += different_bytes(captured.clone(), chain(0, torch.cuda.synchronize))
    said = ", of them vLLM's qkv_a" if qkv_a else ""
    yield Outcome(f"{2 * CHAIN + len(fronts)} launches in a row{said}", wrong, 0)
