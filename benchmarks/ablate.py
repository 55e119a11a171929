#!/usr/bin/env python3
"""The specialized decode kernel for Hopper as it is and with patches applied, timed in turns.

    python benchmarks/ablate.py --types fp8 --csv OUT.csv
    python benchmarks/ablate.py --variants fp8_plan_early fp8_plan_early+fp8_quads --csv OUT.csv

A variant is a patch of benchmarks/patches/, or several that are applied in order. By default all
patches of the types, and of plans, are timed alone, and the stacks that the folder lists. Each is
held against float64 attention, and its launches against the first one, bit by bit; then it is timed
beside the kernel as it is, and FlashMLA or, in bf16, FlashAttention 3 where vLLM is installed. A
variant and a shape are a row of `--csv`, also if it does not compile or is wrong. All runs in a
child process: a kernel that waits for ever is killed, with the rows so far in the file. Exits with
1 if a variant is wrong.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import watched
from checks import expect, finish
from patched import UNPATCHED, Copy, copy_package, variants
from specialized_launch import (
    LSE_TOLERANCES,
    TYPES,
    Result,
    definition,
    different,
    errors,
    has_pairs,
    outputs,
)
from specialized_times import DTYPES, PEERS, candidates, replays, shape_of

from mla_fusion.cli.bench_compile import compile_ahead
from mla_fusion.cli.bench_decode import FACTS, write
from mla_fusion.cli.bench_decode_peers import (
    BF16,
    PAGE,
    PLANNED,
    TOLERANCE,
    UNAVAILABLE,
    Call,
    Case,
    Inputs,
    make,
    prepare,
)
from mla_fusion.cli.bench_region import capture_calls, interleave, quantiles

SHORT = ("1x1024", "4x1024", "16x1024", "64x1024", "1x8192", "16x8192")
SHAPES = [f"{shape}x64x1" for shape in SHORT]
SHAPES += ["64x1024x64x1-ragged", "64x8192x64x1", "64x8192", "128x8192"]
SHAPE = ["batch", "context", "ragged", "heads", "queries", "dtype"]
TIMES = ["p20_us", "p50_us", "p80_us"]
ROW = ["variant", *SHAPE, *TIMES, "error", "lse_error", "launches",
       "different", "ok", "problem"]  # fmt: skip
# A variant, the folder of its copy, and the shapes whose kernels it is compiled for.
Job = tuple[str, Path, list[Case]]


def planned(copy: Copy, inputs: Inputs) -> Any:
    """A plan of the copy for all sequences, with pairs as the provider has them."""
    case = inputs.case
    pairs = case.dtype == BF16 and has_pairs(case)
    plan = copy.launch.plan_of(case, pairs, max(case.batch, PLANNED))
    copy.launch.refresh(plan, [case.queries] * case.batch, inputs.lens)
    return plan


def compile_variant(job: Job) -> str:
    """Launch a variant for short sequences, so that Triton's cache has its kernels; its name."""
    variant, folder, cases = job
    copy = Copy(folder)
    with copy.imported():
        for case in cases:
            inputs = make(dataclasses.replace(case, context=PAGE, ragged=False))
            results = outputs(inputs.case, len(inputs.q))
            config = copy.choice.SPECIALIZED
            copy.launch.launch(inputs, planned(copy, inputs), 0, *results, config)
    torch.cuda.synchronize()
    return f"{variant} H={cases[0].heads}"


def judge(
    copy: Copy, inputs: Inputs, wanted: list[Result], launches: int
) -> tuple[dict[str, Any], torch.cuda.CUDAGraph, tuple[Call, torch.Tensor]]:
    """What a row says of a variant's results; its graph, a call on each cache; and what that reads,
    which must live as long.
    """
    case, config = inputs.case, copy.choice.SPECIALIZED
    with copy.imported():
        plan = planned(copy, inputs)
        rows = [case.queries] * case.batch
        found = copy.launch.repeat(inputs, plan, rows, config, launches)
    out, lse = outputs(case, len(inputs.q))

    def call(i: int) -> None:
        with copy.imported():
            copy.launch.launch(inputs, plan, i, out, lse, config)

    graph = capture_calls(call, len(inputs.caches))
    error, lse_error = errors(*found[0], wanted)
    odd = len(different(found)) + (not replays(graph, call, out))
    ok = error <= TOLERANCE and lse_error <= LSE_TOLERANCES[case.dtype] and not odd
    values = (error, lse_error, launches, odd, int(ok), "")
    return dict(zip(ROW[ROW.index("error") :], values, strict=True)), graph, (call, out)


def failed(name: str, problem: Exception) -> dict[str, Any]:
    """What a row says of a variant that has no result."""
    text = f"{type(problem).__name__} {problem}"[:300]
    expect(name, False, text)
    return {"ok": 0, "problem": text}


def load(wanted: list[str], folder: Path) -> tuple[dict[str, Copy], dict[str, dict[str, Any]]]:
    """The copies of variants, and what rows say of those that have none."""
    copies, broken = {}, {}
    for variant in wanted:
        try:
            copies[variant] = Copy(copy_package(variant, folder))
        except Exception as problem:  # noqa: BLE001 (a patch may do anything to an import)
            broken[variant] = failed(variant, problem)
    return copies, broken


def measure(
    case: Case, copies: dict[str, Copy], broken: dict[str, dict[str, Any]], launches: int,
    rounds: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row of each variant for the type, and of each peer."""
    shape = f"{case.batch} x {case.context}{' ragged' if case.ragged else ''} {case.name}"
    inputs = make(case)
    wanted = definition(inputs, [case.queries] * case.batch, case.lengths())
    graphs, kept, said = {}, [], dict(broken)
    for name, copy in copies.items():
        # The last line before a kernel that waits for ever.
        print(f"     {shape} {name}", flush=True)
        try:
            said[name], graphs[name], alive = judge(copy, inputs, wanted, launches)
        except Exception as problem:  # noqa: BLE001 (the compiler's, a launch's: the row has it)
            said[name] = failed(f"{shape} {name}", problem)
            continue
        kept.append(alive)
        found = "error {error:.1e}, LSE {lse_error:.1e}, {different} of {launches} launches differ"
        expect(f"{shape} {name}", bool(said[name]["ok"]), found.format(**said[name]))
    for name, build in candidates(case).items():
        if name in PEERS:
            try:
                graphs[name], error, alive = prepare(inputs, build)
            except UNAVAILABLE as problem:
                why = f"{type(problem).__name__} {problem}"[:100]
                print(f"     {shape} {name} left out: {why}", flush=True)
                continue
            # FlashMLA's fp8 error is no failure.
            said[name] = {"error": error}
            kept.append(alive)
    samples = interleave(graphs, len(inputs.caches), rounds)
    times = {name: quantiles(values) for name, values in samples.items()}
    for name, (_, us, _) in times.items():
        change = us - times[UNPATCHED][1] if UNPATCHED in times else float("nan")
        print(f"     {shape} {name}: {us:.2f} us, {change:+.2f} of {UNPATCHED}", flush=True)
    values = (case.batch, case.context, int(case.ragged), case.heads, case.queries)
    known = dict(zip(SHAPE, (*values, DTYPES[case.dtype]), strict=True))
    return [
        {
            "variant": name,
            **known,
            **dict(zip(TIMES, times.get(name, [None] * 3), strict=True)),
            **each,
        }
        for name, each in said.items()
    ]


def ablate(options: argparse.Namespace, facts: dict[str, str], folder: Path) -> None:
    """Rows of all types, variants and shapes."""
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *ROW])
        writer.writeheader()
        for kind in options.types:
            # Plans are of both types.
            wanted = [each for each in options.variants if each.startswith((kind, "plan"))]
            wanted = wanted or [*variants(kind), *variants("plan")]
            copies, broken = load([UNPATCHED, *wanted], folder / kind)
            cases = [shape_of(text, kind) for text in options.shapes]
            heads = {case.heads for case in cases}
            compile_ahead(
                compile_variant,
                [
                    (variant, folder / kind / variant, [c for c in cases if c.heads == n])
                    for variant in copies
                    for n in sorted(heads)
                ],
            )
            for case in cases:
                if time.monotonic() - start > options.budget:
                    print(f"     no time for {case.batch} x {case.context} {case.name}", flush=True)
                    continue
                rows = measure(case, copies, broken, options.launches, options.rounds)
                write(writer, facts, rows)
                file.flush()
                torch.cuda.empty_cache()


def main() -> None:
    """Watch a child, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    watched.declare(parser)
    parser.add_argument("--types", nargs="+", choices=TYPES, help="default: those of --variants")
    parser.add_argument("--variants", nargs="+", default=[], metavar="PATCH[+PATCH...]")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BxN[xHxROWS][-ragged]")
    parser.add_argument("--launches", type=int, default=20, help="of each variant and shape")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=300, help="seconds: then no new shape")
    parser.add_argument("--csv", type=Path, default=Path("build/bench/ablate.csv"))
    options = parser.parse_args()
    of_variants = [kind for kind in TYPES if any(v.startswith(kind) for v in options.variants)]
    options.types = options.types or of_variants or list(TYPES)
    facts = watched.begin(__file__, options)
    with tempfile.TemporaryDirectory() as folder:
        ablate(options, facts, Path(folder))
    finish()


if __name__ == "__main__":
    main()
