#!/usr/bin/env python3
"""Measure launch plans on this GPU and write its file of mla_fusion/kernels/gpus/.

    python benchmarks/tune_dispatch.py --csv benchmarks/results/tune.csv --tables FOLDER

Rows of other widths stay. For every shape a first round measures tile shapes, a second one varies
the rest of the best plan. A plan whose output does not agree with the reference is never chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import multiprocessing
import operator
from collections.abc import Iterable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
import triton

from mla_fusion import gpu
from mla_fusion.cli.calibrate.tables import text
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.measure import records, region_cases, timing
from mla_fusion.runtime.measured import file_name

TOKENS = (1, 8, 32, 64, 128, 256, 512)
HEADS = (8, 16, 32, 64, 128)
# A plan measured at `TOKENS[i]` serves batches up to LIMITS[i].
LIMITS = (1, 16, 32, 64, 128, 256, 512)
COLUMNS = ["query", "tokens", "heads", "us", "equal", "worst_step", "plan"]


def tiles(tokens: int, heads: int, latent: int) -> Iterator[Plan]:
    """First round: product tiles for batches of `tokens`, and a few hundred rest programs."""
    rope_rows = min(128, max(16, triton.next_power_of_2(tokens * heads // 256)))
    cache_tokens = min(8, max(1, triton.next_power_of_2(tokens // 64)))
    rest = {"rope_rows": rope_rows, "cache_tokens": cache_tokens}
    if tokens == 1:
        for block_n, warps in itertools.product((32, 64, 128), (2, 4, 8)):
            yield Plan(block_m=1, block_n=block_n, num_warps=warps, **rest)
    many = (64, 128), (64, 128, 256)
    heights, widths = {
        1: ((16,), (32, 64)), 8: ((16,), (32, 64, 128)), 32: ((16, 32), (32, 64, 128)),
        64: ((32, 64), (64, 128)),
    }.get(tokens, many)  # fmt: skip
    every = itertools.product(heights, widths, (1, 2, 4, 8), (4, 8))
    for block_m, block_n, m_tiles, warps in every:
        programs = heads * -(-latent // block_n) * -(-tokens // (block_m * m_tiles))
        if block_m * (m_tiles - 1) >= tokens or not (64 if m_tiles > 1 else 1) <= programs <= 4096:
            continue
        least, most = (512, 16384) if warps == 4 else (2048, 2**15)
        if least <= block_m * block_n <= most:
            yield Plan(block_m=block_m, block_n=block_n, m_tiles=m_tiles, num_warps=warps, **rest)


def variations(best: Plan, tokens: int) -> Iterator[Plan]:
    """Second round: all but the product's tile, around the `best` one."""
    rests: list[dict[str, int]] = [{}]
    if tokens >= 32:
        rests += [
            {"rope_rows": min(256, 2 * best.rope_rows)},
            {"rope_rows": max(16, best.rope_rows // 2)},
            {"rope_rows": min(256, 2 * best.rope_rows), "num_warps": 12 - best.num_warps},
            {"cache_tokens": 2 * best.cache_tokens},
        ]
    for rest, last in itertools.product(rests, (False, True)):
        yield dataclasses.replace(best, **rest, rest_last=last)


def compile_plan(job: tuple[Plan, bool, Widths]) -> None:
    """Compile a plan into Triton's cache on disk; runs in a worker process."""
    plan, fp8, widths = job
    weights = region_cases.make_weights(16, 1, widths)
    region = region_cases.make_region(region_cases.timed(2, 16, fp8, widths), weights)
    try:
        provider.fused_mla_decode_prep(region.calls[0], plan=plan)
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        print(f"{plan}: {error}", flush=True)


def measure(
    region: region_cases.Region, plans: Iterable[Plan], rounds: int
) -> list[tuple[Plan, float, float, int]]:
    """Median microseconds, share of elements equal to the reference, and worst step, per plan."""

    def build(plan: Plan) -> tuple[timing.Call, tuple[float, int]]:
        layer = functools.partial(provider.fused_mla_decode_prep, plan=plan)
        return lambda i: layer(region.calls[i]), region_cases.agreement(region, layer)

    found = timing.compare(plans, build, len(region.calls), rounds)
    return [(plan, times["p50_us"], *check) for plan, check, times in found]


def row(query: str, widths: Widths, heads: int, tokens: int, plan: Plan) -> list[Any]:
    """A row of the file: `plan` serves batches of up to `tokens`."""
    kind = "fp8" if query == "fp8" else "activation"
    return [kind, *widths, heads, tokens, *dataclasses.astuple(plan)]


def changed(plan: Plan) -> dict[str, Any]:
    """The fields of `plan` that differ from the defaults."""
    default = dataclasses.asdict(Plan())
    fields = dataclasses.asdict(plan).items()
    return {name: value for name, value in fields if value != default[name]}


def write_table(folder: Path, gpu: str, arch: str, plans: list[list[Any]]) -> None:
    """Write a GPU's file: these rows, after those that it has for other widths."""
    path = folder / file_name(gpu)
    old = json.loads(path.read_bytes())["plans"] if path.exists() else []
    new = {tuple(line[1:4]) for line in plans}
    kept = [line for line in old if tuple(line[1:4]) not in new]
    path.write_text(text({"gpu": gpu, "arch": arch, "plans": kept + plans}))


def regions(
    options: argparse.Namespace, widths: Widths, pool: Pool
) -> Iterator[region_cases.Region]:
    """Of each shape, the plans of its first round compiled."""
    for fp8 in (query == "fp8" for query in options.queries):
        shapes = itertools.product(options.tokens, options.heads)
        known = {plan for shape in shapes for plan in tiles(*shape, widths.latent)}
        pool.map(compile_plan, [(plan, fp8, widths) for plan in sorted(known, key=str)], 1)
        for heads in options.heads:
            weights = region_cases.make_weights(heads, options.layers, widths)
            for tokens in options.tokens:
                case = region_cases.timed(tokens, heads, fp8, widths)
                yield region_cases.make_region(case, weights)


def tune(
    region: region_cases.Region, rounds: int, pool: Pool
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The row of a shape for the GPU's file, and those of its measurements."""
    case, kind = region.case, "fp8" if region.case.fp8 else "bf16"
    results = measure(region, tiles(case.tokens, case.heads, case.latent), rounds)
    plans = set(variations(right(results)[0][0], case.tokens))
    pool.map(compile_plan, [(plan, case.fp8, case.widths) for plan in plans], 1)
    results += measure(region, plans, rounds)
    plan, us, equal, worst = right(results)[0]
    bad = len(results) - len(right(results))
    shape = f"{kind} T={case.tokens:4d} H={case.heads:4d}"
    found = f"{changed(plan)} equal {equal:.6f} worst {worst}"
    print(f"{shape} best {us:7.2f} bad {bad} {found}", flush=True)
    limit = LIMITS[TOKENS.index(case.tokens)] if case.tokens in TOKENS else case.tokens
    return row(kind, case.widths, case.heads, limit, plan), [
        {"query": kind, "tokens": case.tokens, "heads": case.heads, "us": f"{us:.3f}",
         "equal": f"{equal:.6f}", "worst_step": worst, "plan": changed(plan)}
        for plan, us, equal, worst in results
    ]  # fmt: skip


def right(results: list[tuple[Plan, float, float, int]]) -> list[tuple[Plan, float, float, int]]:
    """Those that agree with the reference, the fastest first."""
    return sorted((r for r in results if r[2] >= 0.999 and r[3] <= 1), key=operator.itemgetter(1))


def main() -> None:
    """Tune every shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    for name, field in region_cases.FIELDS.items():
        default = getattr(region_cases.DEEPSEEK, name)
        parser.add_argument(f"--{name}", type=int, default=default, help=field)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--queries", nargs="+", default=("fp8", "bf16"))
    parser.add_argument("--csv", type=Path, required=True, help="every measurement")
    parser.add_argument("--tables", type=Path, help="the folder of the GPUs' files")
    options = parser.parse_args()
    widths = Widths(options.nope, options.rope, options.latent)
    facts, plans = records.environment(program="benchmarks/tune_dispatch.py"), []
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:

        def rows(region: region_cases.Region) -> list[dict[str, Any]]:
            plan, measured = tune(region, options.rounds, pool)
            plans.append(plan)
            return measured

        records.table(options.csv, facts, COLUMNS, regions(options, widths, pool), rows)
    if options.tables:
        write_table(options.tables, facts["gpu"], gpu.of("cuda").arch, plans)


if __name__ == "__main__":
    main()
