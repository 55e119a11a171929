"""What the decode kernel for Hopper over `plan.layouts.FP8_DS_MLA` is launched with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mla_fusion.attention.plan.inputs import Inputs


def arguments(
    given: Inputs, sink: torch.Tensor | None, rows: int, warps: int, stages: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of the kernel (also for compiling without a GPU).

    rows, warps, stages: as in `triton_choice.Config`.
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
        *plan.of_decode,
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
