"""Start a module of this package in a process of its own and read its answer.

The platform is imitated for a whole process, and not in the one that runs the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def start(module: str, job: dict[str, Any], **environment: str) -> subprocess.Popen[str]:
    """python -m tests.rocm.MODULE JOB"""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"tests.rocm.{module}", json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )


def answer(child: subprocess.Popen[str], *words: str) -> list[Any]:
    """The JSON behind each of `words` at the start of a line of the child's output."""
    out, _ = child.communicate(timeout=600)
    assert child.returncode == 0, out[-4000:]
    found = []
    for word in words:
        [line] = [line for line in out.splitlines() if line.startswith(word + " ")]
        found.append(json.loads(line.removeprefix(word + " ")))
    return found
