"""Provider `aiter`: AITER's persistent MLA decode, for a plan of its planner.

The contract is that of AITER's sources from v0.1.10.post2 to v0.1.20. Tests run it against a
stand-in for the module that records the calls; no AMD hardware has run it. As `planner_aiter.py`
says, Python checks everything before the call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention import selection
from mla_fusion.attention.buffers import AITER_BUFFERS
from mla_fusion.attention.selection import require as require
from mla_fusion.kernels import aiter as fused_region
from mla_fusion.kernels.capture import capturing

if TYPE_CHECKING:
    from mla_fusion.attention.buffers import Companions, PlanBuffers
    from mla_fusion.attention.validate import Inputs

LATENT, ENTRY = selection.LATENT, 576


def persistent_mla_decode(
    given: Inputs,
) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`.

    Raises:
        ValueError: an argument that AITER would reject, by aborting, or silently misread.
    """
    q, kv_cache, plan, lse = given.q, given.kv_cache, given.plan, given.lse
    step, layout, companions = plan.step, plan.layout, plan.aiter
    assert step is not None and companions is not None  # validated
    settings = plan.settings
    if (q.shape[2], settings.v_head_dim) != (ENTRY, LATENT):
        raise ValueError(
            f"AITER decodes entries of {ENTRY} with values of {LATENT}, got {q.shape[2]} and "
            f"{settings.v_head_dim}: use the triton provider"
        )
    if not kv_cache.is_contiguous():
        raise ValueError("AITER reads the cache as dense pages of one token: kv_cache is strided")
    companions.check(plan)
    verdict = selection.aiter_verdict(
        layout.heads, step.max_query_len, settings.q_dtype, settings.kv_dtype, step.batch,
        selection.architecture(plan.device), return_lse=lse is not None,
    )  # fmt: skip
    if verdict.unsupported:
        raise ValueError(f"{verdict.unsupported}: use the triton provider")
    if lse is not None and not selection.sizes_with_cap():
        raise ValueError(
            "not all persistent kernels of this AITER write the log-sum-exp: install v0.1.16 or "
            "newer, or use the triton provider"
        )
    decode = importlib.import_module("aiter.mla").mla_decode_fwd
    extra: dict[str, Any] = {}
    scales = (("q_scale", given.q_scale, q), ("kv_scale", given.kv_scale, kv_cache))
    for name, scale, tensor in scales:
        if tensor.dtype != torch.bfloat16:
            extra[name] = scale
    if lse is not None:
        extra["return_lse"] = True
    if lacking := sorted(set(extra) - set(fused_region.parameters(decode, "mla_decode_fwd"))):
        raise ValueError(
            f"this AITER's mla_decode_fwd has no {' and no '.join(lacking)}: install v0.1.10.post2 "
            "or newer"
        )
    padded = torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, layout.padded - layout.heads))
    query = padded.view(q.dtype).contiguous()
    result = torch.empty((q.shape[0], layout.padded, LATENT), dtype=torch.bfloat16, device=q.device)
    batch = step.batch
    _, logsumexp = decode(
        query,
        kv_cache.view(-1, 1, 1, ENTRY),
        result,
        plan.qo_indptr[: batch + 1],
        plan.kv_indptr[: batch + 1],
        _entries(plan, companions, given.block_table, kv_cache.shape[1]),
        companions.last_page_lens[:batch],
        step.max_query_len,
        page_size=1,
        nhead_kv=1,
        sm_scale=given.softmax_scale,
        # Without it AITER may leave the plan aside for some shapes, silently.
        num_kv_splits=plan.rules.workers,
        work_meta_data=plan.work_metadata_ptrs,
        **{name: getattr(plan, name) for name in AITER_BUFFERS[1:]},
        **extra,
    )
    _store(companions, given.out, result, 0)
    if lse is not None:
        _store(companions, lse, logsumexp, -torch.inf)


def _store(
    companions: Companions, target: torch.Tensor, found: torch.Tensor, nothing: float
) -> None:
    """Copy the rows and heads of `target` from AITER's result [T, padded heads, ...].

    AITER leaves garbage in a row that sees no key, which becomes `nothing`, and in the rows after
    the last sequence, where `target` keeps its values.
    """
    rows = slice(min(len(target), len(companions.row)))
    shape = (-1, *(1,) * (target.dim() - 1))
    real = found[rows, : target.shape[1]].to(target.dtype)
    real = real.masked_fill(companions.blind[rows].view(shape), nothing)
    target[rows] = torch.where(companions.written[rows].view(shape), real, target[rows])


def _entries(
    plan: PlanBuffers, companions: Companions, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Cache entry of each KV token of the plan, [block_table.numel() * page_size] int32.

    The length is what the block table can hold, so nothing waits for the device; entries after the
    last token are 0. Computed once a refresh for all layers. A graph computes its own: its replays
    read them, and before a replay they hold nothing.
    """
    if capturing():
        return _expand(plan, block_table, page_size)
    key = (plan.refreshes, block_table.data_ptr(), block_table.shape, page_size)
    if companions.entries is None or companions.entries[0] != key:
        companions.entries = key, _expand(plan, block_table, page_size)
    return companions.entries[1]


def _expand(plan: PlanBuffers, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `_entries`."""
    batch, columns = block_table.shape
    token = torch.arange(batch * columns * page_size, dtype=torch.int32, device=block_table.device)
    ends = plan.kv_indptr[1 : batch + 1]
    sequence = torch.searchsorted(ends, token, right=True).clamp_(max=batch - 1)
    at = (token - plan.kv_indptr[sequence]).clamp_(max=columns * page_size - 1)
    entries = block_table[sequence, at // page_size] * page_size + at % page_size
    return entries.masked_fill_(token >= ends[-1], 0)
