"""The specification of the fused region, in plain torch: the oracle of every other provider.

It shares no code with them and runs on any device, slowly. The formulas are those of DeepSeek-V2
(arXiv:2405.04434, section 2.1) with the absorbed up-projection of appendix C.
"""

from collections.abc import Callable

import torch

from mla_fusion.kernels.inputs import Inputs


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
    angles = cos_sin_cache[positions].float().unflatten(0, (-1, *(1,) * (x.dim() - 2)))
    cos, sin = angles[..., :half], angles[..., half:]
    a, b = x[..., first].float(), x[..., second].float()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def absorb(q_nope: torch.Tensor, w_uk_t: torch.Tensor) -> torch.Tensor:
    """`q_nope` [T, H, P] times `w_uk_t` [H, P, L], as [T, H, L]: summed in fp32, rounded once."""
    return torch.bmm(q_nope.transpose(0, 1), w_uk_t).transpose(0, 1)


def cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """`x` in `dtype`; for fp8 times 1 / scale, at most the largest finite value; NaN stays NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale.float())).clamp(-largest, largest).to(dtype)


def normalize(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of `x` [T, L] with `weight` [L], in fp32, rounded once to the type of x."""
    wide = x.float()
    unit = wide * torch.rsqrt((wide * wide).mean(dim=1, keepdim=True) + epsilon)
    return (unit * weight.float()).to(x.dtype)


def scale(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` [T, H, n], rounded to the activation type `dtype`, times `factor` [T], rounded again:
    the product of two of its numbers is computed in fp32, as is that with an fp32 factor."""
    return (x.to(dtype).float() * factor.float()[:, None, None]).to(dtype)


def fused_mla_decode_prep(
    inputs: Inputs, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """See `mla_fusion.kernels.fused_mla_decode_prep`. product: instead of `absorb`."""
    q, w_uk_t, q_out, kv_cache = inputs.q, inputs.w_uk_t, inputs.q_out, inputs.kv_cache
    nope = w_uk_t.shape[1]
    stored = inputs.slot_mapping >= 0
    valid = torch.ones_like(stored) if inputs.context_parallel else stored
    q_nope, q_pe, k_pe = q[..., :nope], q[..., nope:], inputs.k_pe
    if inputs.cos_sin_cache is not None:
        positions = torch.where(valid, inputs.positions, 0)
        q_pe = rotate(q_pe, positions, inputs.cos_sin_cache, inputs.is_neox)
        k_pe = rotate(k_pe, positions, inputs.cos_sin_cache, inputs.is_neox)
    if inputs.q_factor is not None:
        q_nope = scale(q_nope, inputs.q_factor, q.dtype)
        q_pe = scale(q_pe, inputs.q_factor, q.dtype)
    absorbed = (product or absorb)(q_nope, w_uk_t)
    halves = [cast(half, q_out.dtype, inputs.q_scale) for half in (absorbed, q_pe)]
    # torch has no `where` for fp8: choose between bytes instead.
    query = torch.cat(halves, dim=-1).view(torch.uint8).masked_fill(~valid.view(-1, 1, 1), 0)
    q_out.copy_(query.view(q_out.dtype))

    kv_c = inputs.kv_c
    if inputs.kv_norm_weight is not None:
        kv_c = normalize(kv_c, inputs.kv_norm_weight, inputs.kv_norm_epsilon)
    halves = [cast(half, kv_cache.dtype, inputs.k_scale) for half in (kv_c, k_pe)]
    rows = torch.cat(halves, dim=-1).view(torch.uint8)[stored]
    slots = inputs.slot_mapping[stored]
    kv_cache.view(torch.uint8)[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = rows
    return q_out
