"""Runs every kernel that this GPU can launch against float64 on hostile inputs, in a few minutes.
Exit status 0 if all are right, 1 if one is wrong or never ends, 2 without a GPU."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from mla_fusion import __version__
from mla_fusion.cli import require_gpu, write


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--thorough", action="store_true", help="more shapes and repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, for an issue report")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if every kernel that runs here is right, else 1."""
    found = examine(arguments.thorough)
    if arguments.json is not None:
        write(arguments.json, json.dumps(found, indent=1) + "\n", "--json ")
    verdicts = {row["verdict"] for row in found["rows"]}
    return 0 if "right" in verdicts and "WRONG" not in verdicts else 1


def examine(thorough: bool) -> dict[str, Any]:
    """Check every kernel and print the verdicts; the content of `--json`. A UserError without a
    GPU."""
    require_gpu()
    from mla_fusion.cli.selftest.kernels import checks, run_checks
    from mla_fusion.measure.records import environment

    began, facts = time.monotonic(), environment()
    print(*(f"{name} {value}" for name, value in facts.items() if value), sep=", ", flush=True)
    rows = run_checks([*checks()], thorough)
    seconds = round(time.monotonic() - began)
    wrong = [row.kernel for row in rows if row.verdict == "WRONG"]
    right = sum(row.verdict == "right" for row in rows)
    print(f"{right} kernels right, {len(wrong)} WRONG, {seconds} s", *wrong, sep="\n  ")
    told = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in rows]
    return {"mla_fusion": __version__, **facts, "seconds": seconds, "rows": told}
