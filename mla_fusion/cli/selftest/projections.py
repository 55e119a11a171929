"""Checks of the kernels of products: hostile inputs against float64, then chains of launches, in
which each must wait for the one in front."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.measure.outcome import CannotRun, Outcome, different_bytes
from mla_fusion.measure.timing import capture_calls
from mla_fusion.projections import reference
from mla_fusion.projections.plans import GROUP, MAX_TOKENS, PLANS, Plan
from mla_fusion.projections.triton import launch

NAN, INFINITY = float("nan"), float("inf")
CHAIN, REPLAYS = 6, 20  # launches of a captured graph, and its replays


@dataclasses.dataclass(frozen=True)
class Case:
    """A call. odd: rows begin at no multiple of 16 bytes. hostile: x and a weight have NaN and
    infinite elements. bits: of an element of the weights, see `ops.Product`."""

    tokens: int
    k: int
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    odd: bool = False
    hostile: bool = False
    bits: int = 16

    def __str__(self) -> str:
        marks = [name for name in ("odd", "hostile") if getattr(self, name)]
        marks += [f"{self.bits} bits"] * (self.bits != 16)
        sizes = " + ".join(map(str, self.sizes))
        return ", ".join([f"{self.tokens} x {self.k} -> {sizes}", str(self.dtype)[6:], *marks])


def cases(plan: Plan, thorough: bool) -> Iterator[Case]:
    """Calls that a plan takes."""
    counts = {"vector": (1,), "matrix": (1, 5, 8, 9, 16), "block": (1, 5, 8)}[plan.kernel]
    for tokens in counts if thorough else {counts[0], counts[-1]}:
        if plan.kernel == "block":
            yield Case(tokens, 4608, (24,), bits=8)  # x is loaded in two pieces
            yield Case(tokens, 1152, (137,), odd=True, bits=8)
            yield Case(tokens, 640, (24,), hostile=True, bits=8)
            continue
        yield Case(tokens, 2048 if thorough else 512, (96,))
        yield Case(tokens, 768, (37, 18))
        yield Case(tokens, 1100, (37,), hostile=True)
        yield Case(tokens, 300, (21, 40), torch.float16, odd=True)
        yield Case(tokens, 640, (24,), hostile=True)
    for tokens in (1, 3) if plan.kernel == "vector" else ():
        yield Case(tokens, 1100, (37,), hostile=True, bits=32)
        yield Case(tokens, 640, (24, 18), odd=True, bits=32)
    if plan.kernel == "vector":
        yield Case(1, 4500, (21,))  # x is loaded in two pieces


def check_all(kernel: str, thorough: bool) -> Iterator[Outcome]:
    """Every plan of a kernel on this GPU; CannotRun where it does not run."""
    here = gpu.of("cuda")
    least = (8, 9) if kernel == "block" else (8, 0)
    if here.capability < least:
        known = "sm_{}{}".format(*least)
        raise CannotRun(f"the products are for NVIDIA GPUs from {known} on, not for {here.arch}")
    plans = [plan for plan in PLANS if plan.kernel == kernel]
    for plan in plans:
        yield from check(plan, thorough, "cuda")
    for tokens in {"vector": (1,), "matrix": (8, MAX_TOKENS), "block": (8,)}[kernel]:
        yield from chained(plans[0], tokens)


def check(plan: Plan, thorough: bool, device: str) -> Iterator[Outcome]:
    """Each call of a plan twice, bit by bit."""
    for case in cases(plan, thorough):
        yield against(plan, case, device)


def against(plan: Plan, case: Case, device: str) -> Outcome:
    """One call against float64. error: the largest distance of an element over what fp32 sums in
    some order and one rounding give."""
    given = build(case, device)
    results, again = launch(plan, *given), launch(plan, *given)
    notes, worst = [], 0.0
    exact, limits = reference.in_float64(*given), bounds(*given)
    for got, want, limit in zip(results, exact, limits, strict=True):
        other = ~want.isfinite()
        if not torch.allclose(got[other].double(), want[other], equal_nan=True):
            notes.append("another NaN or infinity than float64's")
        off = (got.double() - want).abs() / limit
        worst = max(worst, float(off.masked_fill(other, 0).max()))
    if any(map(different_bytes, results, again)):
        notes.append("two launches differ")
    name = f"{plan.kernel} {plan.block_n} {plan.num_warps}: {case}"
    return Outcome(name, worst, 1.0, "; ".join(notes))


def build(case: Case, device: str) -> tuple[Any, ...]:
    """Arguments of `project`. Rows of x and of the weights lie between NaN, which nobody reads."""
    torch.manual_seed(case.k + case.tokens)

    def rows(n: int, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.full((n, case.k + 11 + 5 * (not case.odd)), NAN, dtype=dtype)
        wide[:, 8 : 8 + case.k] = torch.randn(n, case.k)
        return wide.to(device)[:, 8 : 8 + case.k]

    x, of_weights = rows(case.tokens, case.dtype), torch.float32 if case.bits == 32 else case.dtype
    weights = [rows(n, of_weights) for n in case.sizes]
    if case.hostile:
        x[-1, 3], weights[0][5, 2] = INFINITY, NAN
        weights[0][7, 3] = 0.0
        if case.tokens > 1:
            x[0, case.k - 1] = NAN
    return (x, weights) if case.bits > 8 else (x, *block_fp8(weights))


def block_fp8(weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A weight in e4m3, its rows as far apart, and scales."""
    [weight] = weights
    room = weight.new_empty(len(weight), weight.stride(0)).to(torch.float8_e4m3fn)
    blocks = [-(-n // GROUP) for n in weight.shape]
    scales = torch.rand(blocks, device=weight.device) + 0.5
    return [room[:, : weight.shape[1]].copy_(weight)], scales


def bounds(
    x: torch.Tensor, weights: list[torch.Tensor], scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The most that each element may be off: half a step, and gamma_K * sum |x_i * w_i| as in
    `region.absorb_interval`."""
    of = torch.finfo(x.dtype if scales is not None else weights[0].dtype)
    terms = (x.shape[1] + 1) * 2.0**-24
    found, (a, factors) = [], reference.exact(x, weights, scales)
    for b in factors:
        limit = (a.abs() @ b.abs().t()) * (terms / (1 - terms))
        limit += ((a @ b.t()).abs() + limit) * of.eps / 2 * 1.001 + of.tiny
        found.append(limit)
    return found


def chained(plan: Plan, tokens: int) -> Iterator[Outcome]:
    """A graph in which each launch reads the result of the one in front, replayed with other inputs
    in place, against the same launches one by one."""
    k = 1024
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    made = ([torch.randn(k, k, **options) / k**0.5] for _ in range(CHAIN))
    weights = [block_fp8(each) if plan.kernel == "block" else (each,) for each in made]
    x, results = torch.zeros(tokens, k, **options), [torch.zeros(tokens, k, **options)]

    def chain(_: int, between: Any = lambda: None) -> torch.Tensor:
        y = x
        for weight in weights:
            [y] = launch(plan, y, *weight)
            between()
        results[0] = y
        return y

    graph = capture_calls(chain, 1)
    captured = results[0]
    wrong = 0
    for _ in range(REPLAYS):
        x.normal_()
        graph.replay()
        got = captured.clone()
        wrong += different_bytes(got, chain(0, torch.cuda.synchronize))
    yield Outcome(f"{CHAIN} launches in a row, {tokens} tokens", wrong, 0)
