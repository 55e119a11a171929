"""Runs every kernel that this GPU can launch against float64 on hostile inputs, in a few minutes.
Exit status 0 if all are right, 1 if one is wrong or never ends, 2 without a GPU."""

import argparse
import dataclasses
import json
import time
from pathlib import Path

from mla_fusion import __version__
from mla_fusion.cli import require_gpu, write


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--thorough", action="store_true", help="more shapes and repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, for an issue report")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if every kernel that runs here is right, else 1."""
    require_gpu()
    from mla_fusion.cli.selftest.kernels import checks, run_checks
    from mla_fusion.measure.records import environment

    began, facts = time.monotonic(), environment()
    print(*(f"{name} {value}" for name, value in facts.items() if value), sep=", ", flush=True)
    rows = run_checks([*checks()], arguments.thorough)
    seconds = round(time.monotonic() - began)
    wrong = [row.kernel for row in rows if row.verdict == "WRONG"]
    right = sum(row.verdict == "right" for row in rows)
    print(f"{right} kernels right, {len(wrong)} WRONG, {seconds} s", *wrong, sep="\n  ")
    if arguments.json is not None:
        told = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows]
        data = {"mla_fusion": __version__, **facts, "seconds": seconds, "rows": told}
        write(arguments.json, json.dumps(data, indent=1) + "\n", "--json ")
    return 1 if wrong or not right else 0
