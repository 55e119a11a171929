#!/usr/bin/env python3
"""Measure launch plans on this GPU and write its file of mla_fusion/kernels/gpus/.

    python benchmarks/tune_dispatch.py --csv benchmarks/results/tune.csv --tables FOLDER

Rows of other widths that the file has stay.
For every shape a first round measures tile shapes, a second one varies the rest of the best plan.
A plan whose output does not agree with the reference is counted as bad and never chosen.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mla_fusion.cli.bench import kit, region_cases
from mla_fusion.cli.calibrate.tables import text
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.runtime.measured import file_name

TOKENS = (1, 8, 32, 64, 128, 256, 512)
HEADS = (8, 16, 32, 64, 128)
# A plan measured at `TOKENS[i]` serves batches up to LIMITS[i].
LIMITS = (1, 16, 32, 64, 128, 256, 512)


def power_of_two(size: int, low: int, high: int) -> int:
    """The power of two at or above `size`, between `low` and `high`."""
    return min(high, max(low, 1 << max(0, size - 1).bit_length()))


def rest_tiles(tokens: int, heads: int) -> dict[str, int]:
    """Rest programs for the first round: a few hundred of them at most."""
    return {
        "rope_rows": power_of_two(tokens * heads // 256, 16, 128),
        "cache_tokens": power_of_two(tokens // 64, 1, 8),
    }


def tiles(tokens: int, heads: int, latent: int) -> Iterator[Plan]:
    """First round: product tiles for batches of `tokens`."""
    rest = rest_tiles(tokens, heads)
    if tokens == 1:
        for block_n, warps in itertools.product((32, 64, 128), (2, 4, 8)):
            yield Plan(block_m=1, block_n=block_n, num_warps=warps, **rest)
    heights = {1: (16,), 8: (16,), 32: (16, 32), 64: (32, 64)}.get(tokens, (64, 128))
    widths = {1: (32, 64), 8: (32, 64, 128), 32: (32, 64, 128), 64: (64, 128)}.get(
        tokens, (64, 128, 256)
    )
    for block_m, block_n, m_tiles, warps in itertools.product(
        heights, widths, (1, 2, 4, 8), (4, 8)
    ):
        programs = heads * -(-latent // block_n) * -(-tokens // (block_m * m_tiles))
        too_few = programs < 64 and m_tiles > 1
        if block_m * (m_tiles - 1) >= tokens or too_few or block_m * block_n < 512:
            continue
        if (warps == 8 and block_m * block_n < 2048) or (warps == 4 and block_m * block_n > 16384):
            continue
        if programs > 4096:
            continue
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
    region = region_cases.make_region(
        region_cases.timed(2, 16, fp8, widths), region_cases.make_weights(16, 1, widths)
    )
    try:
        layer = functools.partial(provider.fused_mla_decode_prep, plan=plan)
        layer(region.calls[0])
        torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        print(f"{plan}: {error}", flush=True)


def measure(
    region: region_cases.Region, plans: list[Plan], rounds: int
) -> Iterator[tuple[Plan, float, float, int]]:
    """Median microseconds, share of elements equal to the reference, and worst step, per plan."""
    graphs, checks = {}, {}
    for plan in plans:
        layer = functools.partial(provider.fused_mla_decode_prep, plan=plan)
        try:
            checks[plan] = region_cases.agreement(region, layer)
            graphs[plan] = region_cases.capture(region, layer)
        except (RuntimeError, ValueError) as error:
            print(f"{region.case} {plan}: {type(error).__name__} {str(error)[:200]}", flush=True)
    times = kit.interleave(graphs, len(region.calls), rounds)  # type: ignore[arg-type]
    for plan, samples in times.items():
        yield plan, statistics.median(samples), *checks[plan]  # type: ignore[index, misc]


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
    parser.add_argument("--seconds", type=float, default=480, help="stop after this long")
    parser.add_argument("--csv", type=Path, required=True, help="every measurement")
    parser.add_argument("--tables", type=Path, help="the folder of the GPUs' files")
    options = parser.parse_args()
    widths = Widths(options.nope, options.rope, options.latent)
    started = time.monotonic()
    pool = multiprocessing.get_context("spawn").Pool(options.workers)
    name = torch.cuda.get_device_name()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    table: list[list[Any]] = []
    fields = ["query", "tokens", "heads", "us", "equal", "worst_step", "plan"]
    with options.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        for query in options.queries:
            fp8 = query == "fp8"
            shapes = itertools.product(options.tokens, options.heads)
            known = {plan for shape in shapes for plan in tiles(*shape, widths.latent)}
            jobs = [(plan, fp8, widths) for plan in sorted(known, key=str)]
            pool.map(compile_plan, jobs, chunksize=1)
            print(f"{query}: {len(known)} plans, {time.monotonic() - started:.0f} s", flush=True)
            for heads in options.heads:
                weights = region_cases.make_weights(heads, options.layers, widths)
                for tokens in options.tokens:
                    if time.monotonic() - started > options.seconds:
                        print("out of time")
                        sys.exit(1)
                    case = region_cases.timed(tokens, heads, fp8, widths)
                    region = region_cases.make_region(case, weights)
                    first = list(tiles(tokens, heads, widths.latent))
                    results = list(measure(region, first, options.rounds))
                    good = [r for r in results if r[2] >= 0.999 and r[3] <= 1]
                    one = min(good, key=lambda r: r[1])
                    plans = sorted(set(variations(one[0], tokens)), key=str)
                    pool.map(compile_plan, [(p, fp8, widths) for p in plans], chunksize=1)
                    more = list(measure(region, plans, options.rounds))
                    results += more
                    good += [r for r in more if r[2] >= 0.999 and r[3] <= 1]
                    best = min(good, key=lambda r: r[1])
                    limit = LIMITS[TOKENS.index(tokens)] if tokens in TOKENS else tokens
                    table.append(row(query, widths, heads, limit, best[0]))
                    print(
                        f"{query} T={tokens:4d} H={heads:4d} best {best[1]:7.2f} "
                        f"bad {len(results) - len(good)} {changed(best[0])} "
                        f"equal {best[2]:.6f} worst {best[3]}",
                        flush=True,
                    )
                    for plan, us, equal, worst in results:
                        values = f"{us:.3f}", f"{equal:.6f}", worst, changed(plan)
                        writer.writerow([query, tokens, heads, *values])
                    file.flush()
                    del region
                    torch.cuda.empty_cache()
    if options.tables:
        write_table(options.tables, name, arch, table)
    print(f"done in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
