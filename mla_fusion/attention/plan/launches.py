"""Launches by the names of a kernel's parameters, and the arguments that decode kernels share.

`common` has the arguments of every decode kernel, and each function behind it those that some
kernels read beside them. Strides are in elements.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import CacheLayout


class Launch(NamedTuple):
    """The launch of a kernel. grid: CTAs in each dimension. arguments: those of all parameters of
    the kernel, constants too, by name. options: Triton's."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def start(self) -> None:
        """Launch the kernel on the current stream; nothing is waited for."""
        # By position: Triton copies keywords three times, 4 us for 30 of them.
        arguments = [self.arguments[name] for name in self.kernel.arg_names]
        self.kernel[self.grid](*arguments, **self.options)


@dataclasses.dataclass(frozen=True)
class Form:
    """Compile-time constants of a decode kernel. ENTRY: stride of tokens in a page of
    PAGE. HEADS, FOLD: of the plan's layout. SPARSE: the table lists slots. A sequence is FIRST
    tokens of the first scope, then those of the `EXTRA_` scope. SINK, LSE: whether there is one."""

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


# One object for each shape: all layers of a step have it, and Triton looks its launches up by it.
_form_of = functools.cache(Form)


def grid(given: Inputs, rows: int) -> tuple[int, int]:
    """CTAs of the plan, and blocks of `rows` query rows of a work item."""
    return given.plan.rules.ctas, -(-given.rows // rows)


def form(given: Inputs) -> Form:
    """The constants of a decode."""
    (latent, rope), layout = given.widths, given.plan.layout
    cache, extra, sparse = given.kv_cache, given.extra.kv_cache, given.sparse
    return _form_of(
        L=latent, R=rope, HEADS=layout.per_work, FOLD=layout.fold,
        ENTRY=given.entry(cache), PAGE=cache.shape[1],
        EXTRA_ENTRY=given.entry(extra), EXTRA_PAGE=extra.shape[1],
        FIRST=0 if sparse is None else sparse.first, SPARSE=sparse is not None,
        SINK=given.sink is not None, LSE=given.lse is not None, layout=given.layout,
    )  # fmt: skip


def common(given: Inputs) -> dict[str, Any]:
    """The results of a decode, the plan that it reads, the table of its first scope, and `Form`.

    out_ptr is [T, H, L], lse_ptr [T, H] fp32, table_ptr [B, columns] int32; `PlanBuffers` has the
    shapes of the others. scale: of the scores, before the scales of query and cache. heads: H.
    """
    plan, out, table = given.plan, given.out, given.block_table
    stride_t, stride_h, _ = out.stride()
    return {
        "out_ptr": out, "lse_ptr": given.or_unused(given.lse),
        "partial_ptr": plan.partial_output, "partial_lse_ptr": plan.partial_lse,
        "work_indptr_ptr": plan.work_indptr, "work_info_ptr": plan.work_info_set,
        "qo_indptr_ptr": plan.qo_indptr, "kv_indptr_ptr": plan.kv_indptr,
        "table_ptr": table, "table_stride": table.stride(0),
        "scale": float(given.softmax_scale), "heads": given.q.shape[1],
        "out_stride_t": stride_t, "out_stride_h": stride_h, "FORM": form(given),
    }  # fmt: skip


def query(given: Inputs) -> dict[str, Any]:
    """The query [T, H, L + R], of its own type."""
    stride_t, stride_h, _ = given.q.stride()
    return {"q_ptr": given.q, "q_stride_t": stride_t, "q_stride_h": stride_h}


def scales(given: Inputs) -> dict[str, Any]:
    """The scales of query and cache, one fp32 element each, which are read where these are fp8."""
    return {
        "q_scale_ptr": given.or_unused(given.q_scale),
        "kv_scale_ptr": given.or_unused(given.kv_scale),
    }


def caches(given: Inputs) -> dict[str, Any]:
    """The caches of both scopes [blocks, page_size, L + R]; one of bytes counts as its e4m3 values.
    Without a second scope the first one is both."""
    cache, extra = given.kv_cache, given.extra.kv_cache
    if given.layout is not None:
        dtype = given.plan.settings.kv_dtype
        cache, extra = cache.view(dtype), extra.view(dtype)
    return {
        "kv_ptr": cache, "block_stride": cache.stride(0),
        "extra_ptr": extra, "extra_block_stride": extra.stride(0),
    }  # fmt: skip


def scopes(given: Inputs) -> dict[str, Any]:
    """The table of the second scope, [B, columns] int32; how many columns of the first one count,
    [B] int32; and the sinks, [H] fp32."""
    sparse, table = given.sparse, given.extra.table
    lens = given.plan.kv_indptr if sparse is None else sparse.lens
    return {
        "extra_table_ptr": table, "extra_table_stride": table.stride(0),
        "first_lens_ptr": lens, "sink_ptr": given.or_unused(given.sink),
    }  # fmt: skip
