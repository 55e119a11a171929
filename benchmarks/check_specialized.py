#!/usr/bin/env python3
"""The specialized decode kernel for Hopper on this GPU: is it right, and is it faster.

    python benchmarks/check_specialized.py --csv OUT.csv

Random batches of bf16 and fp8 are held against float64 attention, eager, and each launch of a batch
against the first one, bit by bit; a case, all batches of a type, and a number of heads and query
rows, is a row of `--csv`. Then shapes are timed, a row of `--times` for each kernel
(specialized_times.py). Processes compile all kernels at once before either. Both plans are checked
and timed where an item may have two blocks of 64 rows: *pairs*, half as many workers, so that both
run at the same time and share what they read in the L2 cache, as the provider has it for bf16; and
*blocks* one after the other, as it has it for fp8, for 128 heads and one query row items of their
own.
All runs in a child process: a kernel that waits for ever is killed after `--seconds` without a
line, and the last line says where. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import csv
import random
from pathlib import Path
from typing import TYPE_CHECKING

import specialized_launch
import specialized_times
import torch
import watched
from checks import expect, finish, poison, where
from specialized_launch import LSE_TOLERANCES, TYPES, outputs, plan_of, refresh

from mla_fusion.attention import triton_choice
from mla_fusion.cli.bench.decode_peers import TOLERANCE, Case, Inputs, make
from mla_fusion.cli.bench.kit import FACTS, compile_ahead, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_fusion.attention import PersistentDecodePlan

# Heads, query rows, page, whether the plan has pairs, and the type. In CHECKED it has no type, and
# those that may have pairs are checked without them, too.
Checked = tuple[int, int, int, bool, str]
CHECKED = [
    (64, 1, 64, False),
    (128, 1, 64, True),
    (16, 4, 128, False),
    (16, 8, 64, True),
    (8, 4, 64, False),
    (8, 8, 64, False),
    (32, 8, 64, True),
    (40, 1, 128, False),
    (128, 2, 64, True),
]
# Lengths and sequences of a batch.
BATCHES = [("short", 24), ("odd", 40), ("long", 3), ("odd", 200)]
LONGEST = {"short": 129, "odd": 3_000, "long": 40_000}
ROW = ["heads", "queries", "page", "pairs", "dtype", "batches", "launches", "pieces", "error",
       "lse_error", "different", "ok"]  # fmt: skip


def lengths_of(rng: random.Random, kind: str, batch: int) -> list[int]:
    """KV tokens of each sequence."""
    if kind == "short":
        return rng.choices((0, 1, 2, 63, 64, 65, 127, 128, LONGEST[kind]), k=batch)
    return [rng.randint(1, LONGEST[kind]) for _ in range(batch)]


def batches_of(
    checked: Checked, rng: random.Random
) -> Iterator[tuple[str, Inputs, PersistentDecodePlan, list[int], list[int]]]:
    """The batches of a case, one plan for all, refreshed for each: name, inputs, plan, query rows
    and KV tokens of each sequence.
    """
    heads, queries, page, pairs, dtype = checked
    plan = None
    for kind, batch in BATCHES:
        context = -(-LONGEST[kind] // page) * page
        case = Case(batch, context, heads, TYPES[dtype], False, queries, page)
        plan = plan or plan_of(case, pairs, max(number for _, number in BATCHES))
        inputs, lengths = make(case), lengths_of(rng, kind, batch)
        rows = [rng.choice((queries, rng.randint(1, queries))) for _ in lengths]
        inputs.lens.copy_(torch.tensor(lengths))
        refresh(plan, rows, inputs.lens)
        yield f"{name_of(checked)} {batch} {kind}", inputs, plan, rows, lengths


def cases_of(wanted: list[tuple[int, int, int, bool]], types: list[str]) -> list[Checked]:
    """Cases of some types: without pairs, and with them where there may be."""
    return [
        (heads, queries, page, with_pairs, dtype)
        for dtype in types
        for heads, queries, page, pairs in wanted
        for with_pairs in ((False, True) if pairs else (False,))
    ]


def name_of(checked: Checked) -> str:
    """Of a case, for people."""
    heads, queries, page, pairs, dtype = checked
    return f"{dtype} H={heads} rows<={queries} page={page}{' pairs' if pairs else ''}"


def compile_case(checked: Checked) -> str:
    """Launch each batch of a case once, so that Triton's cache has its kernels; its name."""
    for _, inputs, plan, rows, _ in batches_of(checked, random.Random(0)):
        specialized_launch.launch(
            inputs, plan, 0, *outputs(inputs.case, sum(rows)), triton_choice.SPECIALIZED
        )
    torch.cuda.synchronize()
    return name_of(checked)


def check(
    cases: list[Checked], rng: random.Random, launches: int, facts: dict[str, str], path: Path,
    apart: bool = False,
) -> None:  # fmt: skip
    """Random batches: short sequences, odd lengths, and few long ones, which are split. apart: no
    kernel starts before the last launch has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *ROW])
        writer.writeheader()
        for checked in cases:
            found = [
                check_batch(name, inputs, plan, rows, lengths, launches, apart)
                for name, inputs, plan, rows, lengths in batches_of(checked, rng)
            ]
            # max() may lose a NaN; torch keeps it.
            worst = torch.tensor([each[:2] for each in found]).amax(0).tolist()
            pieces, different, right = (sum(each[i] for each in found) for i in (2, 3, 4))
            of_case = (*checked[:3], int(checked[3]), checked[4], len(found), launches)
            values = (*of_case, pieces, *worst, different, int(right == len(found)))
            write(writer, facts, [dict(zip(ROW, values, strict=True))])
            file.flush()


def check_batch(
    name: str, inputs: Inputs, plan: PersistentDecodePlan, rows: list[int], lengths: list[int],
    times: int, apart: bool,
) -> tuple[float, float, int, int, bool]:  # fmt: skip
    """One batch, so many times: the same plan has the same result, bit by bit. Its errors, of the
    LSE too, its pieces, the launches that differ from the first one, and whether all is right.
    """
    print(f"     {name}", flush=True)
    poison(inputs, lengths)
    config = triton_choice.SPECIALIZED
    launches = specialized_launch.repeat(inputs, plan, rows, config, times, apart)
    pieces = int(plan.reduce_indptr[-1])
    (out, lse), odd = launches[0], specialized_launch.different(launches)
    wanted = specialized_launch.definition(inputs, rows, lengths)
    worst, worst_lse = specialized_launch.errors(out, lse, wanted)
    ok = worst <= TOLERANCE and worst_lse <= LSE_TOLERANCES[inputs.case.dtype] and not odd
    detail = f"error {worst:.1e}, LSE {worst_lse:.1e}, {pieces} pieces"
    expect(name, ok, f"{detail}, {len(odd)} of {times} launches differ from the first")
    for i in odd:
        each, its_lse = launches[i]
        print(f"     launch {i}: {where(out != each, lse != its_lse, plan, rows)}", flush=True)
    return worst, worst_lse, pieces, len(odd), ok


def main() -> None:
    """Watch a child, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    watched.declare(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("check", "time"), help="one of the two parts")
    heads = sorted({f"{heads}x{rows}" for heads, rows, *_ in CHECKED})
    parser.add_argument("--cases", nargs="+", choices=heads, default=heads, metavar="HxROWS")
    parser.add_argument("--launches", type=int, default=4, help="of each batch that is checked")
    parser.add_argument("--apart", action="store_true", help="no launch before the last has ended")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    shapes = specialized_times.TIMED + specialized_times.DRAFTS
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="BxN[xHxROWS]")
    parser.add_argument("--budget", type=float, default=30, help="seconds: then no new shape")
    parser.add_argument("--csv", type=Path, default=Path("build/bench/check_specialized.csv"))
    times = Path("build/bench/specialized_times.csv")
    parser.add_argument("--times", type=Path, default=times)
    options = parser.parse_args()
    facts = watched.begin(__file__, options)
    if options.only != "time":
        wanted = [each for each in CHECKED if f"{each[0]}x{each[1]}" in options.cases]
        cases = cases_of(wanted, options.types)
        compile_ahead(compile_case, cases)
        rng = random.Random(options.seed)
        check(cases, rng, options.launches, facts, options.csv, options.apart)
    if options.only != "check":
        shape_of = specialized_times.shape_of
        shapes = [shape_of(text, dtype) for text in options.shapes for dtype in options.types]
        compile_ahead(specialized_times.compile_shape, shapes)
        rounds, budget = options.rounds, options.budget
        specialized_times.measure_all(shapes, rounds, budget, facts, options.times)
    finish()


if __name__ == "__main__":
    main()
