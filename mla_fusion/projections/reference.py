"""The products in plain torch: the specification of the kernels."""

from __future__ import annotations

import torch

from mla_fusion.kernels.arithmetic import rms_norm


def project(
    x: torch.Tensor, weights: list[torch.Tensor], norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.project`; for any number of rows, on any device."""
    x = _normed(x, norm_weight, epsilon)
    return [torch.mm(x, weight.t()) for weight in weights]


def in_float64(
    x: torch.Tensor, weights: list[torch.Tensor], norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:  # fmt: skip
    """The same products summed in float64 and not rounded: errors are measured against them."""
    x = _normed(x, norm_weight, epsilon)
    return [x.double() @ weight.double().t() for weight in weights]


def _normed(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    return x if weight is None else rms_norm(x, weight, epsilon)
