"""The arguments that decode kernels share.

Strides are in elements.
"""

import dataclasses
import functools
from typing import Any

from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import CacheLayout


@dataclasses.dataclass(frozen=True)
class Form:
    """Compile-time constants of a decode kernel. ENTRY: stride of tokens in a page of
    PAGE. HEADS, FOLD: of the plan's layout. SPARSE: the table lists slots. A sequence is FIRST
    tokens of the first scope, then those of the `EXTRA_` scope. SINK, LSE: whether there is one.
    CHUNKS: most neighbouring items of a CTA are of one query."""

    L: int
    R: int
    HEADS: int
    FOLD: int
    ENTRY: int
    PAGE: int
    EXTRA_ENTRY: int
    EXTRA_PAGE: int
    FIRST: int
    SPARSE: bool
    SINK: bool
    LSE: bool
    layout: CacheLayout | None
    CHUNKS: bool


# One object for each shape: all layers of a step have it, and Triton looks its launches up by it.
_form_of = functools.cache(Form)


def grid(given: Inputs, rows: int) -> tuple[int, int]:
    """CTAs of the plan, and blocks of `rows` query rows of a work item."""
    return given.plan.rules.ctas, -(-given.rows // rows)


def form(given: Inputs) -> Form:
    """The constants of a decode."""
    (latent, rope), layout = given.widths, given.plan.layout
    cache, sparse = given.kv_cache, given.sparse
    extra = cache if sparse is None else sparse.extra.kv_cache
    return _form_of(
        L=latent, R=rope, HEADS=layout.per_work, FOLD=layout.fold,
        ENTRY=given.entry(cache), PAGE=cache.shape[1],
        EXTRA_ENTRY=given.entry(extra), EXTRA_PAGE=extra.shape[1],
        FIRST=0 if sparse is None else sparse.first, SPARSE=sparse is not None,
        SINK=given.sink is not None, LSE=given.lse is not None, layout=given.layout,
        CHUNKS=given.plan.settings.batch_invariant,
    )  # fmt: skip


def common(given: Inputs) -> dict[str, Any]:
    """The arguments of decode kernels, less the caches.

    q_ptr is [T, H, L + R], out_ptr [T, H, L], lse_ptr [T, H] fp32. The plan's have the shapes of
    `PlanBuffers`. table_ptr and extra_table_ptr are [B, columns] int32, the same in a dense decode;
    first_lens_ptr is `Sparse.lens`, sink_ptr [H] fp32. q_scale_ptr and kv_scale_ptr are one fp32
    element each, read where query and cache are fp8. scale: of the scores, before these two.
    """
    q, out, plan, table, sparse = given.q, given.out, given.plan, given.block_table, given.sparse
    extra, lens = table, plan.kv_indptr
    if sparse is not None:
        extra, lens = sparse.extra.table, sparse.lens
    q_stride_t, q_stride_h, _ = q.stride()
    out_stride_t, out_stride_h, _ = out.stride()
    return {
        "q_ptr": q, "q_stride_t": q_stride_t, "q_stride_h": q_stride_h, "heads": q.shape[1],
        "out_ptr": out, "out_stride_t": out_stride_t, "out_stride_h": out_stride_h,
        "lse_ptr": given.or_unused(given.lse),
        "partial_ptr": plan.partial_output, "partial_lse_ptr": plan.partial_lse,
        "work_indptr_ptr": plan.work_indptr, "work_info_ptr": plan.work_info_set,
        "qo_indptr_ptr": plan.qo_indptr, "kv_indptr_ptr": plan.kv_indptr, "fresh": int(plan.fresh),
        "table_ptr": table, "table_stride": table.stride(0), "first_lens_ptr": lens,
        "extra_table_ptr": extra, "extra_table_stride": extra.stride(0),
        "sink_ptr": given.or_unused(given.sink), "scale": float(given.softmax_scale),
        "q_scale_ptr": given.or_unused(given.q_scale),
        "kv_scale_ptr": given.or_unused(given.kv_scale), "FORM": form(given),
    }  # fmt: skip


def caches(given: Inputs) -> dict[str, Any]:
    """The caches of both scopes [blocks, page_size, L + R]; one of bytes counts as its e4m3 values.
    Without a second scope the first one is both."""
    cache, sparse = given.kv_cache, given.sparse
    extra = cache if sparse is None else sparse.extra.kv_cache
    if given.layout is not None:
        dtype = given.plan.settings.kv_dtype
        cache, extra = cache.view(dtype), extra.view(dtype)
    return {
        "kv_ptr": cache, "block_stride": cache.stride(0),
        "extra_ptr": extra, "extra_block_stride": extra.stride(0),
    }  # fmt: skip
