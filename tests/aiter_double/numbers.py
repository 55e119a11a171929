"""Roundings of the kernels, in torch on a CPU."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP_FP4 = 32


def clamped_fp8(x, dtype):
    """fp32 to fp8, clamped to the finite range; NaN becomes the minimum (as med3 gives it)."""
    limit = torch.finfo(dtype).max
    return x.nan_to_num(nan=-limit, posinf=limit, neginf=-limit).clamp(-limit, limit).to(dtype)


def bare_fp8(x, dtype):
    """fp32 to fp8 without a clamp: what is too large becomes NaN."""
    safe = clamped_fp8(x, dtype)
    overflow = ~(x.abs() <= torch.finfo(dtype).max)
    nan = torch.full((), float("nan")).to(dtype)
    raw = torch.where(overflow, nan.view(torch.uint8), safe.view(torch.uint8))
    return raw.view(dtype)


def truncated_bf16(x):
    """fp32 to bf16 by dropping the low 16 bits."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def to_mxfp4(x):
    """x [..., K] as (bytes [..., K / 2], exponents + 127 [..., K / 32]), rounded to nearest.

    Two e2m1 codes to a byte, the lower index in the lower half; an e8m0 scale for 32 values.
    """
    groups = x.float().unflatten(-1, (-1, GROUP_FP4))
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponent = torch.floor(torch.log2(largest)) - 2  # 6 = 1.5 * 2^2 is the largest e2m1 value
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    code = torch.where(scaled < 0, code + 8, code).flatten(-2)
    packed = code[..., ::2] + 16 * code[..., 1::2]
    return packed.to(torch.uint8), (exponent + 127).to(torch.uint8)


def from_mxfp4(packed, scale):
    """The inverse of `to_mxfp4`, in fp32."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    value = torch.where(code >= 8, -1.0, 1.0) * E2M1[code & 7]
    grouped = value.unflatten(-1, (-1, GROUP_FP4))
    return (grouped * torch.exp2(scale.float() - 127).unsqueeze(-1)).flatten(-2)


def grouped_fp8(x, dtype, group):
    """x [..., K] quantized to fp8 with a scale for each group of K, and back to fp32."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / torch.finfo(dtype).max
    return (clamped_fp8(groups / scale, dtype).float() * scale).flatten(-2)
