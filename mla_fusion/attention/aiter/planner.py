"""AITER's planner, called for the buffers of this library, as docs/aiter.md has its contract.

A failed check of AITER may abort the process, and a missing buffer makes it allocate or read other
memory. So Python checks everything first, hands over all six buffers or none, and passes arguments
by keyword: releases inserted new ones in the middle. No AMD hardware has run it.
"""

import functools
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.plan import buffers
from mla_fusion.attention.plan.buffers import AITER_BUFFERS, Companions, PlanBuffers, Settings
from mla_fusion.kernels.capture import capturing

PROVIDERS = ("aiter", "reference")


def require_kernel(settings: Settings) -> None:
    """Raise ValueError, with the reason, unless AITER has a kernel for these settings, and
    ProviderUnavailable where it is missing or too old."""
    portable_only = ("ctas", "heads_per_work", "overhead")
    granularity, latent = settings.kv_granularity, settings.v_head_dim
    if given := [name for name in portable_only if getattr(settings, name) is not None]:
        why = f"only the portable planner takes {' and '.join(given)}"
    elif granularity & (granularity - 1):
        why = f"AITER's planner takes a power of two as kv_granularity, got {granularity}"
    elif latent != selection.LATENT:
        why = f"its persistent decode has kernels for latents of {selection.LATENT}, not {latent}"
    else:
        why = verdict(settings, settings.max_query_len).unsupported
    if why:
        raise ValueError(f'planner="aiter" is not possible: {why}')
    selection.require()


def cannot_cap(cap: int) -> str:
    """Why this AITER cannot cap the splits of a batch at `cap`; empty if it can, or need not."""
    why = "this AITER sizes its buffers without max_split_per_batch: leave it at -1, or install "
    return "" if cap < 0 or selection.sizes_with_cap() else why + "v0.1.16 or newer"


def verdict(settings: Settings, query_len: int, *, return_lse: bool = False) -> selection.Verdict:
    """AITER's verdict on a step of a plan: sequences of up to `query_len` query rows."""
    return selection.aiter_verdict(
        settings.num_heads, query_len, settings.q_dtype, settings.kv_dtype,
        gpu.of(settings.device).arch, return_lse=return_lse,
    )  # fmt: skip


def allocate(settings: Settings) -> dict[str, Any]:
    """The fields of a plan; the six buffers are zeroed and of the sizes that AITER asks for.
    ValueError, ProviderUnavailable: as `require_kernel`. ValueError: this AITER cannot size them
    for the cap."""
    require_kernel(settings)
    size, _, _ = selection.installed_planner()
    cap, device, batch = settings.max_split_per_batch, settings.device, settings.max_batch
    capped = {"max_split_per_batch": cap} if cap > 0 else {}
    if why := cannot_cap(cap):
        raise ValueError(why)
    layout, longest, _ = verdict(settings, settings.max_query_len)
    types = settings.q_dtype, settings.kv_dtype
    shapes = size(batch, longest, layout.padded, *types, is_sparse=False, fast_mode=True, **capped)
    six = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in zip(AITER_BUFFERS, shapes, strict=True)
    }
    zeros = functools.partial(torch.zeros, dtype=torch.int32, device=device)
    rows, kv_len = batch * settings.max_query_len, settings.max_kv_len
    companions = Companions(
        buffers=six, last_page_lens=zeros(batch) + 1,
        counting=torch.arange(batch * longest + 1, dtype=torch.int32, device=device),
        even=zeros(batch + 1), source=zeros(batch * longest), target=zeros(rows),
        written=zeros(rows, dtype=torch.bool), blind=zeros(rows, dtype=torch.bool),
        entries=None if kv_len is None else zeros(batch * kv_len),
    )  # fmt: skip
    return {**buffers.common_buffers(settings, layout, portable=False), **six, "aiter": companions}


def fill(
    plan: PlanBuffers, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """Copy the lengths of the step and let AITER plan it, in place."""
    batch, companions = seq_lens.shape[0], plan.aiter
    assert companions is not None  # the plan is AITER's
    companions.check_buffers(plan)
    plan.kv_indptr[0].zero_()
    plan.qo_indptr[: batch + 1].copy_(qo_indptr)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=plan.kv_indptr[1 : batch + 1])
    for indptr in (plan.qo_indptr, plan.kv_indptr):
        indptr[batch + 1 :].copy_(indptr[batch].expand_as(indptr[batch + 1 :]))
    settings = plan.settings
    query_len = verdict(settings, max_query_len).query_len
    _place_rows(plan, companions, query_len)
    companions.captured = capturing()
    _, write, names = selection.installed_planner()
    types = {"dtype_q": settings.q_dtype, "dtype_kv": settings.kv_dtype}
    if "dtype_q" not in names:
        types = {f"{name}_{half}": types[name] for name in types for half in ("nope", "rope")}
    # AITER folds the heads of drafts by their declared length and its kernels mask by it, so every
    # sequence has as many rows. A single row needs no such care: a sequence has it or is padding.
    even = query_len > 1
    write(
        (companions.even if even else plan.qo_indptr)[: batch + 1], plan.kv_indptr[: batch + 1],
        companions.last_page_lens[:batch], plan.layout.padded, 1, True,
        **{name: getattr(plan, name) for name in AITER_BUFFERS},
        page_size=1, kv_granularity=settings.kv_granularity, max_seqlen_qo=query_len,
        uni_seqlen_qo=query_len if even else -1, fast_mode=True,
        max_split_per_batch=settings.max_split_per_batch, **types,
    )  # fmt: skip


def _place_rows(plan: PlanBuffers, companions: Companions, query_len: int) -> None:
    """Write where the query rows go; AITER has `query_len` of each sequence."""
    qo_indptr, kv_indptr, most = plan.qo_indptr, plan.kv_indptr, len(companions.last_page_lens)
    torch.mul(companions.counting[: most + 1], query_len, out=companions.even)
    row = companions.counting[: len(companions.target)]
    sequence = torch.searchsorted(qo_indptr[1:], row, right=True)
    sequence.clamp_(max=most - 1)
    torch.lt(row, qo_indptr[-1], out=companions.written)
    # Row i of n sees all but the last n - 1 - i keys of its sequence.
    unseen = qo_indptr[sequence + 1] - 1 - row
    torch.le(kv_indptr[sequence + 1] - kv_indptr[sequence], unseen, out=companions.blind)
    place = companions.even[sequence + 1] - 1 - unseen
    torch.clamp(place, 0, len(companions.source) - 1, out=companions.target)

    row = companions.counting[: len(companions.source)]
    sequence = (row // query_len).clamp_(max=most - 1)
    place = qo_indptr[sequence + 1] - companions.even[sequence + 1] + row
    torch.clamp(place, 0, len(companions.target) - 1, out=companions.source)
