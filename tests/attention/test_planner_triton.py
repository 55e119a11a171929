"""What the planner's kernel compiles to; interpreted_planner.py checks what it computes."""

import itertools

import pytest
import torch

from tests.nightly import daily

pytest.importorskip("triton")


SIZES = [(1, 132), (256, 132), (256, 264), (256, 304), (1024, 264)]


@pytest.mark.parametrize(
    "case",
    daily(itertools.product(("gfx942", "gfx950", "sm_90"), SIZES),
          ("gfx942", (256, 304)), ("gfx950", (256, 304)), ("sm_90", (1024, 264))),
)  # fmt: skip
def test_compiles_without_spills(case):
    target, (sequences, ctas) = case
    from mla_fusion.attention.plan.planner_triton import plan_kernel
    from tests.kernels import compiled

    shapes = [(9,), (9,), (9,), (9, 8), (9,), (9, 2), (9,), (9,), (9,)]
    tensors = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in shapes]
    tensors.append(torch.empty(9, dtype=torch.int64, device="meta"))
    options = {
        "MAX_BATCH": sequences,
        "CTAS": ctas,
        "FOLD": 2,
        "GRANULARITY": 16,
        "OVERHEAD": 16,
        "BLOCK_B": sequences,  # powers of two
        "BLOCK_W": 1 << (ctas - 1).bit_length(),
        "num_warps": 4,
    }
    report = compiled.compile_report(target, plan_kernel, (*tensors, 8, ctas, 1), options)
    assert report.spills == 0
    # Only reductions: a few bytes for each warp. Lanes that change threads take 1 KiB and more.
    assert report.shared <= 512
