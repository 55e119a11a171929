"""What the kernel of page indices compiles to; interpreted_entries.py checks what it computes."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("page", [1, 16, 24, 64])
def test_compiles_without_spills(target, page):
    from mla_fusion.attention.aiter.entries_kernel import BLOCK, CTAS, expand_kernel
    from tests.kernels import compiled

    tensors = [torch.empty(9, dtype=torch.int32, device="meta") for _ in range(3)]
    options = {"PAGE": page, "BLOCK": BLOCK, "CTAS": CTAS, "num_warps": 4}
    report = compiled.compile_report(target, expand_kernel, (*tensors, 2560, 2**26), options)
    assert report.spills == 0
