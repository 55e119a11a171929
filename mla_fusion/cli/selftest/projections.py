"""Checks of the kernels of products: hostile inputs against float64, then chains of launches, in
which each must wait for the one in front."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.measure.outcome import CannotRun, Outcome, compared, different_bytes
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
    """One call, twice, against float64, within what fp32 sums in some order and one rounding
    give."""
    given = build(case, device)
    results, again = launch(plan, *given), launch(plan, *given)
    name = f"{plan.kernel} {plan.block_n} {plan.num_warps}: {case}"
    return compared(name, results, again, reference.in_float64(*given), bounds(*given))


def build(case: Case, device: str) -> tuple[Any, ...]:
    """Arguments of `launch` behind the plan."""
    torch.manual_seed(case.k + case.tokens)
    of_weights = torch.float32 if case.bits == 32 else case.dtype
    x = rows(case.tokens, case.k, case.dtype, case.odd, device)
    weights = [rows(n, case.k, of_weights, case.odd, device) for n in case.sizes]
    if case.hostile:
        x[-1, 3], weights[0][5, 2] = INFINITY, NAN
        weights[0][7, 3] = 0.0
        if case.tokens > 1:
            x[0, case.k - 1] = NAN
    return (x, weights) if case.bits > 8 else (x, *block_fp8(weights))


def rows(n: int, k: int, dtype: torch.dtype, odd: bool, device: str) -> torch.Tensor:
    """Random rows between NaN, which nobody reads; odd: as `Case` has it."""
    wide = torch.full((n, k + 11 + 5 * (not odd)), NAN, dtype=dtype)
    wide[:, 8 : 8 + k] = torch.randn(n, k)
    return wide.to(device)[:, 8 : 8 + k]


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
    """Launches of which each reads the result of the one in front."""
    k = 1024
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    made = ([torch.randn(k, k, **options) / k**0.5] for _ in range(CHAIN))
    weights = [block_fp8(each) if plan.kernel == "block" else (each,) for each in made]
    x = torch.zeros(tokens, k, **options)

    def chain(between: Callable[[], object]) -> torch.Tensor:
        y = x
        for weight in weights:
            [y] = launch(plan, y, *weight)
            between()
        return y

    yield replayed(f"{CHAIN} launches in a row, {tokens} tokens", chain, x, REPLAYS)


def replayed(
    name: str, chain: Callable[[Callable[[], object]], torch.Tensor], x: torch.Tensor, count: int
) -> Outcome:
    """A graph of what `chain` launches, replayed with other values of its input x, against the same
    launches one by one: what `chain` is given, it calls behind each."""
    captured: list[torch.Tensor] = []
    graph = capture_calls(lambda _: captured.append(chain(lambda: None)), 1)
    wrong = 0
    for _ in range(count):
        x.normal_()
        graph.replay()
        wrong += different_bytes(captured[-1].clone(), chain(torch.cuda.synchronize))
    return Outcome(name, wrong, 0)
