"""Runs the check of each kernel in a process of its own, several at once, and kills those that
wait for ever.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from mla_fusion.cli.child import end, lifeline
from mla_fusion.cli.selftest.outcome import Outcome

# -P: the installed package, not one in the current folder.
CHILD = (sys.executable, "-P", "-m", "mla_fusion.cli.selftest.kernels")


@dataclasses.dataclass
class Row:
    """What became of a kernel. skipped: why it cannot run here; wrong: the first wrong case, or
    how the process ended.
    """

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


def run_all(
    names: Sequence[str],
    jobs: int,
    silence: float,
    thorough: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[Row]:
    """A row of each kernel as it ends, `jobs` at once.

    silence: seconds without a line after which a child is killed. progress: called with the kernel
    at each of its cases.
    """
    extra = [str(lifeline()), *(["thorough"] if thorough else [])]
    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(watch, name, extra, silence, progress) for name in names]
        for done in as_completed(work):
            yield done.result()


def watch(name: str, extra: list[str], silence: float, progress: Callable[[str], None]) -> Row:
    """Run one child to its end: that of its last line, that of its process, or for its silence."""
    row, began = Row(name), time.monotonic()

    def stop() -> None:
        row.wrong = row.wrong or (
            f"killed after {silence:.0f} s of silence behind case {row.cases}: a kernel waits for "
            "ever"
        )
        os.killpg(process.pid, signal.SIGKILL)

    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*CHILD, name, *extra], stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True, pass_fds=[lifeline()],
        )  # fmt: skip
        try:
            while text := _line(process, threading.Timer(silence, stop)):
                said = json.loads(text) if text.startswith("{") else {}  # or a compiler's line
                if "end" in said:
                    row.skipped = said["end"]
                    break
                if said:
                    row.add(Outcome(**said))
                    progress(name)
            else:
                process.wait()
                log.seek(0)
                lines = [line for line in log.read().splitlines() if line.strip()]
                why = f"the process ended with {process.returncode}: {(lines or [''])[-1][:300]}"
                row.wrong = row.wrong or why
        finally:
            end(process)  # and those who compile for it
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
