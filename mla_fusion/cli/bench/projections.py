"""`mla-fusion bench projections`: products of up to 16 tokens, every launch plan against `torch.mm`
of each weight, in block fp8 against vLLM's op.

In a model an RMSNorm of Inductor's makes the input, and starts no launch early: weights are not
under way before it ends. So a plain kernel that writes the input stands in front of each call, and
its own time is taken off."""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mla_fusion.cli import UserError
from mla_fusion.measure import records, timing
from mla_fusion.measure.distances import distance, worst
from mla_fusion.measure.records import Row
from mla_fusion.measure.timing import TIMES, Call, Ceilings
from mla_fusion.ops import Product
from mla_fusion.projections import measured, reference
from mla_fusion.projections.plans import GROUP, MAX_TOKENS, PLANS, Plan
from mla_fusion.projections.triton import launch, launches

TORCH, FRONT = "torch", "front"
# Least bytes of weights of distinct calls in one graph: several times the L2 cache of any GPU.
DISTINCT = 220_000_000
WORST = 1.05  # most error of ours over that of cuBLAS
COLUMNS = ["sizes", "k", "bits", "tokens", "candidate", *TIMES, "floor_us", "gbps", "error"]
DEFAULTS: dict[str, Any] = {
    "tokens": (1, 2, 4, 8, 16), "k": 2048, "sizes": (), "rounds": 9,
}  # fmt: skip


class Inputs(NamedTuple):
    """A product with the weights of several layers, each with scales in block fp8. x: rows further
    apart than K, as slices are, but for vLLM's op."""

    shape: Product
    x: torch.Tensor
    weights: list[tuple[Any, ...]]


def make_weights(shape: Product) -> list[tuple[Any, ...]]:
    """Weights of `DISTINCT` bytes in all, and of 4 layers at least."""
    count = max(4, -(-DISTINCT // (shape.bits // 8 * shape.k * sum(shape.sizes))))
    return [_weights(shape) for _ in range(count)]


def _weights(shape: Product) -> tuple[Any, ...]:
    if shape.bits == 8:
        blocks = (-(-n // GROUP) for n in (*shape.sizes, shape.k))
        scales = (_random(*blocks).float().abs() + 0.5) / 100 / shape.k**0.5
        return [(_random(*shape.sizes, shape.k) * 100).to(torch.float8_e4m3fn)], scales
    dtype = torch.float32 if shape.bits == 32 else torch.bfloat16
    return ([(_random(n, shape.k) / shape.k**0.5).to(dtype) for n in shape.sizes],)


def _peer(x: torch.Tensor, weights: list[torch.Tensor], *scales: Any) -> list[torch.Tensor]:
    """The product without this library, in block fp8 by vLLM's op, which it registers."""
    if not scales:
        return reference.project(x, weights)
    import vllm.model_executor.kernels.linear  # noqa: F401

    gemm = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
    return [gemm(x, *weights, *scales, GROUP, False)]


def measurable(shapes: Sequence[Product]) -> list[Product]:
    """The shapes, without those in block fp8 where vLLM has no such op."""
    return [shape for shape in shapes if shape.bits > 8 or _has_peer()]


@functools.cache
def _has_peer() -> bool:
    found = False
    if importlib.util.find_spec("vllm"):
        from vllm.utils.flashinfer import has_flashinfer_fp8_blockscale_gemm

        found = has_flashinfer_fp8_blockscale_gemm()
    if not found:
        print("left out: products in block fp8, for want of vLLM with FlashInfer's op on Hopper")
    return found


def _random(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def inputs(shapes: Iterable[Product], counts: Sequence[int]) -> Iterator[Inputs]:
    """The calls of some shapes, each with these numbers of tokens."""
    for shape in shapes:
        weights = make_weights(shape)
        for tokens in counts:
            x = _random(tokens, shape.k + 64 * (shape.bits > 8))[:, : shape.k]
            yield Inputs(shape, x, weights)


def candidates(shape: Product, tokens: int) -> dict[str, Plan | None]:
    """The plans that fit by name, and `TORCH`, which has none."""
    fit = [plan for plan in PLANS if plan.fits(shape.k, tokens, shape.bits)]
    return {name_of(plan): plan for plan in fit} | {TORCH: None}


def name_of(plan: Plan) -> str:
    """As the rows name a plan."""
    return f"{plan.kernel} {plan.block_n} {plan.num_warps}"


def call_of(plan: Plan | None, given: Inputs) -> Call:
    """The product of layer i, behind a kernel that writes its input."""
    x, project = given.x, functools.partial(launch, plan) if plan else _peer
    return lambda i: (_write(x), project(x, *given.weights[i]))[1]


def _write(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 1, out=x)


def run(settings: argparse.Namespace, facts: Mapping[str, str], ceilings: Ceilings) -> bool:
    """Measure products; whether ours were all right. The fastest plans go beside the CSV file, in
    the form of `projections/gpus`."""
    asked = Product(settings.k, tuple(settings.sizes))
    if len(asked.sizes) > 2 or max(settings.tokens) > MAX_TOKENS:
        raise UserError(f"--sizes takes one or two, --tokens up to {MAX_TOKENS} each")
    shapes = [asked]
    if not settings.sizes:
        shapes = measurable([*dict.fromkeys(itertools.chain(*measured.shipped().values()))])
    torch.manual_seed(0)
    compile_all(shapes, settings.tokens)
    rows = functools.partial(measure, rounds=settings.rounds, ceilings=ceilings)
    work = inputs(shapes, settings.tokens)
    found = records.table(settings.csv, facts, COLUMNS, work, rows)
    path = settings.csv.with_suffix(".json")
    path.write_text(records.text(table(found, facts)))
    print(f"microseconds; ! marks a failed check. Rows: {settings.csv}, of the fastest: {path}")
    return all(row["wrong"] == "" for row in found)


def compile_all(shapes: Iterable[Product], counts: Collection[int]) -> None:
    """Compile every variant for these numbers of tokens."""

    def of(shape: Product) -> list[functools.partial[Any]]:
        fit = lambda n: candidates(shape, n).values() if n in counts else ()  # noqa: E731
        return launches(shape, torch.bfloat16, fit)

    timing.compile_all([*itertools.chain.from_iterable(map(of, shapes))])


def measure(given: Inputs, rounds: int, ceilings: Ceilings) -> list[Row]:
    """The rows of one shape and number of tokens, and a line."""
    k, sizes, bits = dataclasses.astuple(given.shape)
    tokens = len(given.x)
    plans = candidates(given.shape, tokens)
    exact = reference.in_float64(given.x, *given.weights[0])

    def build(name: str) -> tuple[Call, Row]:
        if name == FRONT:
            return lambda i: _write(given.x), {}
        call = call_of(plans[name], given)
        got: Any = call(0)
        error = worst([*map(distance, got, exact)])
        again: Any = call(0)
        same = all(map(torch.equal, got, again))
        return call, {"error": error, "wrong": "" if same else "two launches differ"}

    moved = bits // 8 * k * sum(sizes)
    flops, found = 2 * k * sum(sizes) * tokens, list[Row]()
    shape: Row = {
        "sizes": " ".join(map(str, sizes)), "k": k, "bits": bits, "tokens": tokens
    }  # fmt: skip
    shape["floor_us"] = ceilings.floor_us(moved, flops)
    *timed, (_, _, front) = timing.compare((*plans, FRONT), build, len(given.weights), rounds)
    for name, check, times in timed:
        own = {each: us - front["p50_us"] for each, us in times.items()}
        found.append(shape | {"candidate": name} | timing.rates(moved, flops, own) | check)
    limit = next((WORST * row["error"] for row in found if row["candidate"] == TORCH), 0.0)
    for row in found:
        if not row["error"] <= limit:
            row["wrong"] = f"error {row['error']:.1e}, of {TORCH} {limit / WORST:.1e}"
    shown = (f"{row['candidate']} {row['p50_us']:.2f}{'!' if row['wrong'] else ''}"
             for row in sorted(found, key=lambda row: row["p50_us"]))  # fmt: skip
    text = f"{k} -> {shape['sizes']}"
    print(f"{text:18} T={tokens:2d} floor {shape['floor_us']:5.2f} |", " | ".join(shown))
    return found


def table(rows: Sequence[Row], facts: Mapping[str, str]) -> dict[str, Any]:
    """The content of a file of `projections/gpus`: the fastest right plan of each row."""
    shapes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    grouped = itertools.groupby(rows, lambda row: [row[name] for name in COLUMNS[:4]])
    for (sizes, k, bits, tokens), group in grouped:
        members = [row for row in group if not row["wrong"]]
        ours = [row for row in members if row["candidate"] != TORCH]
        others = [row for row in members if row["candidate"] == TORCH]
        if not ours or not others:
            continue
        best = min(ours, key=lambda row: row["p50_us"])
        kernel, *numbers = best["candidate"].split()
        shapes.setdefault((sizes, k, bits), []).append(
            {"tokens": tokens, "plan": [kernel, *map(int, numbers)], "ours": _times(best),
             "torch": _times(others[0])}
        )  # fmt: skip
    names = "gpu", "torch", "triton", "commit", "command"
    return {name: facts[name] for name in names} | {
        "shapes": [
            {"sizes": [*map(int, sizes.split())], "k": k, "bits": bits, "rows": found}
            for (sizes, k, bits), found in shapes.items()
        ]
    }


def _times(row: Row) -> list[float]:
    """Times in four digits."""
    return [float(f"{row[name]:.4g}") for name in TIMES]
