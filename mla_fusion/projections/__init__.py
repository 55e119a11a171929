"""Products of up to 16 tokens with weights.

It knows torch and Triton, and no vLLM. `plan_for` says whether a product was measured faster here
than `torch.mm`, and `project` computes it."""

from __future__ import annotations

import torch

from mla_fusion.projections.measured import DTYPES
from mla_fusion.projections.measured import plan_for as plan_for
from mla_fusion.projections.plans import GROUP as GROUP
from mla_fusion.projections.plans import MAX_TOKENS as MAX_TOKENS
from mla_fusion.projections.plans import Plan as Plan


def project(
    x: torch.Tensor, weights: list[torch.Tensor], scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """x [T, K] times the transpose of each of one or two weights [N, K]: dense tensors [T, N] of
    the weights' type, bf16 or fp16 as x, summed in fp32 and rounded once; or fp32.

    With `scales`, fp32 [N / 128, K / 128] rounded up, the one weight is e4m3 and x bf16, of which
    each 128 elements are rounded to e4m3 with a scale of their own first. The result is bf16.

    T is 1 to 16, with `scales` 1 to 8. Rows of x and of the weights may be strided, their elements
    not. Raises ValueError for other inputs, and where `plan_for` has no plan."""
    check(x, weights, scales)
    sizes, (tokens, k) = tuple(weight.shape[0] for weight in weights), x.shape
    plan = plan_for(x.device, sizes, k, tokens, weights[0].dtype)
    if plan is None:
        raise ValueError(
            f"no kernel was measured faster for {tokens} tokens, K {k} and N {sizes} on "
            f"{x.device}; ask plan_for first, and use torch.mm where it returns None"
        )
    from mla_fusion.projections.triton import launch

    return launch(plan, x, weights, scales)


def check(x: torch.Tensor, weights: list[torch.Tensor], scales: torch.Tensor | None = None) -> None:
    """Raise ValueError for inputs that the kernels do not take."""
    if len(weights) not in (1, 2):
        raise ValueError(f"weights must be one or two tensors, got {len(weights)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bf16 or fp16, got {x.dtype}")
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [T, K] with T of 1 to {MAX_TOKENS}, got {list(x.shape)}")
    named = {"x": x} | {f"weights[{index}]": weight for index, weight in enumerate(weights)}
    k = x.shape[1]
    for name, tensor in named.items():
        if tensor.dim() != 2 or tensor.shape[1] != k:
            raise ValueError(
                f"{name} must be [N, {k}], as x has {k} columns; got {[*tensor.shape]}"
            )
        if tensor.stride(1) != 1 and k > 1:
            raise ValueError(f"{name} must have dense rows, got strides {tensor.stride()}")
        if tensor.shape[0] * tensor.stride(0) >= 2**31:
            raise ValueError(f"{name} spans 2^31 elements or more, beyond the kernel's offsets")
    kinds, of_weights = dict.fromkeys(named, x.dtype), [*named][1:]
    if scales is not None:
        wanted = [-(-len(weights[0]) // GROUP), k / GROUP]
        if len(weights) > 1 or [*scales.shape] != wanted or not scales.is_contiguous():
            raise ValueError(f"scales must be dense, {wanted}, of one weight; got {scales.shape}")
        named["scales"] = scales
        kinds = {"x": DTYPES[0], of_weights[0]: torch.float8_e4m3fn, "scales": torch.float32}
    elif {weight.dtype for weight in weights} == {torch.float32}:
        kinds |= dict.fromkeys(of_weights, torch.float32)
    for name, tensor in named.items():
        if (tensor.dtype, tensor.device) != (kinds[name], x.device):
            kind = f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"{name} must be {kinds[name]} on {x.device}, got {kind}")
