"""Ways to rotate queries and keys, and to scale the rotated query, by vLLM's own code."""

import torch
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

ROPES = ("native", "deepseek", "vllm_c", "flashinfer", "aiter", "cat_fused", "nope")
# Ways to write the product of q [T, H, n] and fp32 factors [T, 1, 1]. vLLM's is "in_place".
SCALINGS = {
    "in_place": lambda q, factor: q.mul_(factor),
    "out_of_place": lambda q, factor: (factor * q).to(q.dtype),
    "cast": lambda q, factor: (q.float() * factor).to(q.dtype),
    "rounded": lambda q, factor: q * factor.to(q.dtype),
    "expanded": lambda q, factor: (q * factor.expand(q.shape)).to(q.dtype),
    "flat": lambda q, factor: (q.flatten(1) * factor.view(-1, 1)).to(q.dtype).view(q.shape),
    "view": lambda q, factor: (q * factor.squeeze(-1)[:, None].expand_as(q)).to(q.dtype),
}


def rotate(rope, is_neox, positions, q, k, table):
    """q and k, rotated as `forward_native`, `forward_cuda` or `forward_hip` of `RotaryEmbedding`
    does it."""
    width = q.shape[-1]
    if rope.startswith("native"):
        if rope == "native":  # else the cosines are rounded after the lookup
            table = table.to(q.dtype)
        return RotaryEmbedding.forward_static(positions, q, k, width, width, table, is_neox)
    if rope == "deepseek":
        static = DeepseekScalingRotaryEmbedding.forward_static
        return static(positions, q, k, width, width, table, is_neox)
    if rope == "computed":  # a row of the table serves as inverse frequencies
        angles = positions.to(torch.float32).unsqueeze(-1) * table[1, : width // 2]
        turn = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        rotate = ApplyRotaryEmb.forward_static
        return rotate(q, *turn, is_neox), rotate(k, *turn, is_neox)
    if rope == "computed_complex":
        angles = positions.to(torch.float32).unsqueeze(-1) * table[1, : width // 2]
        turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        pairs = [torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn for x in (q, k)]
        return tuple(torch.view_as_real(pair).flatten(-2).to(q.dtype) for pair in pairs)
    op = {
        "vllm_c": torch.ops._C.rotary_embedding,
        "flashinfer": torch.ops.vllm.flashinfer_rotary_embedding,
        "aiter": torch.ops.vllm.rocm_aiter_triton_rotary_embedding,
    }[rope]
    op(positions, q, k, width, table, is_neox)
    return q, k
