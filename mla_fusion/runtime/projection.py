"""The body of the op `projection`: up to two products of one input, an RMSNorm in front of them.

A decode graph also serves more tokens than the kernels of `mla_fusion.projections` were measured
for. Such a step gets what the graph had before pass 7: vLLM's norm and `torch.mm`."""

from collections.abc import Sequence

import torch

from mla_fusion import projections
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import arithmetic


def project(
    x: torch.Tensor, weights: Sequence[torch.Tensor], norm_weight: torch.Tensor | None,
    epsilon: float,
) -> list[torch.Tensor]:  # fmt: skip
    """x [T, K] times the transpose of each of one or two weights [N, K]: dense tensors [T, N] of
    one type, bf16 or fp16. With norm_weight [K], x is normalized first. x may be strided."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape
    given = x.device, tuple(weight.shape[0] for weight in weights), k, tokens
    few = 0 < tokens <= projections.MAX_TOKENS
    if few and projections.plan_for(*given, norm_weight is not None, x.dtype):
        return projections.project(x, [*weights], norm_weight, epsilon)
    return plain(x, weights, norm_weight, epsilon)


def plain(
    x: torch.Tensor, weights: Sequence[torch.Tensor], norm_weight: torch.Tensor | None,
    epsilon: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The same by vLLM's norm and `torch.mm`."""
    if norm_weight is not None:
        x = _normalized(x, norm_weight, epsilon)
    return [torch.mm(x, weight.t()) for weight in weights]


def _normalized(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of x [T, K] by vLLM's kernel, which rounds twice, or on a CPU by the formula."""
    norm = vllm_compat.rms_norm if x.is_cuda else arithmetic.rms_norm
    return norm(x, weight, epsilon)
