"""`mla-fusion bench`: the fused region against its peers over a grid of shapes, into a CSV file.

Every candidate is checked against the reference in the run that times it. Peers whose package is
missing are named and left out. How time is taken: mla_fusion/cli/bench_region.py.
"""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.cli import bench_region
from mla_fusion.cli.arguments import UserError, count
from mla_fusion.cli.environment import version_of
from mla_fusion.kernels.dispatch import Widths

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Times only the fused region, many layers in one CUDA graph with distinct "
        "weights, against vLLM unfused, vLLM's fuse_rope_kvcache_cat_mla, torch's product with one "
        "kernel, and FlashInfer, each checked in the same run. Needs a GPU; what is not installed "
        "is left out."
    )
    parser.add_argument(
        "--csv",
        type=Path,
        default=Path("build/bench/region.csv"),
        help="file for the rows (default: %(default)s)",
    )
    count(parser, "--tokens", "T", "", (1, 8, 32, 64, 128, 256, 512))
    count(parser, "--heads", "H", "", (8, 16, 32, 64, 128))
    for name, field in bench_region.FIELDS.items():
        count(parser, f"--{name}", name[0].upper(), field, getattr(bench_region.DEEPSEEK, name))
    count(parser, "--layers", "N", "layers in one CUDA graph", 61)
    count(parser, "--rounds", "N", "samples of each candidate, taken in turns", 15)
    parser.add_argument("--bf16", action="store_true", help="bf16 cache and query, not fp8")
    parser.add_argument(
        "--peers", nargs="+", default=(), metavar="NAME", help="candidates (default: all)"
    )
    parser.add_argument("--commit", default="", help="commit, where git does not know it")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if the provider's results passed every check, else 1."""
    return 0 if measure(arguments) else 1


def counts(row: dict[str, Any]) -> bool:
    """Whether the correctness check of a row allows its time to count.

    Equal to the specification in nearly all elements, and no element more than a step off. A peer
    that rounds the rotated half twice is many steps off where the sum cancels; it counts if every
    element is what its own roundings give.
    """
    if row["equal"] == "":
        return True
    near = row["worst_step"] <= STEPS or row["own_rounding"] == 1.0
    return bool(row["equal"] >= EQUAL and near)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def environment(commit: str = "") -> dict[str, str]:
    """GPU, driver, versions and commit; what is not there is an empty string."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "flashinfer": version_of("flashinfer-python"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
    }


def measure(settings: argparse.Namespace) -> bool:
    """Measure, print a line for each shape, write the rows; whether ours passed every check."""
    if not torch.cuda.is_available():
        raise UserError(
            "needs a CUDA or ROCm GPU, and torch sees none here; the kernels are tested without "
            "one by the test suite, but only a GPU has times worth reading"
        )

    command = " ".join(["mla-fusion", *sys.argv[1:]])
    facts = {**environment(settings.commit), "command": command}
    ceilings = bench_region.measure_ceilings()
    print(*(f"{name} {value}" for name, value in facts.items() if value), sep=", ")
    print(f"ceilings: copy {ceilings.gbps:.0f} GB/s, bf16 product {ceilings.tflops:.0f} TFLOP/s")
    settings.csv.parent.mkdir(parents=True, exist_ok=True)
    right = True
    with settings.csv.open("w", newline="") as file:
        writer = None
        for rows in _shapes(settings, facts, ceilings):
            first = rows[0]
            if writer is None:
                writer = csv.DictWriter(file, first)
                writer.writeheader()
            writer.writerows(rows)
            file.flush()
            times = " | ".join(
                f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in rows
            )
            print("T={tokens:4d} H={heads:4d} floor {floor_us:6.2f} |".format(**first), times)
            right &= all(counts(r) for r in rows if r["candidate"].endswith("triton"))
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return right


def _shapes(
    settings: argparse.Namespace, facts: dict[str, str], ceilings: bench_region.Ceilings
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one shape after the other: a candidate, and what it was measured with.

    "query" is the type of query and cache, "equal" the share of elements that equal the reference
    ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
    roundings give, if they are known.
    """
    from mla_fusion.cli import bench_peers

    missing: set[str] = set()
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))
    for heads in settings.heads:
        weights = bench_region.make_weights(heads, settings.layers, widths)
        for tokens in settings.tokens:
            case = bench_region.Case(tokens, heads, not settings.bf16, widths)
            region = bench_region.make_region(case, weights)
            # A captured graph does not keep its candidate's workspaces alive: `layers` does.
            layers, graphs, checks, own = {}, {}, {}, {}
            for name in settings.peers or bench_peers.PEERS:
                if name in missing:
                    continue
                try:
                    layer = layers[name] = bench_peers.PEERS[name](region)
                    if name not in bench_peers.NOT_A_RESULT:
                        checks[name] = bench_region.agreement(region, layer)
                    if name in bench_peers.OWN_ROUNDING:
                        expected = bench_peers.OWN_ROUNDING[name](region)
                        own[name] = bench_region.agreement(region, layer, expected)[0]
                    graphs[name] = bench_region.capture(region, layer)
                    graphs[name].replay()
                    torch.cuda.synchronize()
                except (ImportError, RuntimeError, AttributeError, ValueError) as error:
                    print(f"{name} left out: {type(error).__name__} {str(error)[:300]}")
                    missing.add(name)
            times = bench_region.interleave(graphs, settings.layers, settings.rounds)
            plan = dataclasses.asdict(bench_peers.chosen_plan(region))
            rows = []
            for name, samples in times.items():
                p20, p50, p80 = (round(x, 3) for x in bench_region.quantiles(samples))
                equal, worst = checks.get(name, ("", ""))
                row = {
                    **facts,
                    "query": "bf16" if settings.bf16 else "fp8",
                    **widths._asdict(),
                    "tokens": tokens,
                    "heads": heads,
                    "candidate": name,
                    "p20_us": p20,
                    "p50_us": p50,
                    "p80_us": p80,
                    "floor_us": round(ceilings.floor_us(case), 3),
                    "gbps": round(case.bytes() / p50 / 1e3),
                    "equal": equal,
                    "worst_step": worst,
                    "own_rounding": own.get(name, ""),
                    "plan": str(plan) if name == "triton" else "",
                }
                rows.append(row)
            yield rows
            del layers, graphs, region
            torch.cuda.empty_cache()
