"""The products and norms in plain torch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_fusion.projections.plans import GROUP


def project(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """See `mla_fusion.projections.triton.launch`; for any number of rows, on any device."""
    if scales is not None:
        return [y.to(x.dtype) for y in in_float64(x, weights, scales)]
    return [torch.mm(x.to(weight.dtype), weight.t()) for weight in weights]


def in_float64(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The same products summed in float64 and not rounded: errors are measured against them."""
    x, weights = exact(x, weights, scales)
    return [x @ weight.t() for weight in weights]


def exact(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The factors in float64. In block fp8 x is rounded as vLLM's op rounds it: each group times
    448 / its largest magnitude, in fp32, becomes e4m3."""
    if scales is None:
        return x.double(), [weight.double() for weight in weights]
    groups = x.float().unflatten(1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(most == 0, 1.0, most.new_tensor(448.0) / most)
    rounded = (groups * scale).to(weights[0].dtype).double() / scale.double()
    blocks = scales.double().repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return rounded.flatten(1), [w.double() * blocks[: len(w)] for w in weights]


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
