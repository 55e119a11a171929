#!/usr/bin/env python3
"""Shapes of the epilogue's kernel on this GPU: rows for `MEASURED`, and rows in a CSV file.

    python benchmarks/epilogue.py --csv benchmarks/results/epilogue.csv

times shapes as `mla-fusion bench epilogue` times what is chosen, minutes of an H200, and prints
rows for `MEASURED` in mla_fusion/attention/triton/epilogue.py: for each number of tokens and heads
the shape whose mean gain over pieces and places is the largest, of those that are never slower.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton

from mla_fusion.attention.plan.epilogue import GROUP
from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.attention.triton import epilogue_kernel
from mla_fusion.attention.triton.epilogue import Shape
from mla_fusion.cli.bench import epilogue as bench_epilogue
from mla_fusion.cli.bench import kit
from mla_fusion.cli.bench.epilogue import LATENT, SEPARATE, Case

PROGRAMS = 32, 528  # fewest and most of a launch that is worth a measurement


def shaped(rows: int, columns: int, slices: int, warps: int, pieces: int) -> Shape:
    """With as many pieces at once as 32 registers of a thread hold, up to `pieces`; 64 registers
    where nobody waits for a row's other slices."""
    registers = 64 if rows * slices == 1 else 32
    most = registers * 32 * warps // (rows * min(LATENT // slices, 2**15 // columns))
    return Shape(rows, columns, slices, max(1, min(pieces, most)), warps)


def programs(case: Case, shape: Shape) -> int:
    """Of a launch."""
    blocks = -(-case.tokens // shape.rows) * case.values // shape.columns
    return blocks * shape.slices * case.heads


def tuned(case: Case, whole: int) -> set[Shape]:
    """Shapes that may be the best: rows are in one or two programs, columns in one, or in several
    where there is one row and no slice, or none of up to `whole` pieces."""
    most, widest = min(16, triton.next_power_of_2(case.tokens)), min(GROUP, case.values)
    every = itertools.product((1, 2, 4, 8, 16), (32, 64, 128), (1, 2, 4, 8), (4, 8), (8, 16, 64))
    shapes = {
        shaped(rows, columns, slices, warps, pieces)
        for rows, columns, slices, warps, pieces in every
        if most <= 2 * rows <= 2 * most
        if rows * slices == 1 or (columns == widest and pieces > 8)
    }
    shapes |= {dataclasses.replace(shape, whole=whole) for shape in shapes if shape.splits > 16}
    least, greatest = PROGRAMS
    facts = case.tokens, LATENT, case.values, case.quantization
    return {
        shape
        for shape in shapes
        if least <= programs(case, shape) <= greatest and not shape.unsuited(*facts)
    }


def compile_all(cases: list[Case], whole: int) -> None:
    """Compile what `cases` launch, on all cores: one after another takes longer than measuring."""
    needed: dict[Case, set[Shape]] = {}
    for case in cases:
        # Tokens and pieces are not compiled in.
        one = dataclasses.replace(case, tokens=1, pieces=1)
        needed.setdefault(one, set()).update(tuned(case, whole))
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for case, shapes in needed.items():
            given = bench_epilogue.make(case, calls=1)[0]
            for shape in shapes:
                args, constants = epilogues.arguments(given, shape)
                epilogue_kernel.epilogue_kernel.warmup(*args, grid=(1,), **constants)


def advise(rows: list[dict]) -> None:
    """Rows of `MEASURED`: of shapes that never lose, the one with the largest mean gain."""
    times: dict = {}
    for row in rows:
        if row["worst_step"] > 1 and row["candidate"] != SEPARATE:
            continue
        facts = row["tokens"], row["heads"], row["quantization"] == "group"
        place = row["pieces"], row["place"], row["quantization"]
        times.setdefault(facts, {}).setdefault(place, {})[row["candidate"]] = row["p50_us"]
    for (tokens, heads, group), places in sorted(times.items()):
        names = set.intersection(*map(set, places.values())) - {SEPARATE}
        gains = {
            name: [found[SEPARATE] / found[name] for found in places.values()] for name in names
        }
        means = {n: statistics.geometric_mean(each) for n, each in gains.items() if min(each) >= 1}
        if means and means[best := max(means, key=means.__getitem__)] >= 1.2:
            shape = ", ".join(re.split("[xw]", best))
            found = " ".join(f"{t[best]:.2f}/{t[SEPARATE]:.2f}" for t in places.values())
            print(
                f"    Faster({tokens}, {heads}, {group}, Shape({shape})),"
                f"  # {means[best]:.2f}, least {min(gains[best]):.2f}: {found}"
            )


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 2, 4, 8, 16))
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    parser.add_argument("--splits", "--pieces", type=int, nargs="+", default=(1, 16, 128))
    parser.add_argument("--values", type=int, default=128)
    parser.add_argument("--quantization", nargs="+", default=("none", "group"))
    parser.add_argument("--whole", type=int, default=32, help="most pieces of a row not sliced")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    options = parser.parse_args()
    start, facts = time.monotonic(), kit.environment(options.commit, "benchmarks/epilogue.py")
    print(facts, flush=True)
    torch.manual_seed(0)
    sizes = options.tokens, options.heads, options.splits
    cases = bench_epilogue.grid(sizes, options.values, options.quantization)
    compile_all(cases, options.whole)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    in_time = itertools.takewhile(lambda _: time.monotonic() - start < options.seconds, cases)

    def measured(case: Case) -> list[dict]:
        found = bench_epilogue.candidates(case, tuned(case, options.whole))
        return bench_epilogue.measure(case, found, options.rounds)

    rows = kit.table(options.csv, facts, bench_epilogue.RESULT, in_time, measured)
    bench_epilogue.summary(rows)
    advise(rows)
    print(f"{len(rows)} rows after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
