"""The launch of the decode kernel for Hopper over `layouts.FP8_DS_MLA`: where, and with what.

It reads one scope of entries that hold their own scales. Two scopes and `FP8_DS_MLA_V4` are left to
the portable kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention.heads import layout as head_layout
from mla_fusion.kernels.arithmetic import FP8_DTYPES

if TYPE_CHECKING:
    from mla_fusion.attention.layouts import CacheLayout
    from mla_fusion.attention.validate import Inputs

ROWS = 16  # most query rows of which two programs fit a multiprocessor


def is_sm90(device: torch.device) -> bool:
    """Whether a device is a GPU of the Hopper architecture."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def serves(device: torch.device, layout: CacheLayout, first: int) -> bool:
    """Whether the kernel reads such entries; `first`: columns of the first of two scopes, or 0."""
    return is_sm90(device) and not layout.behind and first == 0


def workers(
    num_heads: int, widths: tuple[int, ...], kv_dtype: torch.dtype, device: torch.device
) -> int | None:
    """Workers of a sparse plan over entries of bytes; None for the plan's default."""
    rows = head_layout(num_heads, 1).per_work
    if not is_sm90(device) or rows > ROWS or len(widths) > 1 or kv_dtype not in FP8_DTYPES:
        return None
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def launch(given: Inputs, sink: torch.Tensor | None, rows: int, warps: int, stages: int) -> None:
    """The decode of pieces, and of tokens without any."""
    from mla_fusion.attention import hopper_packed

    plan = given.plan
    args, options = arguments(given, sink, rows, warps, stages)
    grid = plan.rules.workers, -(-plan.heads_per_work // rows)
    hopper_packed.decode_kernel[grid](*args, **options)


def arguments(
    given: Inputs, sink: torch.Tensor | None, rows: int, warps: int, stages: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of the kernel (also for compiling without a GPU).

    rows, warps, stages: as in `triton.Config`.
    """
    q, cache, table, plan, out = given.q, given.kv_cache, given.block_table, given.plan, given.out
    unused = plan.partial_lse
    args = (
        q,
        *(cache.view(dtype) for dtype in (plan.settings.kv_dtype, torch.bfloat16, torch.float32)),
        table,
        unused if sink is None else sink,
        out,
        unused if given.lse is None else given.lse,
        plan.partial_output,
        plan.partial_lse,
        plan.work_indptr,
        plan.work_info_set,
        plan.qo_indptr,
        plan.kv_indptr,
        float(given.softmax_scale),
        q.shape[1],
        *q.stride()[:2],
        *out.stride()[:2],
        table.stride(0),
        cache.stride(0) // 16,
        int(plan.fresh),
    )
    return args, {
        "ENTRY": cache.stride(1),
        "PAGE": cache.shape[1],
        "SINK": sink is not None,
        "L": plan.settings.v_head_dim,
        "R": q.shape[2] - plan.settings.v_head_dim,
        "HEADS": plan.heads_per_work,
        "FOLD": plan.fold,
        "ROWS": rows,
        "STAGES": stages,
        "LSE": given.lse is not None,
        "WARPS": warps,
        "num_warps": warps,
        "launch_pdl": True,
    }
