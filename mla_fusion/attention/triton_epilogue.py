"""Launches what follows a Triton decode: the epilogue in one kernel, or separate launches.

`choose` says which. Separate are the reduction, vLLM's own product (`torch.bmm`) and, where the
result is fp8, a quantization.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention.epilogue import GROUP, largest
from mla_fusion.kernels.triton import has_early_launch

if TYPE_CHECKING:
    from mla_fusion.attention.epilogue import Epilogue
    from mla_fusion.attention.validate import Inputs

LEAST = 16  # columns of a program, and rows of a product by matrix instructions


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the epilogue is compiled.

    rows: query rows of a program; more than one are multiplied by matrix instructions. columns: of
    their results. pieces: loaded at once. warps: of a program.
    """

    rows: int
    columns: int
    pieces: int
    warps: int


def choose(slots: int, heads: int, values: int, quantization: str = "none") -> Shape | None:
    """The shape for `slots` query rows and results of `values` columns a head; None: separate.

    One launch was measured faster for one query row and 16 heads, without groups: 3.6 us, and 4.0
    behind a decode, where separate ones take 6.5 and 6.8 (`benchmarks/results/epilogue_h200.csv`).
    With 8 rows or 128 heads it reads pieces or W_UV too often. `launch` takes other shapes too,
    which benchmarks/epilogue.py times.
    """
    shape = Shape(rows=1, columns=32, pieces=16, warps=4)
    if slots > 1 or heads > 16 or values % shape.columns or quantization == "group":
        return None
    return shape


def slots_of(given: Inputs) -> int:
    """Slots of `epilogue_kernel`: query rows as if all sequences had as many, or all rows."""
    assert given.plan.step is not None, "the caller has refreshed the plan"
    step = given.plan.step
    return max(step.batch * step.max_query_len, step.num_tokens)


def chosen(given: Inputs) -> Shape | None:
    """The shape for these inputs; None where nothing, or separate launches, follow the decode."""
    epilogue = given.epilogue
    if epilogue is None:
        return None
    heads, _, values = epilogue.w_uv.shape
    return choose(slots_of(given), heads, values, epilogue.quantization)


def launch(given: Inputs, shape: Shape) -> None:
    """The epilogue in one kernel."""
    from mla_fusion.attention import epilogue_kernel

    assert given.epilogue is not None
    heads, _, values = given.epilogue.w_uv.shape
    grid = (-(-slots_of(given) // shape.rows), values // shape.columns, heads)
    args, options = arguments(given, shape)
    epilogue_kernel.epilogue_kernel[grid](*args, **options)


def multiply(given: Inputs) -> None:
    """The product of the latents in `out`, which the reduction has merged, and a quantization."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    heads, _, values = epilogue.w_uv.shape
    product = epilogue.out
    if epilogue.scale is not None:
        # torch.bmm cannot write fp8. Under capture this comes from the graph's own pool.
        product = latents.new_empty((len(latents), heads * values))
    target = product.view(-1, heads, values).transpose(0, 1)
    torch.bmm(latents.transpose(0, 1), epilogue.w_uv, out=target)
    if epilogue.scale is not None:
        quantize(product, epilogue)


def quantize(product: torch.Tensor, epilogue: Epilogue) -> None:
    """Quantize a dense product [T, H * V]."""
    from mla_fusion.attention import epilogue_kernel

    args, options = quantize_arguments(product, epilogue)
    grid = (len(product), -(-product.shape[1] // GROUP))
    epilogue_kernel.quantize_kernel[grid](*args, **options)


def arguments(given: Inputs, shape: Shape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of `epilogue_kernel` (also for compiling without a GPU)."""
    plan, epilogue, latents = given.plan, given.epilogue, given.out
    assert plan.step is not None and epilogue is not None
    unused = plan.partial_lse
    args = (
        plan.partial_output,
        plan.partial_lse,
        plan.reduce_indptr,
        plan.reduce_partial_map,
        plan.qo_indptr,
        latents,
        unused if given.lse is None else given.lse,
        epilogue.w_uv,
        epilogue.out,
        unused if epilogue.scale is None else epilogue.scale,
        plan.step.batch,
        plan.step.num_tokens,
        plan.step.max_query_len,
        latents.shape[1],
        *latents.stride()[:2],
        *epilogue.w_uv.stride(),
        epilogue.out.stride(0),
        *_scale_strides(epilogue),
    )
    latent = plan.settings.v_head_dim
    pdl = has_early_launch(latents.device)
    options = {
        "L": latent,
        "V": epilogue.w_uv.shape[2],
        "HEADS": plan.heads_per_work,
        "FOLD": plan.fold,
        "ROWS": shape.rows,
        "DOT_ROWS": 1 if shape.rows == 1 else max(LEAST, shape.rows),
        "COLUMNS": shape.columns,
        "LATENTS": _latents(shape, latent),
        "PIECES": shape.pieces,
        **_quantization(epilogue),
        "LSE": given.lse is not None,
        "PDL": pdl,
        # A warp of AMD's has 64 threads.
        "num_warps": shape.warps // 2 if torch.version.hip else shape.warps,
    }
    if pdl:
        options["launch_pdl"] = True
    return args, options


def _latents(shape: Shape, latent: int) -> int:
    """Rows of W_UV that a program holds: a power of two that divides their number.

    They stay in registers, or go through shared memory, of which gfx942 has 64 KiB. More spill.
    """
    most = 2**13 if torch.version.hip else 2**15
    return min(latent & -latent, most // shape.columns)


def quantize_arguments(
    product: torch.Tensor, epilogue: Epilogue
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of `quantize_kernel`."""
    out = epilogue.out
    args = (product, out, epilogue.scale, out.stride(0), *_scale_strides(epilogue))
    options = {"WIDTH": product.shape[1], "GROUP": GROUP, **_quantization(epilogue)}
    return args, options | {"num_warps": 1}


def _scale_strides(epilogue: Epilogue) -> tuple[int, int]:
    if epilogue.scale is None or epilogue.quantization == "tensor":
        return 0, 0
    return epilogue.scale.stride(0), epilogue.scale.stride(1)


def _quantization(epilogue: Epilogue) -> dict[str, Any]:
    """Constants of both kernels. A negative LIMIT: the conversion clamps by itself."""
    out = epilogue.out
    most = largest(out.dtype) if epilogue.scale is not None else 0.0
    nvidia = out.is_cuda and torch.version.hip is None
    return {
        "QUANTIZATION": epilogue.quantization,
        "LARGEST": most,
        "LIMIT": -most if nvidia else most,
    }
