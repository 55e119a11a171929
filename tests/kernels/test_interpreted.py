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
STOCK = """
import torch, triton, triton.language as tl

@triton.jit
def convert(source, target, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(target + i, tl.load(source + i).to(target.dtype.element_ty))

x = torch.tensor([1.0 + 3 / 512] * 16)
out = torch.empty(16, dtype=torch.bfloat16)
convert[(1,)](x, out, 16)
raise SystemExit(0 if torch.equal(out, x.to(torch.bfloat16)) else 3)
"""


def interpreted(*command):
    """Run Python with the interpreter on."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize("paths, marked", RUNS)
def test_kernels_under_the_repaired_interpreter(paths, marked):
    chosen = ("-q", "-x", "-p", "no:cacheprovider", "-m", marked, *map(str, paths))
    result = interpreted("-m", "pytest", *chosen)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.nightly
def test_the_stock_interpreter_is_why(tmp_path):
    """Without the repair fp32 -> bf16 truncates; when this fails, Triton was fixed."""
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    assert interpreted(str(script)).returncode == 3
