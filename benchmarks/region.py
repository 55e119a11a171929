#!/usr/bin/env python3
"""The fused region alone against its peers, on this GPU: a table, and rows in a CSV file.

    python benchmarks/region.py --csv benchmarks/results/region.csv

Every candidate is checked against the reference in the same run. Peers whose package is missing
are left out. See mla_fusion/bench.py for how time is taken.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch

from mla_fusion import bench, bench_peers

COLUMNS = [
    "gpu",
    "driver",
    "torch",
    "triton",
    "vllm",
    "flashinfer",
    "commit",
    "command",
    "query",
    "tokens",
    "heads",
    "candidate",
    "p20_us",
    "p50_us",
    "p80_us",
    "floor_us",
    "gbps",
    "equal",
    "worst_step",
    "plan",
]


def output_of(*command: str) -> str:
    """First line that a command prints, or an empty string."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def version(package: str) -> str:
    """Version of an installed package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment(commit: str) -> dict[str, str]:
    """What the figures were measured with."""
    query = "--query-gpu=driver_version", "--format=csv,noheader"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", *query),
        "torch": torch.__version__,
        "triton": version("triton"),
        "vllm": version("vllm"),
        "flashinfer": version("flashinfer-python"),
        "commit": commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["benchmarks/region.py", *sys.argv[1:]]),
    }


def main() -> None:
    """Measure every shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 8, 32, 64, 128, 256, 512))
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bf16", action="store_true", help="bf16 cache and query, not fp8")
    parser.add_argument("--peers", nargs="+", default=list(bench_peers.PEERS))
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    facts = environment(options.commit)
    ceilings = bench.measure_ceilings()
    print(facts, ceilings, flush=True)
    missing: set[str] = set()
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for heads in options.heads:
            weights = bench.make_weights(heads, options.layers)
            for tokens in options.tokens:
                case = bench.Case(tokens, heads, not options.bf16)
                region = bench.make_region(case, weights)
                graphs, checks = {}, {}
                # A captured graph does not keep its candidate's workspaces alive.
                layers = {}
                for name in options.peers:
                    if name in missing:
                        continue
                    try:
                        layer = layers[name] = bench_peers.PEERS[name](region)
                        if name not in bench_peers.NOT_A_RESULT:
                            checks[name] = bench.agreement(region, layer)
                        graphs[name] = bench.capture(region, layer)
                        graphs[name].replay()
                        torch.cuda.synchronize()
                    except (ImportError, RuntimeError, AttributeError, ValueError) as error:
                        print(f"{name} left out: {type(error).__name__} {str(error)[:300]}")
                        missing.add(name)
                times = bench.interleave(graphs, options.layers, options.rounds)
                floor, line = ceilings.floor_us(case), []
                for name, samples in times.items():
                    p20, p50, p80 = bench.quantiles(samples)
                    equal, worst = checks.get(name, ("", ""))
                    plan = bench_peers.chosen_plan(region) if name == "triton" else ""
                    row = dict(
                        facts,
                        query="bf16" if options.bf16 else "fp8",
                        tokens=tokens,
                        heads=heads,
                        candidate=name,
                        p20_us=f"{p20:.3f}",
                        p50_us=f"{p50:.3f}",
                        p80_us=f"{p80:.3f}",
                        floor_us=f"{floor:.3f}",
                        gbps=f"{case.bytes() / p50 / 1e3:.0f}",
                        equal=equal,
                        worst_step=worst,
                        plan=dataclasses.asdict(plan) if plan else "",
                    )
                    writer.writerow(row)
                    bad = "" if equal == "" or (equal >= 0.995 and worst <= 1) else "!"
                    line.append(f"{name} {p50:.2f}{bad}")
                file.flush()
                print(f"T={tokens:4d} H={heads:4d} floor {floor:6.2f} | {' | '.join(line)}")
                sys.stdout.flush()
                del region, graphs
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
