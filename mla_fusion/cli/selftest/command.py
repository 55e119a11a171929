"""`mla-fusion selftest`: is every kernel right on this GPU?

Each runs in a process of its own (`watch.py`) against float64 on hostile inputs: `decode.py`,
`region.py`, `sparse.py` and `planner.py` say which; `kernels.py` has the list.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion import __version__
from mla_fusion.cli import require_gpu, write

if TYPE_CHECKING:
    import argparse

    from mla_fusion.cli.selftest.watch import Row

MOST_JOBS, MEMORY = 8, 12 * 2**30  # processes at once, and bytes of GPU memory that one may take
SILENCE = 150.0  # seconds; a case compiles kernels for up to half a minute


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = (
        "Runs every kernel that this GPU can launch against float64 on hostile inputs, in a few "
        "minutes. Exit status 0 if all are right, 1 if one is wrong or never ends, 2 without a GPU."
    )
    parser.add_argument("--thorough", action="store_true", help="more shapes and repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, for an issue report")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if every kernel that runs here is right, else 1."""
    require_gpu()
    from mla_fusion.cli.bench.kit import environment
    from mla_fusion.cli.selftest.kernels import checks

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


def run_checks(names: list[str], thorough: bool = False) -> list[Row]:
    """Run the checks of these kernels, and print a line for each; on a terminal, below the lines, a
    bar of the kernels that ended."""
    import torch

    from mla_fusion.cli.selftest.watch import run_all

    free = torch.cuda.mem_get_info()[0]
    jobs = max(1, min(MOST_JOBS, os.cpu_count() or 1, free // MEMORY))
    terminal, number = sys.stderr.isatty(), itertools.count(1)
    rows: list[Row] = []

    def case(kernel: str) -> None:
        if terminal:
            bar = "#" * len(rows) + "." * (len(names) - len(rows))
            text = f"\r[{bar}] {next(number)} cases, {kernel}\x1b[K"
            print(text, end="", file=sys.stderr)

    for row in run_all(names, jobs, SILENCE, thorough, case):
        rows.append(row)
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(line_of(row), flush=True)
    return rows


def line_of(row: Row) -> str:
    """One kernel, for people."""
    start = f"{row.kernel:36} {row.verdict:10}"
    if row.skipped:
        return f"{start} {row.skipped}"
    text = f"{start} {row.cases:3} cases, worst error {row.error:.1e}, bound {row.bound:.1e}, "
    return text + f"{row.seconds:.0f} s" + (f": {row.wrong}" if row.wrong else "")
