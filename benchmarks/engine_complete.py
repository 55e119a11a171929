"""`complete` and `short` of `benchmarks/engine.py`: steps of whole models, the arms in turns.

All engines of a model and a cache type start side by side and keep their requests; at each point
(batch and context) five rounds measure every arm once, in rotated order, while the others wait.
Weights that do not fit are one copy, shared by CUDA IPC. Points whose KV caches do not fit are left
out. With --layers engines start sooner, and more points fit.

The arms are `default` and `auto`, the flag alone, unless `--arms` names others: `default2`, whose
distance from `default` is the noise, `fused`, `portable`, and the unfused `cat`, `native` (see
engine.py) and `stored`, which is `cat` with the flag's setting of Inductor (docs/flags.md).

`short` has steps with a prompt of 16 to 128 tokens: alone, behind a cached prefix, beside decodes.

Rows: the median, least and most of the rounds, each the median of 20 steps on the GPU (the CUDA
graph of the forward pass, or the whole step of a prefill, batch 0, or with drafts of MTP) and their
mean by the clock, in microseconds; changes of the median are percent of `default`'s. With --tp and
--dp each rank's graph has its time, `gpu1` of the second, in which it also waits for the others; of
steps with drafts and --tp only the clock is read. The verdict of `engine_compare` on 12 prompts
that every arm continues is in its rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import engine_compare
import engine_model
import torch
from engine_compare import layers_of
from engine_jobs import ENDS, Engine, devices, finish, job, ready, start_ranks
from engine_worker import HELD

if TYPE_CHECKING:
    import argparse

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
}
ARMS = "default,auto"
BLOCK = 64  # tokens of a KV cache block
ENGINE_BYTES = 5e9  # of an engine beside weights and KV cache: context, activations, graphs
ENOUGH = 10e9  # bytes of KV cache for which engines keep weights of their own


class Model(NamedTuple):
    """What one run measures.

    layers: as many as fit, twice while an engine loads. gigabytes: weights of a rank of its own
    (`-tp` in the name), or of the whole model.
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
    "deepseek-r1-deep": Model(61, 17),
    "r1-dp": Model(16, 8.5),
}


class EngineEnded(Exception):
    """An engine ended before its turn; holds the arm and the rank."""


def complete(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Measure the models and cache types that `args.only` names; (rows, how many went wrong)."""
    rows, wrong, end = [], 0, time.time() + args.seconds
    for name, model in MODELS.items():
        for cache in ("fp8", "auto"):
            title = f"{name} {'bf16' if cache == 'auto' else cache}"
            if any(part in title for part in args.only.split(",")):
                new, right = measured(title, name, model.cut(args.layers), cache, args, end)
                rows += new
                wrong += not right
    return rows, wrong


def measured(
    title: str, name: str, model: Model, cache: str, args: argparse.Namespace, end: float
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of one model with one cache type; whether all was right."""
    arms = (args.arms or ARMS).split(",")
    room, shared = memory(name, model, args.tp, len(arms))
    per_token = (model.layers + bool(args.drafts)) * 576 * (2 if cache == "auto" else 1)
    rows = 1 + args.drafts
    sizes = {point: point.tokens(rows) * per_token for point in POINTS[args.what]}
    for point, size in sizes.items():
        if size > room:
            needs = f"its KV cache needs {size / 1e9:.1f} GB, room is {room / 1e9:.1f}"
            print(f"   {title}, {point} left out: {needs}")
    if not (points := [point for point, size in sizes.items() if size <= room]):
        return [], False
    changes = {
        "what": "complete", "model": name, "layers": model.layers, "cache": cache,
        "tp": args.tp, "dp": args.dp, "dcp": args.dcp, "device": devices(0, args.tp * args.dp),
        "seqs": 128, "capture": [n * rows for n in (1, 8, 32, 128)], "drafts": args.drafts,
        "prefix_caching": args.what == "short", "max_len": 20480, "max_tokens": 8192,
        "cache_bytes": max(map(sizes.get, points)),
        "shared_weights": f"{tempfile.mkdtemp()}/weights" if shared else "",
    }  # fmt: skip
    began, engines = time.time(), {arm: start_ranks(job(arm=arm, **changes)) for arm in arms}
    results = ready(engines, end)
    shape = engine_model.MODELS[name]
    layers = model.layers + bool(args.drafts)  # the drafter's too
    verdicts = {arm: verdict(arm, results, layers, shape) for arm in results}
    print(f"== {title}, ready after {time.time() - began:.0f} s: {verdicts}", flush=True)
    known = {"model": name, "layers": model.layers, "cache": cache, "gpus": args.tp * args.dp}
    known |= {
        n: getattr(args, n) for n in ("drafts", "dp", "dcp") if getattr(args, n) not in (0, 1)
    }
    told = {arm: {**known, **facts(results[arm]), "verdict": verdicts[arm]} for arm in results}
    rows, none_failed = timed(title, engines, points, told, end)
    wrong = any(found.startswith("WRONG") for found in verdicts.values())
    return rows, none_failed and len(results) == len(arms) and not wrong


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
    """The columns of what an engine is: model runner, attention, layers of the decode bucket."""
    layers, fused, _ = layers_of(result) if "ranges" in result else ("", "", "")
    names = ("runner", "attention")
    return {n: result[n] for n in names} | {"bucket_layers": layers, "bucket_fused": fused}


def memory(name: str, model: Model, tp: int, engines: int) -> tuple[float, bool]:
    """(bytes for the KV cache of each engine, whether the engines must share their weights)."""
    total = 0.94 * torch.cuda.get_device_properties(0).total_memory - engines * ENGINE_BYTES
    weights = model.gigabytes * 1e9 / (1 if engine_model.is_rank(name) else tp)
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
