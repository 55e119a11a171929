"""Runs the check of each kernel in a process of its own, several at once, and kills those that
wait for ever.
"""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from mla_fusion.cli.child import EngineError, Job, result, start
from mla_fusion.cli.selftest.outcome import Outcome

MOST_JOBS, MEMORY = 8, 12 * 2**30  # processes at once, and bytes of GPU memory that one may take
SILENCE = 150.0  # seconds; a case compiles kernels for up to half a minute


@dataclasses.dataclass
class Row:
    """What became of a kernel. skipped: why it cannot run here; wrong: the first wrong case, or
    how the process ended."""

    kernel: str
    cases: int = 0
    error: float = 0.0
    bound: float = 0.0
    wrong: str = ""
    skipped: str = ""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """One of "right", "WRONG" and "cannot run"."""
        return "cannot run" if self.skipped else "WRONG" if self.wrong else "right"

    def add(self, outcome: Outcome) -> None:
        """Count a case: the worst is that nearest to, or farthest beyond, its bound."""
        self.cases += 1
        if not outcome.right and not self.wrong:
            why = outcome.wrong or f"error {outcome.error:.2g}, bound {outcome.bound:.2g}"
            self.wrong = f"{outcome.case}: {why}"
        before = self.error / self.bound if self.bound else self.error
        now = outcome.error / outcome.bound if outcome.bound else outcome.error
        if self.cases == 1 or not now <= before:
            self.error, self.bound = outcome.error, outcome.bound

    def __str__(self) -> str:
        start = f"{self.kernel:36} {self.verdict:10}"
        if self.skipped:
            return f"{start} {self.skipped}"
        worst = f"worst error {self.error:.1e}, bound {self.bound:.1e}, {self.seconds:.0f} s"
        return f"{start} {self.cases:3} cases, {worst}" + (f": {self.wrong}" if self.wrong else "")


def run_checks(names: Sequence[str], thorough: bool = False) -> list[Row]:
    """Run the checks of these kernels, and print a line for each as it ends; below the lines, on a
    terminal, a bar of the kernels that ended."""
    free = torch.cuda.mem_get_info()[0]
    jobs = max(1, min(MOST_JOBS, os.cpu_count() or 1, free // MEMORY))
    terminal, number = sys.stderr.isatty(), itertools.count(1)
    rows: list[Row] = []

    def case(kernel: str) -> None:
        if terminal:
            bar = "#" * len(rows) + "." * (len(names) - len(rows))
            text = f"\r[{bar}] {next(number)} cases, {kernel}\x1b[K"
            print(text, end="", file=sys.stderr)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(watch, name, thorough, case) for name in names]):
            rows.append(done.result())
            if terminal:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            print(rows[-1], flush=True)
    return rows


def watch(name: str, thorough: bool, progress: Callable[[str], None]) -> Row:
    """Run the check of one kernel to its end, or to that of its process, or until it is silent.
    progress: called with the kernel at each of its cases."""
    row, began = Row(name), time.monotonic()

    def stop() -> None:
        why = f"killed after {SILENCE:.0f} s of silence behind case {row.cases}: a kernel waits for"
        row.wrong = row.wrong or f"{why} ever"
        os.killpg(process.pid, signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        options = {"name": name, "thorough": thorough}
        work = "mla_fusion.cli.selftest.kernels:run"
        job = Job(folder, f"{folder}/cache", work, options=options, temporary=True)
        process = start(job, stdout=subprocess.PIPE)
        while text := _line(process, threading.Timer(SILENCE, stop)):
            row.add(Outcome(**json.loads(text)))
            progress(name)
        try:
            ended = result(job, process)
        except EngineError as error:
            ended = {"wrong": f"the process ended: {error.why}"}
    row.skipped, row.wrong = ended.get("skipped", ""), row.wrong or ended.get("wrong", "")
    row.seconds = round(time.monotonic() - began, 1)
    return row


def _line(process: subprocess.Popen[str], timer: threading.Timer) -> str:
    """The next line of a child; empty at its end."""
    assert process.stdout is not None
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
