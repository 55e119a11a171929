"""Runs interpreted_*.py of the tests under Triton's interpreter, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = sorted(Path(__file__).parents[1].glob("*/interpreted_*.py"))
# By day in one process: each takes seconds to start.
RUNS = [
    pytest.param(FILES, "not nightly", id="daily"),
    *(pytest.param([path], "nightly", id=path.stem, marks=pytest.mark.nightly)
      for path in FILES if "nightly" in path.read_text()),
]  # fmt: skip


@pytest.mark.parametrize("paths, marked", RUNS)
def test_kernels_under_the_repaired_interpreter(paths, marked):
    chosen = ("-q", "-x", "-p", "no:cacheprovider", "-m", marked, *map(str, paths))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
