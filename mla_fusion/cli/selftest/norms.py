"""Checks of the norms beside products: against float64, then in a chain with products, in which
each launch must wait for the one in front."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.cli.selftest.projections import CHAIN, INFINITY, NAN, REPLAYS, replayed, rows
from mla_fusion.config import vllm_compat
from mla_fusion.measure.outcome import CannotRun, Outcome, compared
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
    """One call, twice, against float64, within what fp32 gives in some order of the sum, with one
    rounding."""
    given = build(case, device)
    results, again = normalize(*given), normalize(*given)
    xs, weights, epsilons, added, factor, wide = given
    doubled = _doubled(xs), _doubled(weights), epsilons, _doubled(added), factor, wide
    exact = reference.normalize(*doubled, within=torch.float64)
    # A sum of few terms near 1 may be near 0.
    least = 2.0**-19 if added else torch.finfo(case.dtype).tiny
    limits = []
    for got, want in zip(results, exact, strict=True):
        terms, step = (want.shape[1] + 8) * 2.0**-24, torch.finfo(got.dtype).eps
        limits.append(want.abs() * (terms + step / 2 * 1.001) + least)
    return compared(str(case), results, again, exact, limits)


def build(case: Case, device: str) -> tuple[Any, ...]:
    """Arguments of `normalize`."""
    torch.manual_seed(sum(case.widths))
    xs = [rows(case.tokens, k, case.dtype, case.odd, device) for k in case.widths]
    weights = [torch.randn(k).to(device, case.dtype) for k in case.widths]
    first = case.tokens, case.widths[0], case.dtype, case.odd, device
    added = [rows(*first) for _ in range(case.adds)]
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
    """Products and norms in turns. qkv_a: vLLM's op, which is in front of each product then."""
    (k, n), plan = (7168, 2112) if qkv_a else (1024, 1024), Plan("vector", 8, 4)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(k, n, **options) / n**0.5 for _ in range(CHAIN)]
    fronts = [torch.randn(n, k, **options) / k**0.5 for _ in range(CHAIN if qkv_a else 0)]
    x, gain = torch.zeros(1, k, **options), torch.ones(k, **options)

    def chain(between: Callable[[], object]) -> torch.Tensor:
        y = added = x
        for i, weight in enumerate(weights):
            y, added = normalize([y], [gain], [1e-6], [added], 1.0, True)
            between()
            if qkv_a:
                y = qkv_a(y, fronts[i])
                between()
            [y] = launch(plan, y, [weight])
            between()
        return torch.cat([y.float(), added])

    said = ", of them vLLM's qkv_a" if qkv_a else ""
    name = f"{2 * CHAIN + len(fronts)} launches in a row{said}"
    yield replayed(name, chain, x, REPLAYS * rounds)
