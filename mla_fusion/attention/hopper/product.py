"""The product of merged latents with W_UV for Hopper (sm_90), in Gluon: y[t, h] = x[t, h] W_UV[h],
and its quantization, if there is one.

It is launched before the reduction in front has ended, and has W_UV in shared memory when the
latents are there. What is left is their trip, one chain of WGMMA and a store. `torch.bmm` is
launched behind the reduction, and reads W_UV then. Of many sequences it merges the splits itself
(`merge.py`), and no reduction runs.

y^T [V, rows] = W_UV^T [V, L] x^T [L, rows] is computed: WGMMA needs M >= 64. A CTA has all columns
of a group, so it finds the group's maximum.

The bits of a row depend on its own latents alone, because a sum is one chain of instructions, and a
scale is given or its row's. Under a batch-invariant plan all steps have CTAs of as many rows.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.cards import PRODUCT_COLUMNS, merged_rows, merges, product_rows
from mla_fusion.attention.hopper.common import async_load, barrier, load_layout, tma_load
from mla_fusion.attention.hopper.merge import MERGED, Splits, merge_latents, row_layout, splits_of
from mla_fusion.attention.plan.device_code import LEAST_SCALE, power_of_two
from mla_fusion.attention.plan.epilogue import largest
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch

BOX = gl.constexpr(256)  # most rows of a copy by the tensor copy engine
COLUMNS = gl.constexpr(PRODUCT_COLUMNS)


@gluon.jit
def copy_weights(weights, w, arrived, first, DENSE: gl.constexpr):
    """Have the copy engine copy columns `first` ... of W_UV; DENSE: in which dimension it is."""
    mbarrier.expect(arrived, weights.shape[0] * weights.shape[1] * 2)
    if DENSE == "L":
        tma_load(w, [first, 0], arrived, weights)
    else:
        for i in gl.static_range(weights.shape[0] // BOX):
            tma_load(w, [i * BOX, first], arrived, weights.slice(i * BOX, BOX))


@gluon.jit
def copy_latents(target, pointer, stride_t, left):
    """Copy rows of latents into `target` [rows, L], when the kernel in front has ended; zeros from
    row `left` on."""
    gdc.gdc_wait()
    layout: gl.constexpr = load_layout(target.shape[1], target.dtype, gl.num_warps())
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    async_load(target, pointer + row[:, None] * stride_t + col[None, :], mask=(row < left)[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def in_groups(y, QUANTIZATION: gl.constexpr, LARGEST: gl.constexpr):
    """Columns of fp32 `y` [COLUMNS, rows] over their scales, and these [rows].

    y * (1 / scale) and one Newton step are the rounded quotient (Markstein), without the branch of
    a division for zeros, which padding has.
    """
    most = gl.maximum(gl.max(gl.abs(y), 0), LEAST_SCALE)
    scale = gl.div_rn(most, gl.full_like(most, LARGEST))
    if QUANTIZATION == "group_ue8m0":
        scale = power_of_two(scale)
    inverse = gl.div_rn(gl.full_like(scale, 1.0), scale)[None, :]
    quotient = y * inverse
    return gl.fma(gl.fma(-quotient, scale[None, :], y), inverse, quotient), scale


# Do not specialize on one token, nor on a stride of 1: the warm-up would compile another variant.
@gluon.jit(do_not_specialize=["batch", "tokens", "scale_ptr", "scale_stride_t", "scale_stride_g"])
def mla_product(
    latent_ptr, w, out_ptr, scale_ptr, lse_ptr, partial_ptr, partial_lse_ptr, reduce_indptr_ptr,
    reduce_partial_map_ptr, qo_indptr_ptr, batch, heads, tokens, latent_stride_t, latent_stride_h,
    out_stride_t, scale_stride_t, scale_stride_g, w_step, L: gl.constexpr, V: gl.constexpr,
    ROWS: gl.constexpr, DENSE: gl.constexpr, QUANTIZATION: gl.constexpr, LARGEST: gl.constexpr,
    HEADS: gl.constexpr, FOLD: gl.constexpr, LSE: gl.constexpr, MERGES: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns, block `program_id(0)`, of head `program_id(1)`; ROWS tokens. MERGES: it
    takes the place of the reduction, else it is launched behind that.

    w: descriptor of W_UV as `weights_of` has it; w_step: rows or columns of it from head to head.
    W_UV and a given scale do not change between launches: only the latents wait for the kernel in
    front. QUANTIZATION: of an `Epilogue`; LARGEST: of its fp8 type. Conversions to that saturate.
    """
    TYPE: gl.constexpr = latent_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SHAPE: gl.constexpr = [COLUMNS, L] if DENSE == "L" else [L, COLUMNS]
    weights = gl.allocate_shared_memory(TYPE, SHAPE, wide)
    latents = gl.allocate_shared_memory(TYPE, [ROWS, L], wide)
    arrived = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(arrived, count=1)
    hopper.fence_async_shared()
    barrier()
    column = gl.program_id(0) * COLUMNS
    head = gl.program_id(1)
    copy_weights(weights, w, arrived, head * w_step + column, DENSE)
    if QUANTIZATION == "tensor":
        inverse = gl.div_rn(1.0, gl.load(scale_ptr))
    first = gl.program_id(2) * ROWS
    pointer = latent_ptr + first.to(gl.int64) * latent_stride_t + head * latent_stride_h
    left = tokens - first
    if MERGES:
        of_row: gl.constexpr = row_layout(MERGED // ROWS, WARPS)
        token = first + gl.arange(0, ROWS, of_row)
        plan = Splits(
            qo_indptr_ptr, batch, reduce_indptr_ptr, reduce_partial_map_ptr, partial_ptr,
            partial_lse_ptr,
        )  # fmt: skip
        begin, count, row = splits_of(plan, token, head, HEADS, FOLD)
        if gl.max(count, 0) > 0:
            pointers = latent_ptr + token.to(gl.int64) * latent_stride_t + head * latent_stride_h
            lses = lse_ptr + token.to(gl.int64) * heads + head
            merge_latents(latents, plan, begin, count, row, pointers, lses, left, HEADS, LSE)
        else:
            copy_latents(latents, pointer, latent_stride_t, left)
    else:
        copy_latents(latents, pointer, latent_stride_t, left)
    mbarrier.wait(arrived, 0)
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    w_tile = weights if DENSE == "L" else weights.permute((1, 0))
    y = gl.zeros([COLUMNS, ROWS], gl.float32, sums)
    y = hopper.warpgroup_mma(w_tile, latents.permute((1, 0)), y, use_acc=False, is_async=True)
    y = hopper.warpgroup_mma_wait(0, [y])
    # Eight neighbours a thread.
    stored: gl.constexpr = gl.BlockedLayout(
        [8, 1], [COLUMNS // 8, 256 // COLUMNS], [1, WARPS], [0, 1]
    )
    y = gl.convert_layout(y.to(TYPE), stored)
    row = first + gl.arange(0, ROWS, gl.SliceLayout(0, stored))
    col = head * V + column + gl.arange(0, COLUMNS, gl.SliceLayout(1, stored))
    token = row.to(gl.int64)
    if QUANTIZATION == "tensor":
        y = y.to(gl.float32) * inverse
    elif QUANTIZATION != "none":
        y, scale = in_groups(y.to(gl.float32), QUANTIZATION, LARGEST)
        group = (head * V + column) // COLUMNS
        scales = scale_ptr + token * scale_stride_t + group * scale_stride_g
        gl.store(scales, scale, mask=row < tokens)
    pointers = out_ptr + (token * out_stride_t)[None, :] + col[:, None]
    gl.store(pointers, y.to(out_ptr.dtype.element_ty), mask=(row < tokens)[None, :])


def weights_of(w_uv: torch.Tensor) -> tuple[TensorDescriptor, int, str]:
    """W_UV as a matrix with the columns of all heads: its descriptor, how many of them lie from
    one head to the next, and the dimension in which it is dense."""
    heads, latent, values = w_uv.shape
    head, row, column = w_uv.stride()
    if row == 1:
        step, stride, box = head // column, column, [PRODUCT_COLUMNS, latent]
        shape = [(heads - 1) * step + values, latent]
    else:
        step, stride, box = head, row, [BOX.value, PRODUCT_COLUMNS]
        shape = [latent, (heads - 1) * step + values]
    w = TensorDescriptor(w_uv, shape, [stride, 1], box, common.tile_layout(box[1], 2, 2))
    return w, step, "L" if row == 1 else "V"


def launch_of(given: Inputs) -> Launch:
    """The launch of the product of a decode with its epilogue."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    out, tokens, plan = epilogue.out, len(latents), given.plan
    assert plan.step is not None, "the caller has refreshed the plan"
    heads, latent, values = epilogue.w_uv.shape
    w, w_step, dense = weights_of(epilogue.w_uv)
    if is_merging := merges(given):
        rows = merged_rows(plan.step.batch * plan.layout.fold, tokens, heads, values)
    else:
        rows = product_rows(tokens, heads, values, plan.settings.batch_invariant)
    (stride_t, stride_h, _), (scale_t, scale_g) = latents.stride(), epilogue.scale_strides
    arguments = {
        "latent_ptr": latents, "w": w, "out_ptr": out,
        "scale_ptr": given.or_unused(epilogue.scale), "tokens": tokens,
        "latent_stride_t": stride_t, "latent_stride_h": stride_h, "out_stride_t": out.stride(0),
        "scale_stride_t": scale_t, "scale_stride_g": scale_g, "w_step": w_step, "L": latent,
        "V": values, "ROWS": rows, "DENSE": dense, "QUANTIZATION": epilogue.quantization,
        "LARGEST": largest(out.dtype),
        "partial_ptr": plan.partial_output, "partial_lse_ptr": plan.partial_lse,
        "reduce_indptr_ptr": plan.reduce_indptr, "reduce_partial_map_ptr": plan.reduce_partial_map,
        "qo_indptr_ptr": plan.qo_indptr, "batch": plan.step.batch, "heads": heads,
        "lse_ptr": given.or_unused(given.lse), "LSE": given.lse is not None,
        "HEADS": plan.layout.per_work, "FOLD": plan.layout.fold, "MERGES": is_merging,
    }  # fmt: skip
    grid = values // PRODUCT_COLUMNS, heads, -(-tokens // rows)
    options = {"num_warps": PRODUCT_COLUMNS // 16, "launch_pdl": True}
    return Launch(mla_product, grid, arguments, options)
