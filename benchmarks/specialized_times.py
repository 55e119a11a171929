"""Times of the specialized decode kernel for Hopper, for check_specialized.py: a row a candidate.

Shapes, given as batch x context, or with x heads x query rows, are timed in turns with the kernel
whose warps work in *step*, and with FlashAttention 3 (bf16) and FlashMLA (its fp8 error is no
failure) where vLLM is installed.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import specialized_launch
import torch
from checks import expect
from specialized_launch import TYPES, has_pairs, outputs, plan_of, refresh, same

from mla_fusion.attention import triton_choice
from mla_fusion.cli.bench.decode_peers import (
    BF16,
    PAGE,
    PLANNED,
    TOLERANCE,
    UNAVAILABLE,
    Call,
    Candidate,
    Case,
    Inputs,
    fa3,
    flashmla,
    make,
    prepare,
)
from mla_fusion.cli.bench.kit import FACTS, interleave, quantiles, write

if TYPE_CHECKING:
    from pathlib import Path

TIMED = ["64x8192", "128x8192", "64x65536", "16x8192", "4x1024", "1x1024"]
DRAFTS = ["8x8192x16x4", "64x8192x16x4", "32x1024x16x4", "64x8192x8x8", "64x8192x8x4",
          "64x8192x16x8", "4x1024x16x8"]  # fmt: skip
PEERS: dict[str, Candidate] = {"fa3": fa3, "flashmla": flashmla}
ROW = ["batch", "context", "heads", "queries", "dtype", "candidate", "p20_us", "p50_us", "p80_us",
       "tflops", "error"]  # fmt: skip


def ours(inputs: Inputs, specialized: bool, pairs: bool) -> tuple[Call, torch.Tensor]:
    """One of both kernels as a candidate."""
    plan = plan_of(inputs.case, pairs, max(inputs.case.batch, PLANNED))
    rows = plan.heads_per_work * inputs.case.queries
    step = triton_choice.choose(True, rows, inputs.case.latent, inputs.case.rope)
    config = triton_choice.SPECIALIZED if specialized else step
    refresh(plan, [inputs.case.queries] * inputs.case.batch, inputs.lens)
    out, lse = outputs(inputs.case, len(inputs.q))
    return lambda i: specialized_launch.launch(inputs, plan, i, out, lse, config), out


CANDIDATES: dict[str, Candidate] = {
    f"{name}, {plan}": functools.partial(
        ours, specialized=name == "specialized", pairs=plan == "pairs"
    )
    for name in ("step", "specialized")
    for plan in ("blocks", "pairs")
} | PEERS
FORMER = "step, blocks"
DTYPES = {dtype: name for name, dtype in TYPES.items()}


def shape_of(text: str, dtype: str = "bf16") -> Case:
    """A shape of a type, given as batch x context, of 128 heads, or with x heads x query rows; and
    -ragged.

    Raises:
        ValueError: it is given otherwise.
    """
    numbers = text.removesuffix("-ragged")
    batch, context, *rest = map(int, numbers.split("x"))
    heads, queries = rest or (triton_choice.PAIRED_HEADS, 1)
    return Case(batch, context, heads, TYPES[dtype], numbers != text, queries)


def candidates(case: Case) -> dict[str, Candidate]:
    """Those for a shape: with pairs where it may have them; FlashAttention 3 for bf16."""
    paired = has_pairs(case)
    left = {k: build for k, build in CANDIDATES.items() if paired or not k.endswith("pairs")}
    return {k: build for k, build in left.items() if k != "fa3" or case.dtype == BF16}


def compile_shape(case: Case) -> str:
    """Launch ours for short sequences, so that Triton's cache has the kernels of a shape."""
    short = make(dataclasses.replace(case, context=PAGE))
    for kind, build in candidates(case).items():
        if kind not in PEERS:
            build(short)[0](0)
    torch.cuda.synchronize()
    return f"{case.batch} x {case.name}"


def measure_all(
    shapes: list[Case], rounds: int, budget: float, facts: dict[str, str], path: Path
) -> None:
    """Rows of all shapes that begin within `budget` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *ROW])
        writer.writeheader()
        for case in shapes:
            if time.monotonic() - start > budget:
                print(f"     no time for {case.batch} x {case.context} {case.name}", flush=True)
                continue
            write(writer, facts, measure(case, rounds))
            file.flush()
            torch.cuda.empty_cache()


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """A row of each kernel: its microseconds, and how far its result is off. The first sample is
    printed at once.
    """
    name = f"{case.batch} x {case.context} {case.name}"
    print(f"     {name}", flush=True)
    inputs = make(case)
    graphs, errors, kept = {}, {}, {}
    for kind, build in candidates(case).items():
        try:
            graphs[kind], errors[kind], kept[kind] = prepare(inputs, build)
        except UNAVAILABLE as problem:
            if kind not in PEERS:
                raise
            print(f"     {name} {kind} left out: {type(problem).__name__} {str(problem)[:100]}")
            continue
        (us,) = interleave({kind: graphs[kind]}, len(inputs.caches), 1)[kind]
        print(f"     {name} {kind}: {us:.1f} us alone, error {errors[kind]:.1e}", flush=True)
    samples = interleave(graphs, len(inputs.caches), rounds)
    times = {kind: quantiles(values) for kind, values in samples.items()}
    shape = case.batch, case.context, case.heads, case.queries, DTYPES[case.dtype]
    rows = []
    for kind, (low, us, high) in times.items():
        ratios = ", ".join(
            f"{times[other][1] / us:.2f}x {other}" for other in (FORMER, *PEERS) if other in times
        )
        rate = case.flops() / us / 1e6
        print(f"     {name} {kind}: {us:.1f} us, {rate:.0f} TFLOP/s, {ratios}", flush=True)
        values = (*shape, kind, low, us, high, rate, errors[kind])
        rows.append(dict(zip(ROW, values, strict=True)))
    # max() may lose a NaN; torch keeps it.
    judged = [error for kind, error in errors.items() if case.dtype == BF16 or kind not in PEERS]
    worst = float(torch.tensor(judged).max())
    odd = [kind for kind in kept if kind not in PEERS and not replays(graphs[kind], *kept[kind])]
    expect(name, worst <= TOLERANCE and not odd, f"error {worst:.1e}, replayed differently: {odd}")
    return rows


def replays(graph: torch.cuda.CUDAGraph, call: Call, out: torch.Tensor) -> bool:
    """Whether a replay leaves what an eager call on the last cache does, bit by bit."""
    out.fill_(torch.nan)
    graph.replay()
    replayed = out.clone()
    out.fill_(torch.nan)
    call(-1)
    return same(replayed, out)
