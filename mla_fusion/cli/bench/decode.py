"""`mla-fusion bench decode`: the portable persistent decode against what vLLM would run.

Calls are on distinct caches, so that the L2 cache does not hold what an engine would have to fetch;
results are checked against float64 attention. The column `vllm_default` marks what vLLM chooses on
Hopper. With `--values` a call is decode and product with a W_UV of its own, and the column `values`
has its columns for a head; 0 marks the decode alone.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mla_fusion.cli.bench import decode_peers as peers
from mla_fusion.cli.bench import kit
from mla_fusion.cli.bench.decode_peers import Candidate, Case
from mla_fusion.cli.bench.kit import TIMES, Ceilings, Row, compile_ahead

STEP, LAYER = ["batch", "context", "ragged"], ["heads", "queries", "dtype"]
CASE = [*STEP, *LAYER, "latent", "rope", "page", "values"]
RESULT = ["candidate", "vllm_default", *TIMES, "gbps", "tflops", "error"]
OURS = "ours"
MOST_TOKENS = 2**24  # of a step: an H200 holds so many of 14 layers with 576 bytes a token
TYPES = {"bf16": peers.BF16, "fp8": peers.FP8}
DEFAULTS = {
    "batches": (1, 4, 16, 64, 128), "contexts": (1024, 8192, 65536), "heads": (16, 128),
    "queries": (1,), "rope": 64, "latent": 512, "page": peers.PAGE, "values": 0,
    "max_split_per_batch": -1, "rounds": 7, "bf16": False, "fp8": False,
}  # fmt: skip


def run(settings: argparse.Namespace, facts: Mapping[str, str], _: Ceilings) -> bool:
    """Measure the grid and print the summary; whether ours passed the check in every shape."""
    types = [name for name in TYPES if getattr(settings, name)] or list(TYPES)
    of_types = {TYPES[name]: peers.CANDIDATES[TYPES[name]] for name in types}
    if (cap := settings.max_split_per_batch) > 0:
        capped = functools.partial(peers.ours, cap=cap)
        of_types = {dtype: offered | {OURS: capped} for dtype, offered in of_types.items()}
    names = kit.pick(settings.peers, dict.fromkeys(itertools.chain(*of_types.values())))
    work = [
        (case, {name: build for name, build in of_types[case.dtype].items() if name in names})
        for case in grid(settings, list(of_types))
    ]
    if OURS in names:
        compile_ours(case for case, _ in work)
    torch.manual_seed(0)

    def of(shape: tuple[Case, Mapping[str, Candidate]]) -> list[Row]:
        return measure(*shape, settings.rounds)

    rows = kit.table(settings.csv, facts, CASE + RESULT, work, of, kit.four_digits)
    summary(rows)
    timed = "decode and product" if settings.values else "decode"
    print(f"microseconds per {timed}; ! marks a failed check. Rows: {settings.csv}")
    passed = sum(row["candidate"] == OURS and is_right(row) for row in rows)
    return passed == sum(OURS in candidates for _, candidates in work)


def compile_ours(cases: Iterable[Case]) -> None:
    """Compile ours for each layer, in several processes."""
    alike: dict[tuple[str, int], dict[int, Case]] = {}
    for case in cases:
        alike.setdefault((case.name, case.values), {}).setdefault(case.batch, case)
    compile_ahead(peers.launch_ours, [[*batches.values()] for batches in alike.values()])


def grid(settings: argparse.Namespace, types: Iterable[torch.dtype]) -> list[Case]:
    """Every shape that a step may have, and ragged forms of those that are neither few sequences
    nor many."""
    layers = itertools.product(types, settings.heads, settings.queries)
    shared = {name: getattr(settings, name) for name in ("page", "latent", "rope", "values")}
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


def measure(case: Case, candidates: Mapping[str, Candidate], rounds: int) -> list[Row]:
    """Rows of one case, and a line."""
    shape = f"{case.batch:4d} x {case.context:6d}{' ragged' if case.ragged else ''} {case.name}"
    try:
        inputs = peers.make(case)
    except torch.OutOfMemoryError as problem:
        print(f"{shape}: nothing, OutOfMemoryError {str(problem)[:300]}", flush=True)
        return []
    default = peers.VLLM_DEFAULT[case.dtype] if (case.latent, case.rope) == (512, 64) else ""
    known = {name: getattr(case, name) for name in CASE}
    known |= {"ragged": int(case.ragged), "dtype": case.kind}
    rows, times = [], []
    for name, error, samples in kit.compare(
        candidates, lambda name: peers.prepare(inputs, candidates[name]), len(inputs.caches), rounds
    ):
        row = known | {"candidate": name, "vllm_default": int(name == default)}
        rows.append(row := row | kit.rates(case, samples) | {"error": error})
        mark = "" if is_right(row) else "!"
        rate = f"({row['gbps']:.0f} GB/s, {row['tflops']:.0f} TF)"
        times.append(f"{name} {row['p50_us']:.1f} {rate}{mark}")
    print(f"{shape}: {' | '.join(times) or 'nothing'}", flush=True)
    return rows


def is_right(row: Row) -> bool:
    """Whether a row passed its check; NaN did not."""
    return bool(row["error"] <= peers.TOLERANCE)


def summary(rows: list[Row]) -> None:
    """Geometric means against each peer, the shapes in which it is faster, and who was wrong."""
    layers: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, float]]] = {}
    for row in rows:
        layer, shape = (tuple(row[key] for key in keys) for keys in (LAYER, STEP))
        us = layers.setdefault(layer, {}).setdefault(shape, {})
        us[row["candidate"]] = row["p50_us"]
    for (heads, queries, dtype), shapes in layers.items():
        name = peers.Case(0, 0, heads, TYPES[dtype], queries=queries).name
        for peer in dict.fromkeys(each for us in shapes.values() for each in us):
            ratios = {
                shape: us[peer] / us[OURS]
                for shape, us in shapes.items()
                if peer != OURS and us.keys() >= {peer, OURS}
            }
            if not ratios:
                continue
            mean, least = statistics.geometric_mean(ratios.values()), min(ratios.values())
            faster = {k: round(ratio, 2) for k, ratio in ratios.items() if ratio < 1}
            print(
                f"{name} against {peer}: geometric mean {mean:.2f}x of {len(ratios)}, least "
                f"{least:.2f}x; that one is faster at (batch, context, ragged) {faster or 'none'}"
            )
    wrong = [row["candidate"] for row in rows if not is_right(row)]
    for name in dict.fromkeys(wrong):
        most = kit.worst([row["error"] for row in rows if row["candidate"] == name])
        shapes_off = f"by more than {peers.TOLERANCE} in {wrong.count(name)} shapes"
        print(f"{name} is off {shapes_off}, by {most:.2g} at most")
