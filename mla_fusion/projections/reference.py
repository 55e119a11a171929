"""The products and norms in plain torch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def project(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """See `mla_fusion.projections.project`; for any number of rows, on any device."""
    return [torch.mm(x.to(weight.dtype), weight.t()) for weight in weights]


def in_float64(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same products summed in float64 and not rounded: errors are measured against them."""
    return [x.double() @ weight.double().t() for weight in weights]


def normalize(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], epsilons: Sequence[float],
    added: Sequence[torch.Tensor] = (), factor: float = 1.0, wide: bool = False,
    within: torch.dtype = torch.float32,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.triton.normalize`; computed in the type `within`."""
    values = [x.to(within) for x in xs]
    values[0] = values[0] * factor
    for term in added:
        values[0] = values[0] + term.to(within)
    found = [
        value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon) * weight.to(within)
        for value, weight, epsilon in zip(values, weights, epsilons, strict=True)
    ]
    sums = [values[0].to(within if wide else xs[0].dtype)] if added else []
    return [*(each.to(xs[0].dtype) for each in found), *sums]
