"""`mla-fusion check` leaves nothing behind: no process of its engine, and no folder."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_check import CONFIGS

STATUS = {signal.SIGINT: 130, signal.SIGTERM: -signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}


def session(leader):
    """The processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            found += [stat] if int(of) == leader and state != "Z" else []
    return found


@pytest.mark.parametrize("number", STATUS)
def test_the_engine_ends_with_the_command(number, tmp_path):
    """A signal to the command alone, as `timeout` or a supervisor sends it."""
    command = [sys.executable, "-m", "mla_fusion", "check", CONFIGS / "deepseek-v3.json"]
    check = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True,
        # A suite in the background of a shell ignores it, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    while "starting vLLM" not in check.stderr.readline():
        assert check.poll() is None
    [engine] = Path(f"/proc/{check.pid}/task/{check.pid}/children").read_text().split()
    assert session(int(engine)) and [*tmp_path.iterdir()]
    check.send_signal(number)
    assert check.wait(5) == STATUS[number]
    # An interrupted command ends them itself, before it returns.
    limit = time.monotonic() + (0.5 if number == signal.SIGINT else 5)
    while session(int(engine)) or [*tmp_path.iterdir()]:
        assert time.monotonic() < limit
        time.sleep(0.1)
