"""Launches of the kernels in `kernel.py`, which is imported on first use: Triton may be missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.kernels.triton import early_launch
from mla_fusion.ops import Norm, Product
from mla_fusion.projections.plans import GROUP, MAX_TOKENS, Plan, tile_of


def launch(
    plan: Plan, x: torch.Tensor, weights: list[torch.Tensor], scales: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """x [T, K] times the transpose of each of one or two weights [N, K]: dense tensors [T, N] of
    the weights' type, bf16 or fp16 as x, summed in fp32 and rounded once; or fp32.

    With `scales`, fp32 [N / 128, K / 128] rounded up, the one weight is e4m3 and x bf16, of which
    each 128 elements are rounded to e4m3 with a scale of their own first. The result is bf16.

    T is 1 to 16, with `scales` 1 to 8. Rows of x and of the weights may be strided, their elements
    not. Nothing is checked: pass 7 reads types and layouts of the weights."""
    from mla_fusion.projections import kernel

    typed = weights[0] if scales is None else x
    outputs = [typed.new_empty((x.shape[0], weight.shape[0])) for weight in weights]
    programs = sum(-(-weight.shape[0] // plan.block_n) for weight in weights)
    given = launch_arguments(plan, x, weights, outputs, scales)
    rows = len(x) if plan.kernel == "vector" else 1
    getattr(kernel, plan.kernel)[programs, rows](**given)
    return outputs


def launches(
    of: Product, dtype: torch.dtype, plans: Callable[[int], Iterable[Plan | None]]
) -> list[partial[Any]]:
    """A launch of meta tensors for each variant of the `plans` for some number of tokens."""
    found: dict[Any, partial[Any]] = {}
    of_weights = {32: torch.float32, 8: torch.float8_e4m3fn}.get(of.bits, dtype)
    for tokens in range(1, MAX_TOKENS + 1):
        x = torch.empty((tokens, of.k), dtype=dtype, device="meta")
        weights = [x.new_empty((n, of.k), dtype=of_weights) for n in of.sizes]
        scales = x.float() if of.bits == 8 else None
        for plan in filter(None, plans(tokens)):
            found.setdefault((plan, tile_of(tokens)), partial(launch, plan, x, weights, scales))
    return [*found.values()]


def norm_launch(of: Norm, dtype: torch.dtype) -> partial[Any]:
    """A launch of meta tensors for these norms."""
    xs = [torch.empty((1, width), dtype=dtype, device="meta") for width in of.sizes]
    weights, epsilons = [x[0] for x in xs], [1e-6] * len(xs)
    added = xs[:1] * (of.terms - 1)
    added[-1:] = [x.float() if of.one else x for x in added[-1:]]
    return partial(normalize, xs, weights, epsilons, added, 1.0, of.kept)


def launch_arguments(
    plan: Plan, x: torch.Tensor, weights: list[torch.Tensor], outputs: list[torch.Tensor],
    scales: torch.Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Arguments and options of a launch (also for compiling without a GPU).

    Row strides come divided by 8 elements where they allow it: so Triton knows that a row begins
    at a multiple of 16 bytes, and loads that much at once. In block fp8 it loads 16 elements, of a
    row that begins at such a multiple too."""
    (tokens, k), (first, last) = x.shape, (weights[0], weights[-1])
    x_row = x.stride(0) if tokens > 1 else 0  # the stride of one row means nothing
    strides = first.stride(0), last.stride(0), x_row
    eight = scales is not None
    align = 1 if x_row % 8 or any(row % (8 << eight) for row in strides[:2]) else 8
    w = plan.num_warps
    unit = {"vector": 256, "matrix": 32 * w, "block": GROUP * w}[plan.kernel]  # of K, at once
    units = -(-k // unit)
    j = min(units & -units, 8) if plan.kernel == "matrix" else 1  # ranges are powers of two
    chunks = units // j
    given = {
        "x_ptr": x, "x_row": x_row // align, "tokens": tokens, "K": k, "BLOCK_N": plan.block_n,
        "CHUNKS": chunks, "W": w,
        "FULL_N": all(w.shape[0] % plan.block_n == 0 for w in weights),
        "FULL_K": k % unit == 0, "ALIGN": align, "num_warps": w, **early_launch(x.device),
    }  # fmt: skip
    if eight:
        of_block = {"w": first, "scales": scales, "y": outputs[0]}
        return given | of_block | {"n": len(first), "row": strides[0] // align}
    given |= {
        "w0": first, "w1": last, "y0": outputs[0], "y1": outputs[-1], "n0": len(first),
        "n1": len(last), "row0": strides[0] // align, "row1": strides[1] // align,
        "AHEAD": plan.ahead(k, tokens, chunks), "TWO": len(weights) == 2,
    }  # fmt: skip
    return given if plan.kernel == "vector" else given | {"TILE": tile_of(tokens), "J": j}


def normalize(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], epsilons: Sequence[float],
    added: Sequence[torch.Tensor] = (), factor: float = 1.0, wide: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """The RMSNorm of each of one or two x [T, K] with a weight [K], dense, and with one or two
    tensors [T, K] that are added to the first x times `factor`, that sum too: all of one type, bf16
    or fp16, computed in fp32 and rounded once. The last of `added` may be fp32, and the sum is if
    `wide`. Rows may be strided, their elements not."""
    from mla_fusion.projections import kernel

    outputs = [x.new_empty(x.shape) for x in xs]
    if added:
        outputs.append(xs[0].new_empty(xs[0].shape, dtype=torch.float32 if wide else None))
    rows = first, _, *_ = xs[0], xs[-1], *(added or xs)[:1], *(added or xs)[-1:]
    strides = [x.stride(0) if len(x) > 1 else 0 for x in rows]
    align = 1 if any(stride % 8 for stride in strides) else 8
    widths = [x.shape[1] for x in xs]
    block = next_power_of_two(max(widths))
    kernel.rms_norm[len(first), len(xs)](
        *rows, weights[0], weights[-1], outputs[0], outputs[len(xs) - 1], outputs[-1],
        *(stride // align for stride in strides), epsilons[0], epsilons[-1], factor, K0=widths[0],
        K1=widths[1] if len(xs) > 1 else 0, BLOCK=block, ADDS=len(added), ALIGN=align,
        num_warps=max(1, min(16, block // 256)), **early_launch(first.device),
    )  # fmt: skip
    return outputs
