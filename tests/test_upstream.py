"""What this library works around in vLLM: each workaround goes when its test passes.

These tests state what should hold. Those that fail today stand in `tests/known_failures.toml`.
"""

import pytest
import torch

from tests.passes.graphs import rotate_in_place


@pytest.mark.parametrize("heads", [1, 2])
def test_vllms_cpu_rope_kernel_rotates_every_head(heads):
    """`tests/passes/fake_engine.py` puts a kernel of its own in place of this one."""
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
