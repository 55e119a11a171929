"""The bodies of the ops `projection`, up to two products of one input, `rms_norm` and `qkv_a`.

A decode graph also serves more tokens than the kernels of `mla_fusion.projections` were measured
for. Such a step gets what the graph had before pass 7: `torch.mm`, or vLLM's op for block fp8."""

from collections.abc import Sequence

import torch

from mla_fusion import ops, projections
from mla_fusion.projections import reference, triton


def project(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: torch.Tensor | None = None,
    e8m0: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.triton.launch`; for any number of tokens, on any device, and x of
    any strides. e8m0: an argument of vLLM's op."""
    x = x if x.stride(1) == 1 else x.contiguous()
    sizes = tuple(weight.shape[0] for weight in weights)
    of = ops.Product(x.shape[1], sizes, 8 * weights[0].dtype.itemsize)
    if plan := projections.plan_for(x.device, of, len(x)):
        return triton.launch(plan, x, [*weights], scales)
    if scales is not None:
        op = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
        return [op(x.contiguous(), weights[0], scales, projections.GROUP, e8m0)]
    return reference.project(x, weights)


def normalize(
    xs: Sequence[torch.Tensor], added: Sequence[torch.Tensor], weights: Sequence[torch.Tensor],
    epsilons: Sequence[float], factor: float = 1.0, wide: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """See `mla_fusion.projections.triton.normalize`; for any number of tokens, on any device."""
    if not xs[0].is_cuda:
        return reference.normalize(xs, weights, epsilons, added, factor, wide)
    return triton.normalize(xs, weights, epsilons, added, factor, wide)


def qkv_a(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times the transpose of weight [N, K], both bf16, as vLLM's op of that name computes.
    The kernel of up to 16 tokens loads the weight before the launch in front has ended."""
    if not 0 < len(x) <= projections.MAX_TOKENS:
        return torch.nn.functional.linear(x, weight)
    out = x.new_empty((len(x), len(weight)))
    torch.ops._C.dsv3_fused_a_gemm(out, x.contiguous(), weight.t(), True)
    return out


def has_qkv_a() -> bool:
    """True if this vLLM's kernel of that product has the argument to be launched early."""
    kernel = getattr(torch.ops._C, "dsv3_fused_a_gemm", None)
    schema = kernel.default._schema.arguments if kernel else ()
    return any(argument.name == "enable_pdl" for argument in schema)
