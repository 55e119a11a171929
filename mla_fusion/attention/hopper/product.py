"""The product of merged latents with W_UV for Hopper (sm_90), in Gluon: y[t, h] = x[t, h] W_UV[h].

It is launched before the reduction in front has ended, and has W_UV in shared memory when the
latents are there. What is left is their trip, one chain of WGMMA and a store. `torch.bmm` is
launched behind the reduction, and reads W_UV then.

y^T [V, rows] = W_UV^T [V, L] x^T [L, rows] is computed: WGMMA needs M >= 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.common import async_load, barrier, load_layout, tma_load
from mla_fusion.attention.hopper.fits import PRODUCT_COLUMNS, product_rows
from mla_fusion.attention.hopper.fits import product as fits

if TYPE_CHECKING:
    import torch

    from mla_fusion.attention.plan.inputs import Inputs

__all__ = ["arguments", "fits", "kernel"]

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
    """Copy rows of latents into `target` [rows, L]; zeros from row `left` on."""
    layout: gl.constexpr = load_layout(target.shape[1], target.dtype, gl.num_warps())
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    async_load(target, pointer + row[:, None] * stride_t + col[None, :], mask=(row < left)[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    hopper.fence_async_shared()
    barrier()


# Do not specialize on one token: the warm-up would compile another variant.
@gluon.jit(do_not_specialize=["tokens"])
def product_kernel(
    latent_ptr, w, out_ptr, tokens, latent_stride_t, latent_stride_h, out_stride_t, w_step,
    L: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, DENSE: gl.constexpr,
    FOLLOWED: gl.constexpr,
):  # fmt: skip
    """COLUMNS columns, block `program_id(0)`, of head `program_id(1)`; ROWS tokens.

    w: descriptor of W_UV as `weights_of` has it; w_step: rows or columns of it from head to head.
    W_UV does not change between launches: only the latents wait for the kernel in front. FOLLOWED:
    a quantization may be launched, as in `reduce_kernel`.
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
    gdc.gdc_wait()
    if FOLLOWED:
        gdc.gdc_launch_dependents()
    first = gl.program_id(2) * ROWS
    pointer = latent_ptr + first.to(gl.int64) * latent_stride_t + head * latent_stride_h
    copy_latents(latents, pointer, latent_stride_t, tokens - first)
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
    pointers = out_ptr + (row.to(gl.int64) * out_stride_t)[None, :] + col[:, None]
    gl.store(pointers, y, mask=(row < tokens)[None, :])


kernel: Any = product_kernel


def weights_of(given: Inputs) -> tuple[TensorDescriptor, int, str]:
    """W_UV as a matrix with the columns of all heads: its descriptor, how many of them lie from
    one head to the next, and the dimension in which it is dense."""
    assert given.epilogue is not None
    w_uv = given.epilogue.w_uv
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


def arguments(
    given: Inputs, out: torch.Tensor
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """What the kernel is launched with (also for compiling without a GPU); out: [T, H * V]."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    tokens = len(latents)
    heads, latent, values = epilogue.w_uv.shape
    w, step, dense = weights_of(given)
    rows = product_rows(tokens)
    options = {
        "L": latent, "V": values, "ROWS": rows, "DENSE": dense,
        "FOLLOWED": epilogue.scale is not None, "num_warps": PRODUCT_COLUMNS // 16,
        "launch_pdl": True,
    }  # fmt: skip
    args = latents, w, out, tokens, *latents.stride()[:2], out.stride(0), step
    return (values // PRODUCT_COLUMNS, heads, -(-tokens // rows)), args, options
