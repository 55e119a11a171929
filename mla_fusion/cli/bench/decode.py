"""`mla-fusion bench decode`: the portable persistent decode against what vLLM would run.

Calls are on distinct caches, so that the L2 cache does not hold what an engine would have to fetch;
results are checked against float64 attention. The column `vllm_default` marks what vLLM chooses on
Hopper. `of_read` is the time over that of a plain read of the same cache, in the same turns. With
`--values` a call is decode and product with a W_UV of its own, and the column `values` has its
columns for a head; 0 marks the decode alone."""

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from mla_fusion.cli.bench import pick
from mla_fusion.measure import decode_peers as peers
from mla_fusion.measure import distances, records, timing
from mla_fusion.measure.decode_peers import Case
from mla_fusion.measure.records import Row
from mla_fusion.measure.timing import TIMES, Ceilings

STEP, LAYER = ["batch", "context", "ragged"], ["heads", "queries", "dtype"]
CASE = [*STEP, *LAYER, "latent", "rope", "page", "values", "chunks"]
RESULT = ["candidate", "vllm_default", *TIMES, "gbps", "of_read", "tflops", "error"]
OURS, READ = "ours", "read"
MOST_TOKENS = 2**24  # of a step: those that an H200 holds, with 14 layers of 576 bytes a token
TYPES = {"bf16": peers.BF16, "fp8": peers.FP8}
DEFAULTS = {
    "batches": (1, 4, 16, 64, 128), "contexts": (1024, 8192, 65536), "heads": (16, 128),
    "queries": (1,), "rope": 64, "latent": 512, "page": peers.PAGE, "values": 0,
    "max_split_per_batch": -1, "chunks": (), "rounds": 7, "bf16": False, "fp8": False, "peers": (),
}  # fmt: skip


def run(settings: argparse.Namespace, facts: Mapping[str, str], _: Ceilings) -> bool:
    """Measure the grid and print the summary; whether ours passed the check in every shape."""
    types = [TYPES[name] for name in TYPES if getattr(settings, name)] or [*TYPES.values()]
    offered = itertools.chain(*(peers.CANDIDATES[dtype] for dtype in types))
    names = pick(settings.peers, dict.fromkeys(offered))
    cases = grid(settings, types)
    if OURS in names:
        compile_ours(cases)
    torch.manual_seed(0)

    rows = functools.partial(measure, names=names, rounds=settings.rounds)
    found = records.table(settings.csv, facts, CASE + RESULT, cases, rows)
    summary(found)
    timed = "decode and product" if settings.values else "decode"
    print(f"microseconds per {timed}; ! marks a failed check. Rows: {settings.csv}")
    passed = sum(row["candidate"] == OURS and is_right(row) for row in found)
    return passed == (len(cases) if OURS in names else 0)


def compile_ours(cases: Iterable[Case]) -> None:
    """Compile ours for each layer, on every core; the benchmark itself compiles what fails here."""
    alike: dict[tuple[str, int], dict[int, Case]] = {}
    for case in cases:
        alike.setdefault((case.name, case.values), {}).setdefault(case.batch, case)
    if len(alike) < 2:
        return
    start, workers = time.monotonic(), min(len(alike), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(peers.launch_ours, [*batches.values()]) for batches in alike.values()]
        for done in as_completed(jobs):
            problem = done.exception()
            failed = f"not compiled ahead: {type(problem).__name__} {problem}"[:300]
            text = failed if problem else f"{done.result()} compiled"
            print(f"{text}, {time.monotonic() - start:.0f} s", flush=True)


def grid(settings: argparse.Namespace, types: Iterable[torch.dtype]) -> list[Case]:
    """All cases of the settings. Batches of 16 to 64 sequences have ragged lengths too."""
    layers = itertools.product(types, settings.heads, settings.queries)
    names = "page", "latent", "rope", "values", "max_split_per_batch"
    shared = {name: getattr(settings, name) for name in names}
    shared["chunks"] = tuple(settings.chunks)
    steps = [*itertools.product(settings.batches, settings.contexts)]
    if large := [f"{b} x {n}" for b, n in steps if b * n > MOST_TOKENS]:
        print(f"left out, more than {MOST_TOKENS} tokens: {', '.join(large)}")
    cases = [
        peers.Case(batch, context, heads, dtype, queries=queries, **shared)
        for dtype, heads, queries in layers
        for batch, context in steps
        if batch * context <= MOST_TOKENS
    ]
    return cases + [dataclasses.replace(c, ragged=True) for c in cases if 16 <= c.batch <= 64]


def measure(case: Case, names: Collection[str], rounds: int) -> list[Row]:
    """Rows of one case, and a line; names: of `CANDIDATES`."""
    from mla_fusion.cli.bench.read_kernel import read_call

    shape = f"{case.batch:4d} x {case.context:6d}{' ragged' if case.ragged else ''} {case.name}"
    try:
        inputs = peers.make(case)
    except torch.OutOfMemoryError as problem:
        print(f"{shape}: nothing, OutOfMemoryError {str(problem)[:300]}", flush=True)
        return []
    default = peers.vllm_default(case)
    known = dataclasses.asdict(case) | {"ragged": int(case.ragged), "dtype": case.kind}
    known["chunks"] = " ".join(map(str, case.chunks))
    candidates = {n: each for n, each in peers.CANDIDATES[case.dtype].items() if n in names}
    rows, told, work = [], [], (case.bytes(), case.flops())

    def build(name: str) -> tuple[timing.Call, float]:
        if name == READ:
            return read_call(inputs.caches)[0], 0.0
        return peers.build(inputs, candidates[name])

    (_, _, read), *timed = timing.compare((READ, *candidates), build, len(inputs.caches), rounds)
    for name, error, times in timed:
        row = known | timing.rates(*work, times) | {"candidate": name, "error": error}
        row["of_read"] = times["p50_us"] / read["p50_us"]
        rows.append(row | {"vllm_default": int(name == default)})
        mark = "" if is_right(row) else "!"
        rate = f"({row['gbps']:.0f} GB/s, {row['of_read']:.2f} of a read, {row['tflops']:.0f} TF)"
        told.append(f"{name} {row['p50_us']:.1f} {rate}{mark}")
    print(f"{shape}: {' | '.join(told) or 'nothing'}", flush=True)
    return rows


def is_right(row: Row) -> bool:
    """True if a row passed its check; NaN did not."""
    return bool(row["error"] <= peers.TOLERANCE)


def summary(rows: list[Row]) -> None:
    """Geometric means against each peer, the shapes in which it is faster, and who was wrong."""
    ratios: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
    for (heads, queries, dtype, *step), us in records.medians(rows, [*LAYER, *STEP]).items():
        layer = Case(0, 0, heads, TYPES[dtype], queries=queries).name
        for peer in us if OURS in us else ():
            if peer != OURS:
                ratios.setdefault((layer, peer), {})[tuple(step)] = us[peer] / us[OURS]
    for (layer, peer), found in ratios.items():
        mean, least = statistics.geometric_mean(found.values()), min(found.values())
        faster = {step: round(ratio, 2) for step, ratio in found.items() if ratio < 1}
        print(
            f"{layer} against {peer}: geometric mean {mean:.2f}x of {len(found)}, least "
            f"{least:.2f}x; that one is faster at (batch, context, ragged) {faster or 'none'}"
        )
    for name in dict.fromkeys(row["candidate"] for row in rows if not is_right(row)):
        errors = [r["error"] for r in rows if r["candidate"] == name and not is_right(r)]
        off = f"by more than {peers.TOLERANCE} in {len(errors)} shapes"
        print(f"{name} is off {off}, by {distances.worst(errors):.2g} at most")
