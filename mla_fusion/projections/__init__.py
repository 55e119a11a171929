"""Products of up to 16 tokens with weights, the RMSNorm of their input included.

It knows torch alone, and no vLLM."""

from dataclasses import dataclass

import torch

MAX_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """The launch of one product."""


def plan_for(
    device: torch.device, sizes: tuple[int, ...], k: int, tokens: int, norm: bool,
    dtype: torch.dtype,
) -> Plan | None:  # fmt: skip
    """The plan of a kernel that was measured faster here than norm and `torch.mm`; else None.

    sizes: rows N of each weight [N, k]. tokens: rows of x. norm: x is normalized first."""
    return None


def project(
    x: torch.Tensor, weights: list[torch.Tensor], norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> list[torch.Tensor]:  # fmt: skip
    """x [T, K] times the transpose of each of one or two weights [N, K]: dense tensors [T, N].

    With norm_weight [K], x is normalized by RMSNorm first, rounded before and after its weight."""
    if norm_weight is not None:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        x = (wide * scale).to(x.dtype) * norm_weight
    return [torch.mm(x, weight.t()) for weight in weights]
