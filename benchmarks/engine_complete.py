"""`complete` and `short` of `benchmarks/engine.py`: steps of whole models, the arms in turns.

All engines of a model and a cache type start side by side and keep their requests; at each point
(batch and context) five rounds measure every arm once, in rotated order, while the others wait.
Weights that do not fit are one copy, shared by CUDA IPC. Points whose KV caches do not fit are left
out. With --layers engines start sooner, and more points fit.

The arms are `default` and `auto`, the flag alone, unless `--arms` names others: `default2`, whose
distance from `default` is the noise, `fused`, `portable`, and the unfused `cat`, `native` (see
engine.py) and `stored`, which is `cat` with the flag's setting of Inductor (docs/flags.md).

`short` has steps with a prompt of 16 to 128 tokens: alone, behind a cached prefix, beside decodes;
engines capture vLLM's own list of sizes.

Rows: the median, least and most of the rounds, each the median of 20 steps on the GPU (the CUDA
graph of the forward pass, or the whole step of a prefill, batch 0, with drafts of MTP, or with
--graphs PIECEWISE or NONE) and their mean by the clock, in microseconds; changes of the median are
percent of `default`'s. The verdict of `engine_compare` on 12 prompts that every arm continues is in
its rows.

With several GPUs the engines of as many cases as fit start side by side. Each rank's graph has its
time, `gpu1` of the second, in which it also waits for the others; with a draft that of two graphs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import engine_compare
import engine_model
import torch
from engine_compare import layers_of
from engine_jobs import ENDS, Engine, devices, finish, is_asked, job, ready, start_ranks
from engine_worker import HELD

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ROUNDS = 5


class Point(NamedTuple):
    """A step: `batch` requests of `context` tokens decode, and a prompt of `prompt` tokens is
    prefilled behind `prefix` ones that are in the cache."""

    batch: int
    context: int
    prompt: int = 0
    prefix: int = 0

    def tokens(self, rows: int) -> int:
        """Tokens of the KV cache; without decodes those of `verdict` are the most."""
        prompt = self.prompt + self.prefix + BLOCK if self.prompt else 0
        return (self.batch or 32) * (self.context + rows * HELD + BLOCK) + 40 * prompt


POINTS = {
    "complete": [Point(0, 0, 2048)]
    + [Point(batch, context) for context in (1024, 16384) for batch in (1, 8, 32, 128)],
    "short": [
        Point(batch, 1024 if batch else 0, prompt, prefix)
        for batch, prefix in ((0, 0), (0, 4096), (1, 0), (8, 0), (32, 0))
        for prompt in (16, 64, 128)
    ],
    "ranks": [Point(batch, 1024) for batch in (1, 8, 32, 128)],
}
ARMS = "default,auto"
BLOCK = 64  # tokens of a KV cache block
ENGINE_BYTES = 5e9  # of an engine beside weights and KV cache: context, activations, graphs
START = 0.7  # of the time that is left: by then engines are ready, or are ended
ENOUGH = 10e9  # bytes of KV cache for which engines keep weights of their own


class Model(NamedTuple):
    """What one run measures.

    layers: as many as fit, twice while an engine loads. gigabytes: weights of one rank
    (`engine_model.is_rank`), or of the whole model.
    """

    layers: int
    gigabytes: float

    def cut(self, most: int) -> Model:
        """The model with at most so many layers; all of its own if 0."""
        layers = min(self.layers, most or self.layers)
        return Model(layers, self.gigabytes * layers / self.layers)


MODELS = {
    "deepseek-v2-lite": Model(27, 31.5),
    "glm-4.7-flash": Model(47, 60),
    "deepseek-r1-tp8": Model(40, 54),
    "deepseek-r1-bf16": Model(20, 54),
    "deepseek-r1-deep": Model(61, 17),
    "r1-dp": Model(16, 8.5),
}
# With several GPUs an engine: model, how its ranks divide the work, and layers; R1 also has drafts.
RANKS = {
    ("deepseek-v2-lite", "tp"): Model(27, 31.5), ("deepseek-v2-lite", "dp"): Model(27, 31.5),
    ("deepseek-r1-deep", "tp"): Model(24, 6.8), ("r1-ep", "dp"): Model(12, 7),
    ("deepseek-r1-deep", "dcp"): Model(24, 6.8),
}  # fmt: skip


class EngineEnded(Exception):
    """An engine ended before its turn; holds the arm and the rank."""


class Case(NamedTuple):
    """The points that engines are compared at, their job, and bytes of one of them on a GPU."""

    title: str
    points: list[Point]
    job: dict[str, Any]
    bytes: float


def cases(args: argparse.Namespace, arms: int) -> Iterator[Case]:
    """The cases that `args.only` names, for so many engines, without points that do not fit."""
    n, short = args.gpus, args.what == "short"
    kinds = {"": {}, "tp": {"tp": n}, "dp": {"dp": n}, "dcp": {"tp": n, "dcp": n}}
    works = [(m, "", c, args.drafts) for c in ("fp8", "auto") for m in MODELS]
    if n > 1:
        works = [(*each, "fp8", d) for each in RANKS for d in (0, 1)[: 1 + ("r1" in each[0])]]
    for name, kind, cache, drafts in works:
        title = f"{name} {'bf16' if cache == 'auto' else cache}"
        if kind:
            title += f" mtp-{drafts}" * bool(drafts) + f" {kind}{n}"
        if not is_asked(title, args):
            continue
        model = (RANKS[name, kind] if kind else MODELS[name]).cut(args.layers)
        weights = model.gigabytes * 1e9 / (1 if engine_model.is_rank(name) else n)
        room, shared = (math.inf, False) if kind else memory(weights, arms)
        per_token = (model.layers + bool(drafts)) * 576 * (2 if cache == "auto" else 1)
        sizes = {
            p: p.tokens(1 + drafts) * per_token for p in POINTS["ranks" if kind else args.what]
        }
        for point, size in sizes.items():
            if size > room:
                needs = f"its KV cache needs {size / 1e9:.1f} GB, room is {room / 1e9:.1f}"
                print(f"   {title}, {point} left out: {needs}")
        points = [point for point, size in sizes.items() if size <= room]
        most = max((sizes[point] for point in points), default=0)
        changes = {
            "what": "complete", "model": name, "layers": model.layers, "cache": cache,
            "drafts": drafts, "device": devices(0, n), "seqs": 128, "max_len": 20480,
            "capture": [] if short else [b * (1 + drafts) for b in (1, 8, 32, 128)],
            "max_tokens": 2048 if kind else 8192,  # vLLM tries them: all heads of R1 take gigabytes
            # 256 of each prompt took 75 of the 190 s in which ten engines side by side got ready.
            "tokens": 64 if kind else 256,
            "prefix_caching": short, "cache_bytes": most,
            "multicast": args.multicast,
            "shared_weights": f"{tempfile.mkdtemp()}/weights" if shared else "", **kinds[kind],
            **({"cudagraph_mode": args.graphs} if args.graphs else {}),
        }  # fmt: skip
        yield Case(title, points, changes, ENGINE_BYTES + weights + most)


def complete(args: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Measure the cases that `args.only` names; yields the rows of each, and if it went wrong."""
    arms, end = (args.arms or ARMS).split(","), time.time() + args.seconds
    left = [*cases(args, len(arms))]
    while left and time.time() < end:
        taken = itertools.accumulate(len(arms) * case.bytes for case in left)
        count = max(1, sum(size < gpu_bytes() for size in taken)) if args.gpus > 1 else 1
        group, left, began = left[:count], left[count:], time.time()
        started = [
            {arm: start_ranks(job(arm=arm, **case.job)) for arm in arms if case.points}
            for case in group
        ]
        results = [ready(engines, began + START * (end - began)) for engines in started]
        print(f"   ready after {time.time() - began:.0f} s: {[case.title for case in group]}")
        for case, engines, told in zip(group, started, results, strict=True):
            rows, right = measured(case, args.gpus, engines, told, end)
            yield rows, not (right and len(told) == len(arms))


def measured(
    case: Case, gpus: int, engines: dict[str, list[Engine]], results: dict[str, dict[str, Any]],
    end: float,
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """Rows of the engines of a case that are ready; whether all was right."""
    asked, shape = case.job, engine_model.MODELS[case.job["model"]]
    layers = asked["layers"] + bool(asked["drafts"])  # the drafter's too
    verdicts = {arm: verdict(arm, results, layers, shape) for arm in results}
    print(f"== {case.title}: {verdicts}", flush=True)
    known = {n: asked[n] for n in ("model", "layers", "cache")} | {"gpus": gpus}
    known |= {n: asked[n] for n in ("drafts", "dp", "dcp", "multicast") if asked.get(n)}
    if "FULL" not in (mode := job(**asked)["cudagraph_mode"]):
        known["graphs"] = mode
    told = {arm: {**known, **facts(results[arm]), "verdict": verdicts[arm]} for arm in results}
    rows, none_failed = timed(case.title, engines, case.points, told, end)
    return rows, none_failed and not any(v.startswith("WRONG") for v in verdicts.values())


def timed(
    title: str, engines: dict[str, list[Engine]], points: list[Point],
    told: dict[str, dict[str, Any]], end: float,
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """Rows of the arms at each point, up to an engine's failure; whether none failed. Ends all.

    told: what the rows of an arm say beside its times.
    """
    rows: list[dict[str, Any]] = []
    right = True
    try:
        for point in points if engines else ():
            if time.time() > end:
                print(f"   {title}: no time for {point} (--seconds)")
                continue
            times = rounds(engines, point)
            print(f"   {title}, {point}: {times}", flush=True)
            rows += [{"arm": arm, **point._asdict(), **times[arm], **told[arm]} for arm in engines]
    except EngineEnded as ended:
        right, (arm, rank) = False, ended.args
        error = finish(*engines[arm].pop(rank), ENDS)["error"]
        print(f"== {title}, {arm}: FAILED\n{error}")
    for engine in [engine for ranks in engines.values() for engine in ranks]:
        finish(*engine, seconds=0)
    return rows, right


def facts(result: dict[str, Any]) -> dict[str, Any]:
    """The columns of what an engine is: runner, attention, all-reduce, layers of the bucket."""
    layers, fused, _ = layers_of(result) if "ranges" in result else ("", "", "")
    names = ("runner", "attention", "all_reduce")
    return {n: result[n] for n in names} | {"bucket_layers": layers, "bucket_fused": fused}


def gpu_bytes() -> float:
    """Bytes of a GPU that engines may take."""
    return 0.94 * torch.cuda.get_device_properties(0).total_memory


def memory(weights: float, engines: int) -> tuple[float, bool]:
    """(bytes for the KV cache of each engine, whether the engines must share their weights)."""
    total = gpu_bytes() - engines * ENGINE_BYTES
    alone, shared = total / engines - weights, (total - weights) / engines
    return (alone, False) if alone > ENOUGH else (shared, True)


def turn(engines: dict[str, list[Engine]], arm: str, line: str) -> dict[str, float]:
    """The answer of all ranks of an arm to one line: the clock of the first, each one's GPU."""
    for _, process in engines[arm]:
        with contextlib.suppress(BrokenPipeError):
            # Past the stream's buffer: a line left there raises again when `finish` closes it.
            os.write(process.stdin.fileno(), f"{line}\n".encode())
    times: dict[str, float] = {}
    for rank, (_, process) in enumerate(engines[arm]):
        if not (answer := process.stdout.readline()):
            raise EngineEnded(arm, rank)
        taken = json.loads(answer)
        times |= {f"gpu{rank}": taken["gpu"]} if rank and taken else taken
    return times


def rounds(engines: dict[str, list[Engine]], point: Point) -> dict[str, dict[str, float]]:
    """The columns of each arm's times at a point."""
    arms = list(engines)
    for arm in arms:
        turn(engines, arm, " ".join(map(str, ("hold", *point))))
    taken: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for number in range(ROUNDS):
        first = number % len(arms)
        for arm in arms[first:] + arms[:first]:
            taken[arm].append(turn(engines, arm, "time"))
    return {arm: columns(taken[arm], taken.get("default", [])) for arm in arms}


def columns(taken: list[dict[str, float]], default: list[dict[str, float]]) -> dict[str, float]:
    """Median, least and most by each clock, and the change of the median against `default`'s."""
    found = {}
    for clock in taken[0]:
        us = [round(each[clock], 1) for each in taken]
        median = statistics.median(us)
        found |= {f"{clock}_us": median, f"{clock}_min": min(us), f"{clock}_max": max(us)}
        if default:
            base = statistics.median(round(each[clock], 1) for each in default)
            found[f"{clock}_change"] = round(100 * (median / base - 1), 2)
    return found


def verdict(
    arm: str, results: dict[str, dict[str, Any]], layers: int, model: dict[str, Any]
) -> str:
    """What is wrong with the layers or the tokens of an arm, or "right".

    "not judged": an unfused arm, which is the measure, or none but `default` was run.
    """
    if "ranges" in results[arm] and layers_of(results[arm]) != (layers, layers, 0):
        return f"WRONG: not fused in every layer: {results[arm]['ranges']}"
    others = ("native",) if "quantization_config" in model else ("cat", "stored", "native")
    return engine_compare.judge(arm, others, results)
