"""What a plan is allocated for: checked, completed, and with its planner chosen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from mla_fusion.attention import heads, selection
from mla_fusion.attention.planner import Rules
from mla_fusion.kernels import ProviderUnavailable

if TYPE_CHECKING:
    from mla_fusion.attention.heads import HeadLayout

PLANNERS = ("auto", "portable", "aiter")
OVERHEAD = 16  # fixed cost of a work item in blocks: AITER's


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `PersistentDecodePlan.allocate`, completed.

    planner: "portable" or "aiter". why_not_aiter: why it is the former, where it was not asked for.
    """

    max_batch: int
    max_query_len: int
    layout: HeadLayout
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    v_head_dim: int
    rules: Rules
    planner: str
    why_not_aiter: str


def complete(
    *,
    max_batch: int,
    max_query_len: int,
    num_heads: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    workers: int | None,
    heads_per_work: int | None,
    max_split_per_batch: int,
    kv_granularity: int,
    overhead: int | None,
    v_head_dim: int,
    planner: str,
) -> Settings:
    """See `PersistentDecodePlan.allocate`."""
    at_least_1 = {
        "max_batch": max_batch,
        "max_query_len": max_query_len,
        "num_heads": num_heads,
        "workers": workers,
        "kv_granularity": kv_granularity,
        "overhead": overhead,
        "v_head_dim": v_head_dim,
    }
    for name, value in at_least_1.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_split_per_batch < 1 and max_split_per_batch != -1:
        raise ValueError(
            f"max_split_per_batch must be -1 (no cap) or at least 1, got {max_split_per_batch}"
        )
    if planner not in PLANNERS:
        raise ValueError(f"unknown planner {planner!r}: choose one of {', '.join(PLANNERS)}")
    fixed = {"workers": workers, "heads_per_work": heads_per_work, "overhead": overhead}
    layout = heads.layout(num_heads, max_query_len, heads_per_work)
    why_not = ""
    if planner != "portable":
        verdict = selection.aiter_verdict(
            num_heads, max_query_len, q_dtype, kv_dtype, max_batch, selection.architecture(device)
        )
        why_not = _against_aiter(verdict, fixed, kv_granularity, optional=planner == "auto")
        if planner == "aiter" and why_not:
            raise ValueError(f'planner="aiter" is not possible: {why_not}')
        planner = "portable" if why_not else "aiter"
        layout = layout if why_not else verdict.layout
    rules = Rules(
        workers=selection.multiprocessors(device) if workers is None else workers,
        fold=layout.fold,
        granularity=kv_granularity,
        overhead=OVERHEAD if overhead is None else overhead,
        max_split_per_batch=max_split_per_batch,
    )
    return Settings(
        max_batch, max_query_len, layout, q_dtype, kv_dtype, v_head_dim, rules, planner, why_not
    )


def _against_aiter(
    verdict: selection.Verdict, fixed: dict[str, int | None], granularity: int, *, optional: bool
) -> str:
    """Why AITER's planner cannot be used; where it is optional, also why it should not be."""
    given = [name for name, value in fixed.items() if value is not None]
    if given:
        return f"{' and '.join(given)} can be chosen for the portable planner alone"
    if granularity & (granularity - 1):
        return f"AITER's planner takes a power of two as kv_granularity, got {granularity}"
    if verdict.unsupported:
        return verdict.unsupported
    if optional and verdict.slower:
        return verdict.slower
    from mla_fusion.attention import aiter

    try:
        aiter.require()
    except ProviderUnavailable as error:
        if not optional:
            raise
        return str(error)
    return ""
