#!/usr/bin/env python3
"""Sparse decode against vLLM's kernels on this GPU: a table, and a CSV file.

    python benchmarks/sparse.py --csv benchmarks/results/sparse.csv

Each shape is checked against float64 attention over the dequantized entries in the same run; the
candidates then take turns, each a CUDA graph of calls on distinct caches and lists of slots. Plans
and FlashMLA's metadata are made before, once a step. FlashMLA takes 64 or 128 heads.

Its calls are those of vLLM's layers (0.26 to 0.33, by their sources). Over `fp8_ds_mla` they pad
the query, and have all tokens as one sequence with fewer than 32 heads, else a sequence for each
token. Over `fp8_ds_mla_v4` each token has a window of 128 slots and `--topk` compressed ones, in
two caches, and a sink. Over bf16 the other is FlashAttention 3 with pages of one entry.

The column `vllm_default` marks vLLM's choice, `share` is `gbps` of the rate of a copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sparse_peers import CANDIDATES, LAYOUTS, TOPK, Case, Inputs, exact, make, vllm_default

from mla_fusion.measure import records, timing
from mla_fusion.measure.distances import distance
from mla_fusion.measure.timing import TIMES, rates

TOLERANCE = 1e-2  # FlashMLA rounds the keys to bf16
CHECKED = 8  # tokens
CASE = ["tokens", "heads", "topk", "context", "cache"]
RESULT = ["candidate", "vllm_default", *TIMES, "gbps", "share", "tflops", "error"]


def error(inputs: Inputs) -> float:
    """Relative distance of a few tokens' outputs on the last cache; NaN stays NaN."""
    count = len(inputs.out)
    tokens = torch.linspace(0, count - 1, min(CHECKED, count)).long()
    return distance(inputs.out[tokens], exact(inputs, tokens))


def measure(case: Case, rounds: int, copy_gbps: float) -> list[dict]:
    """Rows of one case, and a line; copy_gbps: the rate of a copy."""
    inputs, candidates = make(case), CANDIDATES[case.cache]

    def build(name: str) -> tuple[timing.Call, float]:
        call = candidates[name](inputs)
        inputs.out.fill_(torch.nan)
        call(-1)  # the last cache, and the sign for vLLM's kernels to keep their result
        return call, error(inputs)

    default, rows = vllm_default(case), []
    for name, off, times in timing.compare(candidates, build, len(inputs.scopes), rounds):
        row = dataclasses.asdict(case) | {"candidate": name, "vllm_default": int(name == default)}
        row |= rates(case.bytes(), case.flops(), times) | {"error": off}
        rows.append(row | {"share": row["gbps"] / copy_gbps})
    line = " | ".join(
        f"{r['candidate']} {r['p50_us']:.1f} ({r['gbps']:.0f} GB/s, error {r['error']:.1e})"
        for r in rows
    )
    where = f"{case.cache}, {case.tokens:4d} tokens, H={case.heads}, {case.topk} slots"
    print(f"{where}: {line}", flush=True)
    return rows


def main() -> None:
    """Measure every shape; the exit status is 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 64, 128))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 4, 16, 64, 128))
    parser.add_argument("--cache", choices=LAYOUTS, nargs="+", default=("fp8_ds_mla",))
    parser.add_argument("--topk", type=int, nargs="+", help="2048; with V4 512 and 1024")
    parser.add_argument("--context", type=int, default=4096, help="entries that a token lists from")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    start, facts = time.monotonic(), records.environment(options.commit, "benchmarks/sparse.py")
    torch.manual_seed(0)
    ceilings = timing.measure_ceilings()
    print(facts, ceilings, flush=True)
    listed = [(cache, n) for cache in options.cache for n in options.topk or TOPK[cache]]

    def work() -> Iterator[Case]:
        shapes = itertools.product(listed, options.heads, options.tokens)
        for (cache, topk), heads, tokens in shapes:
            if time.monotonic() - start > options.seconds:
                print(f"no time for {heads} heads, {tokens} tokens, {topk} slots")
            else:
                yield Case(tokens, heads, topk, options.context, cache)

    rows = functools.partial(measure, rounds=options.rounds, copy_gbps=ceilings.gbps)
    table = records.table(options.csv, facts, CASE + RESULT, work(), rows)
    sys.exit(any(not row["error"] <= TOLERANCE for row in table))


if __name__ == "__main__":
    main()
