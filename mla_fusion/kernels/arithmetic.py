"""Arithmetic that providers and `mla_fusion.runtime` share.

`reference.py` uses none of it: an error here must show in a comparison with the specification.
"""

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def next_power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """RoPE of `x` [T, ..., R] at `positions` [T], computed and returned in fp32; the others are as
    `kernels.fused_mla_decode_prep` has them. A rotated pair stays in its place."""
    angles = cos_sin_cache[positions].float()
    cos, sin = angles.view(x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1]).chunk(2, dim=-1)
    x = x.float()
    if is_neox:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def scale(q: torch.Tensor, factor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`q` [T, H, n] times `factor` [T], in the type of q: computed in fp32 and rounded once. The
    result is dense, or `out`, which may be q."""
    out = q.new_empty(q.shape) if out is None else out
    return torch.mul(q, factor[:, None, None], out=out)


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """`q_nope` [T, H, P] times `w_uk_t` [H, P, L], as dense [T, H, L] in the activation type:
    torch.bmm sums 16-bit operands in fp32 and rounds once. On a CPU vLLM's has the same bits."""
    tokens, heads, _ = q_nope.shape
    out = q_nope.new_empty((tokens, heads, w_uk_t.shape[-1]))
    torch.bmm(q_nope.transpose(0, 1), w_uk_t, out=out.transpose(0, 1))
    return out


def cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """`x` in `dtype`; for fp8 it is multiplied by 1 / scale and clamped to the finite range."""
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() * scale.float().reciprocal()).clamp(-limit, limit).to(dtype)
