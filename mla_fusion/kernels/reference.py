"""The specification of the fused region, in plain torch: the oracle of every other provider.

It shares no code with them and runs on any device, slowly. The formulas are those of DeepSeek-V2
(arXiv:2405.04434, section 2.1) with the absorbed up-projection of appendix C.
"""

from __future__ import annotations

import torch


def require() -> None:
    """The reference provider needs only torch."""


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool
) -> torch.Tensor:
    """RoPE of `x` [T, ..., R] at `positions` [T], in fp32: each pair (a, b) of a row becomes
    (a cos - b sin, b cos + a sin). `cos_sin_cache` [max_position, R] holds cosines then sines."""
    half = x.shape[-1] // 2
    first, second = slice(0, None, 2), slice(1, None, 2)
    if is_neox:
        first, second = slice(0, half), slice(half, None)
    angles = cos_sin_cache[positions].float()
    while angles.dim() < x.dim():
        angles = angles.unsqueeze(1)
    cos, sin = angles[..., :half], angles[..., half:]
    a, b = x[..., first].float(), x[..., second].float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """The product of `q_nope` [T, H, P] and `w_uk_t` [H, P, L] for each head, as [T, H, L]:
    accumulated in fp32 and rounded once to the activation type."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk_t).transpose(0, 1)


def cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """`x` in `dtype`; for fp8 times 1 / scale, at most the largest finite value; NaN stays NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    scaled = x.to(torch.float32) * (1.0 / scale.to(torch.float32))
    scaled = torch.where(scaled > largest, largest, scaled)
    return torch.where(scaled < -largest, -largest, scaled).to(dtype)


def fused_mla_decode_prep(
    q: torch.Tensor,
    w_uk_t: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    k_scale: torch.Tensor,
    q_scale: torch.Tensor,
    *,
    is_neox: bool,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """See `mla_fusion.kernels.fused_mla_decode_prep`."""
    latent = w_uk_t.shape[-1]
    valid = slot_mapping >= 0
    q_pe, k_rot = q[..., w_uk_t.shape[1] :], k_pe
    if cos_sin_cache is not None:
        safe = torch.where(valid, positions, torch.zeros_like(positions))
        q_pe = rotate(q_pe, safe, cos_sin_cache, is_neox)
        k_rot = rotate(k_pe, safe, cos_sin_cache, is_neox)
    query = torch.cat(
        (
            cast(absorb(q[..., : w_uk_t.shape[1]], w_uk_t), q_out.dtype, q_scale),
            cast(q_pe, q_out.dtype, q_scale),
        ),
        dim=-1,
    )
    # torch has no `where` for fp8: choose between bytes instead.
    raw = query.view(torch.uint8).masked_fill(~valid.view(-1, 1, 1), 0)
    q_out.copy_(raw.view(q_out.dtype))

    slots = slot_mapping[valid]
    block, entry = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
    rows = torch.cat(
        (cast(kv_c, kv_cache.dtype, k_scale), cast(k_rot, kv_cache.dtype, k_scale)), dim=-1
    )
    assert rows.shape[-1] == latent + k_pe.shape[-1]
    kv_cache.view(torch.uint8)[block, entry] = rows.view(torch.uint8)[valid]
    return q_out
