"""The decode kernel for Hopper (sm_90) over byte caches (`plan/layouts.py`): warp-specialized.

As `warp_specialized.py` with bf16, of which it takes the query, the softmax and the stores. Four
warps gather the listed entries and dequantize them, once for all query rows of a CTA
(`sparse_specialized_gather.py`). Two warpgroups multiply them (`sparse_specialized_products.py`).
V4's entries have no rotated part beside their latents.

Fewer than 64 query rows are padded: the products of 64 take less time than the gather.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.copy import barrier
from mla_fusion.attention.hopper.fits import sparse_specialized as fits
from mla_fusion.attention.hopper.sparse_specialized_gather import Form, Scopes, gather
from mla_fusion.attention.hopper.sparse_specialized_products import Tiles, multiply, score
from mla_fusion.attention.hopper.warp_specialized import new_barriers
from mla_fusion.attention.hopper.warp_specialized_copy import (
    ROWS,
    TILE,
    WARPS,
    Boxes,
    Probabilities,
    Query,
    Work,
    query_boxes,
)
from mla_fusion.attention.plan.device_code import LOG2E, Target

if TYPE_CHECKING:
    from mla_fusion.attention.plan.inputs import Inputs, Launch

__all__ = ["arguments", "fits", "kernel"]


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(
    do_not_specialize=["table_stride", "extra_table_stride", "units", "extra_units", "fresh"]
)
def decode_kernel(
    table_ptr, extra_table_ptr, lens_ptr, sink_ptr, cache_ptr, extra_cache_ptr, out_ptr, lse_ptr,
    partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, qo_indptr_ptr, kv_indptr_ptr,
    scale, heads, out_stride_t, out_stride_h, table_stride, extra_table_stride, units, extra_units,
    q_halves, q_quarters, q_rotated, fresh, FORM: gl.constexpr, SINK: gl.constexpr,
    HEADS: gl.constexpr, FOLD: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Arguments as `triton.decode_kernel`, caches as `sparse_specialized_gather.Scopes`, and
    descriptors of the query; `fresh` as `hopper.decode` has it, which is launched as early.
    """
    if fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = gl.bfloat16
    BUFFERS: gl.constexpr = 2
    R: gl.constexpr = FORM.rotated
    HALF: gl.constexpr = q_halves.block_type.shape[2]
    PART: gl.constexpr = q_quarters.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys = gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, 2 * HALF], layout)
    q_left = gl.allocate_shared_memory(TYPE, [ROWS, HALF], layout)
    # Without a rotated part nothing reads these two.
    ropes, q_ropes = keys, q_left
    if R > 0:
        ropes = gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, R], layout)
        q_ropes = gl.allocate_shared_memory(TYPE, [ROWS, R], layout)
    tiles = Tiles(
        keys,
        ropes,
        gl.allocate_shared_memory(gl.int32, [BUFFERS, TILE], line),
        new_barriers(BUFFERS),
        new_barriers(BUFFERS, 2),
    )
    made = new_barriers(4)
    query = Query(
        Boxes(q_halves, q_quarters, q_rotated),
        q_left,
        gl.allocate_shared_memory(TYPE, [2, ROWS, PART], layout),
        q_ropes,
        made.index(2),
        made.index(3),
    )
    shared = Probabilities(
        gl.allocate_shared_memory(TYPE, [ROWS, TILE], layout),
        gl.allocate_shared_memory(gl.float32, [ROWS], line),
        made.index(0),
        made.index(1),
    )
    work = Work(
        work_indptr_ptr, work_info_ptr, qo_indptr_ptr, kv_indptr_ptr, table_ptr, table_stride,
        gl.program_id(1) * ROWS,
    )  # fmt: skip
    scopes = Scopes(
        cache_ptr, units, extra_cache_ptr, extra_units, extra_table_ptr, extra_table_stride,
        lens_ptr,
    )  # fmt: skip
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (score, (
                work, query, tiles, shared, target, sink_ptr, scale * LOG2E, R, SINK, HEADS, FOLD,
                LSE,
            )),
            (multiply, (work, tiles, shared, target, HEADS, FOLD)),
            (gather, (work, query, tiles, scopes, FORM, HEADS, FOLD)),
        ],
        [4, 4],
        [184, 104],
    )  # fmt: skip
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


kernel: Any = decode_kernel


def arguments(given: Inputs) -> Launch:
    """What the kernel is launched with (also for compiling without a GPU)."""
    layout, sparse, plan = given.layout, given.sparse, given.plan
    assert layout is not None and sparse is not None, "`fits` has asked for both"
    caches = given.kv_cache, sparse.extra.kv_cache
    halves, quarters, *rotated = query_boxes(given.q, given.widths[0], plan.heads_per_work)
    args = (
        given.block_table,
        sparse.extra.table,
        sparse.lens,
        given.or_unused(sparse.sink),
        *(cache.view(torch.int32) for cache in caches),
        *given.results,
        *given.scales[2:],
        *given.strides[2:],
        sparse.extra.table.stride(0),
        *(cache.stride(0) // 16 for cache in caches),
        halves,
        quarters,
        *(rotated or [quarters]),
        int(plan.fresh),
    )
    options = {
        "FORM": Form(
            entry=given.entry(given.kv_cache) // 16,
            page=given.kv_cache.shape[1],
            extra_page=sparse.extra.kv_cache.shape[1],
            first=sparse.first,
            codes=layout.quantized,
            group=layout.group,
            behind=layout.behind,
            rotated=given.widths[1],
        ),
        "SINK": sparse.sink is not None,
        "HEADS": plan.heads_per_work,
        "FOLD": plan.fold,
        "LSE": given.lse is not None,
        "launch_pdl": True,
        "num_warps": WARPS.value,
    }
    return given.grid(ROWS.value), args, options
