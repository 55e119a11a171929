"""AITER's planner, called for the buffers of this library.

A failed check of AITER may abort the process, and a missing buffer makes it allocate or read other
memory. So Python checks everything first, hands over all six buffers or none, and passes arguments
by keyword: releases inserted new ones in the middle (docs/persistent-decode.md). The contract is
that of AITER's sources from v0.1.10.post2 to v0.1.20; no AMD hardware has run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention import selection
from mla_fusion.attention.buffers import AITER_BUFFERS, Companions, common_buffers
from mla_fusion.kernels import ProviderUnavailable

if TYPE_CHECKING:
    from mla_fusion.attention.buffers import PlanBuffers, Settings

PROVIDERS = ("aiter", "reference")


def require(settings: Settings) -> None:
    """Raise unless AITER can plan for these settings, and is here.

    Raises:
        ValueError: there is no kernel for them; the message says why.
        ProviderUnavailable: AITER is missing or too old.
    """
    if why := _unsupported(settings):
        raise ValueError(f'planner="aiter" is not possible: {why}')
    selection.require()


def why_not(settings: Settings) -> str:
    """Why AITER's planner should not be used: it cannot, or another decode is faster; or empty."""
    if why := _unsupported(settings) or _verdict(settings).slower:
        return why
    try:
        selection.require()
    except ProviderUnavailable as error:
        return str(error)
    return ""


def _unsupported(settings: Settings) -> str:
    """Why AITER has no kernel for these settings; empty if it has."""
    portable_only = ("workers", "heads_per_work", "overhead")
    given = [name for name in portable_only if getattr(settings, name) is not None]
    if given:
        return f"only the portable planner takes {' and '.join(given)}"
    granularity = settings.kv_granularity
    if granularity & (granularity - 1):
        return f"AITER's planner takes a power of two as kv_granularity, got {granularity}"
    latent = settings.v_head_dim
    if latent != selection.LATENT:
        return f"its persistent decode has kernels for latents of {selection.LATENT}, not {latent}"
    return _verdict(settings).unsupported


def _verdict(settings: Settings) -> selection.Verdict:
    return selection.aiter_verdict(
        settings.num_heads, settings.max_query_len, settings.q_dtype, settings.kv_dtype,
        settings.max_batch, selection.architecture(settings.device),
    )  # fmt: skip


def allocate(settings: Settings) -> dict[str, Any]:
    """The fields of a plan; the six buffers are zeroed and of the sizes that AITER asks for.

    Raises:
        ValueError: this AITER cannot size its buffers for the cap.
    """
    size, _, _ = selection.installed_planner()
    cap = settings.max_split_per_batch
    capped = {"max_split_per_batch": cap} if cap > 0 else {}
    if capped and not selection.sizes_with_cap():
        raise ValueError(
            "this AITER sizes its buffers without max_split_per_batch: leave it at -1, or install "
            "v0.1.16 or newer"
        )
    layout = _verdict(settings).layout
    shapes = size(
        settings.max_batch,
        settings.max_query_len,
        layout.padded,
        settings.q_dtype,
        settings.kv_dtype,
        is_sparse=False,
        fast_mode=True,
        **capped,
    )
    device = settings.device
    six = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in zip(AITER_BUFFERS, shapes, strict=True)
    }
    rows = settings.max_batch * settings.max_query_len
    companions = Companions(
        six,
        torch.ones(settings.max_batch, dtype=torch.int32, device=device),
        torch.arange(rows, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.bool, device=device),
        torch.zeros(rows, dtype=torch.bool, device=device),
    )
    rules = settings.rules(layout.fold)
    common = common_buffers(settings, layout, rules, partials=0, scratch=0)
    return {**common, **six, "aiter": companions}


def fill(
    plan: PlanBuffers, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """Copy the lengths of the step and let AITER plan it, in place."""
    batch, companions = seq_lens.shape[0], plan.aiter
    assert companions is not None  # the plan is AITER's
    companions.check(plan)
    for indptr in (plan.qo_indptr, plan.kv_indptr):
        indptr[0].zero_()
    plan.qo_indptr[: batch + 1].copy_(qo_indptr)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=plan.kv_indptr[1 : batch + 1])
    for indptr in (plan.qo_indptr, plan.kv_indptr):
        indptr[batch + 1 :].copy_(indptr[batch].expand_as(indptr[batch + 1 :]))
    _mark_rows(companions, plan.qo_indptr, plan.kv_indptr)
    settings = plan.settings
    _, write, names = selection.installed_planner()
    types = {"dtype_q": settings.q_dtype, "dtype_kv": settings.kv_dtype}
    if "dtype_q" not in names:
        parts = ("nope", "rope")
        types = {f"{name}_{part}": types[name] for name in types for part in parts}
    write(
        plan.qo_indptr[: batch + 1],
        plan.kv_indptr[: batch + 1],
        companions.last_page_lens[:batch],
        plan.layout.padded,
        1,
        True,
        **{name: getattr(plan, name) for name in AITER_BUFFERS},
        page_size=1,
        kv_granularity=settings.kv_granularity,
        max_seqlen_qo=max_query_len,
        uni_seqlen_qo=-1,
        fast_mode=True,
        max_split_per_batch=settings.max_split_per_batch,
        **types,
    )


def _mark_rows(companions: Companions, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
    """Write `written` and `blind` from the indptrs [max_batch + 1] of the plan."""
    row = companions.row
    sequence = torch.searchsorted(qo_indptr[1:], row, right=True)
    sequence.clamp_(max=len(companions.last_page_lens) - 1)
    torch.lt(row, qo_indptr[-1], out=companions.written)
    length = kv_indptr[sequence + 1] - kv_indptr[sequence]
    # Row i of n sees all but the last n - 1 - i keys of its sequence.
    unseen = qo_indptr[sequence + 1] - 1 - row
    torch.le(length, unseen, out=companions.blind)
