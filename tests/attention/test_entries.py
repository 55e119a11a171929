"""What the kernel of page indices compiles to; interpreted_entries.py checks what it computes."""

import itertools

import pytest
import torch

from tests.nightly import daily

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "case",
    daily(itertools.product(("gfx942", "gfx950"), (1, 16, 24, 64)), ("gfx942", 1), ("gfx950", 24)),
)
def test_compiles_without_spills(case):
    target, page = case
    from mla_fusion.attention.aiter.entries_kernel import BLOCK, CTAS, expand_kernel
    from tests.kernels import compiled

    tensors = [torch.empty(9, dtype=torch.int32, device="meta") for _ in range(3)]
    options = {"PAGE": page, "BLOCK": BLOCK, "CTAS": CTAS, "num_warps": 4}
    report = compiled.compile_report(target, expand_kernel, (*tensors, 2560, 2**26), options)
    assert report.spills == 0
