"""Ops in the graphs of tests that a CPU build of vLLM lacks, in plain torch."""

import torch

from mla_fusion.config import vllm_compat
from tests.passes import declare


def rotate_in_place(positions, query, key, head_size, cos_sin_cache, is_neox, offsets=None):
    """RoPE by complex numbers, in place, for [T, H, R] and [T, R]; written apart from the library.

    It stands in for the kernels of AITER, FlashInfer and vLLM that a CPU does not have.
    """
    assert offsets is None
    half = head_size // 2
    cos, sin = cos_sin_cache[positions].double().split(half, dim=-1)
    turn = torch.complex(cos, sin)
    for x in (query, key):
        wide = x.double()
        pairs = wide.unflatten(-1, (2, half)) if is_neox else wide.unflatten(-1, (half, 2))
        if is_neox:
            pairs = pairs.transpose(-1, -2)
        # Not contiguous(): without a row that keeps any strides.
        pairs = pairs.clone(memory_format=torch.contiguous_format)
        turned = torch.view_as_complex(pairs) * (turn if x.dim() == 2 else turn.unsqueeze(1))
        back = torch.view_as_real(turned)
        x.copy_((back.transpose(-1, -2) if is_neox else back).flatten(-2))


# The stand-in for vLLM's fused op, an op that rotates unknown to all, and one of ROCm.
declare.op(
    "mla_fusion_tests",
    "rope_update(Tensor positions, Tensor q_pe, Tensor k_pe, Tensor kv_c, Tensor table, "
    f"bool is_neox, str cache_dtype, Tensor scale, {vllm_compat.layer_name_type()} layer_name) "
    "-> (Tensor, Tensor, Tensor)",
    fake=lambda positions, q_pe, k_pe, kv_c, *rest: (
        kv_c.new_empty(0), torch.empty_like(q_pe), torch.empty_like(k_pe)
    ),
)  # fmt: skip
declare.op(
    "mla_fusion_tests", "mystery_rope(Tensor q, Tensor positions) -> Tensor",
    lambda q, positions: q * positions.cos().view(-1, 1, 1),
    fake=lambda q, positions: torch.empty_like(q),
)  # fmt: skip
if not hasattr(torch.ops.vllm, "rocm_aiter_triton_rotary_embedding"):
    declare.op(
        "vllm",
        "rocm_aiter_triton_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, "
        "SymInt head_size, Tensor cos_sin_cache, bool is_neox, Tensor? offsets=None) -> ()",
        rotate_in_place,
    )
