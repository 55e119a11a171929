"""The bodies of the ops `projection`, up to two products of one input, and `rms_norm`.

A decode graph also serves more tokens than the kernels of `mla_fusion.projections` were measured
for. Such a step gets what the graph had before pass 7: `torch.mm`."""

from collections.abc import Sequence

import torch

from mla_fusion import projections
from mla_fusion.projections import reference


def project(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """x [T, K] times the transpose of each of one or two weights [N, K]: dense tensors [T, N] of
    one type, bf16 or fp16. x may be strided."""
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, k = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    few = 0 < tokens <= projections.MAX_TOKENS
    if few and projections.plan_for(x.device, sizes, k, tokens, x.dtype):
        return projections.project(x, [*weights])
    return reference.project(x, weights)


def normalize(
    xs: Sequence[torch.Tensor], added: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    epsilons: Sequence[float], wide: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.triton.normalize`; for any number of tokens, on any device."""
    if not xs[0].is_cuda:
        return reference.normalize(xs, weights, epsilons, added, wide)
    from mla_fusion.projections import triton

    return triton.normalize(xs, weights, epsilons, added, wide)
