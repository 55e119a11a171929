"""The planner's kernel: what it computes, under the interpreter, and what it compiles to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def test_the_plan_of_the_specification_under_the_repaired_interpreter() -> None:
    command = ("-P", "-m", "tests.attention.interpreted_planner")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)]),
    }
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "40 plans equal" in result.stdout


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize(
    "sequences, workers", [(1, 132), (256, 132), (256, 264), (256, 304), (1024, 264)]
)
def test_compiles_without_spills(target: str, sequences: int, workers: int) -> None:
    from mla_fusion.attention.planner_triton import plan_kernel
    from tests.kernels import compiled

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    tensors = (
        ints(9),
        ints(9),
        ints(9),
        ints(9, 8),
        ints(9),
        ints(9, 2),
        ints(9),
        ints(9),
        ints(9),
        torch.empty(9, dtype=torch.int64, device="meta"),
    )
    options = {
        "MAX_BATCH": sequences,
        "WORKERS": workers,
        "FOLD": 2,
        "GRANULARITY": 16,
        "OVERHEAD": 16,
        "BLOCK_B": sequences,  # powers of two
        "BLOCK_W": 1 << (workers - 1).bit_length(),
        "num_warps": 4,
    }
    kernel = compiled.compile_for(target, plan_kernel, (*tensors, 8, workers, 1), options)
    report = compiled.report(target, kernel)
    assert report.spills == 0
    # Only reductions: a few bytes for each warp. Lanes that change threads take 1 KiB and more.
    assert report.shared <= 512
