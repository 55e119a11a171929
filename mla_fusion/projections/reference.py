"""The products in plain torch: the specification of the kernels."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of the rows of x [T, K] as vLLM defines it: in fp32, rounded to the type of x before
    and after the product with `weight` [K]."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight


def project(
    x: torch.Tensor, weights: list[torch.Tensor], norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.project`; for any number of rows, on any device."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, epsilon)
    return [torch.mm(x, weight.t()) for weight in weights]


def in_float64(
    x: torch.Tensor, weights: list[torch.Tensor], norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:  # fmt: skip
    """The same products summed in float64 and not rounded: errors are measured against them."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, epsilon)
    return [x.double() @ weight.double().t() for weight in weights]
