"""The products in plain torch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def project(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `mla_fusion.projections.project`; for any number of rows, on any device."""
    return [torch.mm(x, weight.t()) for weight in weights]


def in_float64(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same products summed in float64 and not rounded: errors are measured against them."""
    return [x.double() @ weight.double().t() for weight in weights]
