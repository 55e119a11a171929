"""Launches what follows a Triton decode: the epilogue, one kernel, or separate launches; `choose`
says which. Separate are the reduction, the product (`hopper.product`, or `torch.bmm` as in vLLM)
and, where the result is fp8, a quantization.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from mla_fusion.attention.hopper import fits as for_hopper
from mla_fusion.attention.plan.buffers import SUMS_PER_HEAD
from mla_fusion.attention.plan.device import has_hopper
from mla_fusion.attention.plan.epilogue import GROUP, Epilogue, in_groups, largest
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.triton import early_launch

LEAST = 16  # columns of a CTA, rows of a product by matrix instructions, latents of a slice
AT_ONCE = 2**13  # latents of splits that a CTA of whole rows loads at once: 16 splits of 512


@dataclasses.dataclass(frozen=True)
class Shape:
    """How the epilogue is compiled; all are powers of two.

    rows: query rows of a CTA. columns: of their results. slices: CTAs that share the latents of a
    row; the last of them adds their products. splits: loaded at once. whole: with up to so many
    splits, as read on the device, a row is not sliced: its CTAs share the columns, and each has all
    latents. In groups it is sliced as other rows are, and loads so many splits at once. 0: all rows
    are divided alike.
    """

    rows: int
    columns: int
    slices: int
    splits: int
    warps: int
    whole: int = 0

    def of_few_splits(self, latent: int, quantization: str = "none") -> "Shape":
        """How a row of up to `whole` splits is computed, by the same CTAs."""
        if in_groups(quantization):
            return dataclasses.replace(self, splits=max(1, self.whole), whole=0)
        columns = self.columns // self.slices
        at_once = AT_ONCE // _latents(columns, latent)
        return Shape(self.rows, columns, 1, min(self.whole, at_once), self.warps)

    def sums(self, slots: int, values: int) -> int:
        """Sums of one head that wait in the plan for the last slice."""
        return 0 if self.slices == 1 else -(-slots // self.rows) * self.rows * values * self.slices

    def unsuited(self, slots: int, latent: int, values: int, quantization: str) -> str:
        """Why this shape cannot be launched for such rows; empty if it can."""
        sizes = dataclasses.astuple(self)
        if any(size < 1 or size & (size - 1) for size in (*sizes[:-1], self.whole or 1)):
            return "rows, columns, slices, splits, warps and whole (or 0) must be powers of two"
        if self.columns < LEAST or values % self.columns:
            return f"columns must be {LEAST} or more and divide the {values} of a head"
        if in_groups(quantization) and self.columns != GROUP:
            return f"columns must be {GROUP}: a CTA finds the maximum of a group"
        if latent % (LEAST * self.slices):
            return f"{LEAST} * slices must divide the {latent} latents"
        if self.whole and (self.slices == 1 or self.columns // self.slices < LEAST):
            return f"with whole, slices must be 2 or more, and columns / slices {LEAST} or more"
        if self.whole and self.rows > 1:
            return "with whole, rows must be 1"
        if (sums := self.sums(slots, values)) > SUMS_PER_HEAD:
            return f"{sums} sums of a head wait for the last slice; a plan holds {SUMS_PER_HEAD}"
        return ""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the CTAs of a row divide it: as `Shape`; LATENTS of W_UV are read at once."""

    COLUMNS: int
    SLICES: int
    LATENTS: int
    SPLITS: int


@dataclasses.dataclass(frozen=True)
class Form:
    """What `epilogue_kernel` is compiled for. HEADS, FOLD: of the plan. ROWS, WHOLE: of a `Shape`.
    Of a tile of VECTORS latents or more a thread loads four neighbours; 0: of none. WHOLE_CUT: of
    rows of up to WHOLE splits."""

    L: int
    V: int
    HEADS: int
    FOLD: int
    ROWS: int
    DOT_ROWS: int
    CUT: Cut
    WHOLE: int
    WHOLE_CUT: Cut
    VECTORS: int
    QUANTIZATION: str
    LARGEST: float
    LSE: bool
    AMD: bool


class Faster(NamedTuple):
    """Up to so many slots and heads, quantized in groups or not: one launch of this shape."""

    slots: int
    heads: int
    group: bool
    shape: Shape


# Where one launch was measured on an H200 with V = 128 and never took longer than separate ones, in
# the mean at most 1 / 1.2 of them: not split, in 16 splits and in up to 128, behind a decode and
# alone. The first row that holds (`benchmarks/epilogue.py`). All were measured while the kernel let
# the next decode begin early; 4 and 8 slots before it loaded the next splits ahead of a merge, 8
# only in up to 16 splits.
MEASURED = (
    Faster(1, 8, False, Shape(1, 128, 8, 64, 8, whole=32)),
    Faster(1, 16, False, Shape(1, 128, 4, 64, 8, whole=32)),
    Faster(1, 32, False, Shape(1, 128, 4, 32, 4, whole=32)),
    Faster(2, 16, False, Shape(1, 128, 4, 32, 4, whole=32)),
    Faster(1, 32, True, Shape(1, 128, 8, 64, 8, whole=16)),
    Faster(1, 64, True, Shape(1, 128, 4, 16, 8)),
    Faster(1, 128, True, Shape(1, 128, 2, 16, 4)),
    Faster(2, 16, True, Shape(1, 128, 8, 64, 4)),
    Faster(2, 32, True, Shape(1, 128, 4, 32, 4)),
    Faster(4, 16, True, Shape(2, 128, 8, 32, 4)),
    Faster(4, 32, True, Shape(2, 128, 8, 16, 4)),
    Faster(8, 8, True, Shape(4, 128, 4, 16, 8)),
    Faster(8, 16, True, Shape(4, 128, 8, 16, 4)),
)


def choose(
    slots: int, heads: int, latent: int, values: int, quantization: str = "none"
) -> Shape | None:
    """The shape for `slots` query rows and results of `values` columns a head; None: separate."""
    for row in MEASURED:
        served = slots <= row.slots and heads <= row.heads and row.group == in_groups(quantization)
        if served and not row.shape.unsuited(slots, latent, values, quantization):
            return row.shape
    return None


def slots_of(given: Inputs) -> int:
    """Slots of `epilogue_kernel`: query rows as if all sequences had as many, or all rows."""
    step = given.plan.step
    assert step is not None, "the caller has refreshed the plan"
    return max(step.batch * step.max_query_len, step.num_tokens)


def chosen(given: Inputs) -> Shape | None:
    """The shape for these inputs; None where nothing, or separate launches, follow the decode."""
    if (epilogue := given.epilogue) is None:
        return None
    heads, latent, values = epilogue.w_uv.shape
    return choose(slots_of(given), heads, latent, values, epilogue.quantization)


def launch(given: Inputs, shape: Shape) -> None:
    """The epilogue in one kernel; a ValueError where the shape does not suit these inputs."""
    from mla_fusion.attention.triton import epilogue_kernel

    assert given.epilogue is not None
    heads, latent, values = given.epilogue.w_uv.shape
    slots = slots_of(given)
    if why := shape.unsuited(slots, latent, values, given.epilogue.quantization):
        raise ValueError(f"{shape} does not suit {slots} query rows: {why}; take another shape")
    grid = (-(-slots // shape.rows), values // shape.columns * shape.slices, heads)
    args, options = arguments(given, shape)
    epilogue_kernel.epilogue_kernel[grid](*args, **options)


def multiply(given: Inputs) -> None:
    """The product of the latents in `out`, which the reduction has merged, and a quantization."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    (heads, _, values), product = epilogue.w_uv.shape, epilogue.out
    if epilogue.scale is not None:
        # torch.bmm cannot write fp8. Under capture this comes from the graph's own pool.
        product = latents.new_empty((len(latents), heads * values))
    if has_hopper(latents.device) and not for_hopper.product(given):
        from mla_fusion.attention.hopper import product as hopper_product

        grid, args, options = hopper_product.arguments(given, product)
        hopper_product.kernel[grid](*args, **options)
    else:
        target = product.view(-1, heads, values).transpose(0, 1)
        torch.bmm(latents.transpose(0, 1), epilogue.w_uv, out=target)
    if epilogue.scale is not None:
        quantize(product, epilogue)


def quantize(product: torch.Tensor, epilogue: Epilogue) -> None:
    """Quantize a dense product [T, H * V]."""
    from mla_fusion.attention.triton.epilogue_kernel import quantize_kernel

    args, options = quantize_arguments(product, epilogue)
    quantize_kernel[len(product), -(-product.shape[1] // GROUP)](*args, **options)


def arguments(given: Inputs, shape: Shape) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of `epilogue_kernel`."""
    plan, epilogue, latents = given.plan, given.epilogue, given.out
    assert plan.step is not None and epilogue is not None
    step, w_uv, out = plan.step, epilogue.w_uv, epilogue.out
    args = (
        plan.partial_output, plan.partial_lse, plan.reduce_indptr, plan.reduce_partial_map,
        plan.qo_indptr, latents, given.or_unused(given.lse), plan.epilogue_sums,
        plan.epilogue_counts, w_uv, out, given.or_unused(epilogue.scale),
        step.batch, step.num_tokens, step.max_query_len, latents.shape[1], *latents.stride()[:2],
        *w_uv.stride(), out.stride(0), *_scale_strides(epilogue),
    )  # fmt: skip
    latent = plan.settings.v_head_dim
    cut, whole_cut = (
        Cut(of.columns, of.slices, _latents(of.columns, latent // of.slices), of.splits)
        for of in (shape, shape.of_few_splits(latent, epilogue.quantization))
    )
    warp = 64 if torch.version.hip else 32  # threads
    warps = max(1, shape.warps * 32 // warp)
    # Of a smaller tile of one split threads would be left over: they would take other splits, which
    # meet through shared memory.
    least = 4 * warp * warps
    aligned = latents.data_ptr() % 8 == 0 and not any(n % 4 for n in latents.stride()[:2])
    kind, most, limit = _quantization(epilogue).values()
    form = Form(
        L=latent, V=w_uv.shape[2], HEADS=plan.layout.per_work, FOLD=plan.layout.fold,
        ROWS=shape.rows, DOT_ROWS=max(LEAST, shape.rows), CUT=cut, WHOLE=shape.whole,
        WHOLE_CUT=whole_cut, VECTORS=least if aligned else 0, QUANTIZATION=kind, LARGEST=most,
        LSE=given.lse is not None, AMD=torch.version.hip is not None,
    )  # fmt: skip
    options = {"FORM": form, "LIMIT": limit, "num_warps": warps}
    return args, options | early_launch(latents.device)


def _latents(columns: int, latent: int) -> int:
    """Rows of W_UV that a CTA holds: a power of two that divides `latent`, all it has. They go
    through shared memory, of which gfx942 has 64 KiB; more registers spill."""
    most = 2**14 if torch.version.hip else 2**15
    return min(latent & -latent, most // columns)


def quantize_arguments(
    product: torch.Tensor, epilogue: Epilogue
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of `quantize_kernel`."""
    out = epilogue.out
    args = (product, out, epilogue.scale, out.stride(0), *_scale_strides(epilogue))
    options = {"WIDTH": product.shape[1], "GROUP": GROUP, **_quantization(epilogue)}
    return args, options | {"num_warps": 1} | early_launch(out.device)


def _scale_strides(epilogue: Epilogue) -> tuple[int, ...]:
    scale = epilogue.scale
    return (0, 0) if scale is None or scale.dim() == 1 else scale.stride()


def _quantization(epilogue: Epilogue) -> dict[str, Any]:
    """Constants of both kernels. A negative LIMIT: the conversion clamps by itself."""
    out = epilogue.out
    most = largest(out.dtype) if epilogue.scale is not None else 0.0
    limit = -most if out.is_cuda and torch.version.hip is None else most
    return {"QUANTIZATION": epilogue.quantization, "LARGEST": most, "LIMIT": limit}
