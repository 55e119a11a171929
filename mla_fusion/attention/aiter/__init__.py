"""Provider `aiter`: AITER's persistent MLA decode, for a plan of its planner.

The contract is that of AITER's sources from v0.1.10.post2 to v0.1.20; no AMD hardware has run it.
As `aiter/planner.py` says, Python checks everything before the call.
"""

import importlib
from typing import Any

import torch

from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.aiter.selection import require as require
from mla_fusion.attention.plan.buffers import AITER_BUFFERS, Companions, PlanBuffers
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels import aiter as fused_region
from mla_fusion.kernels.capture import capturing

LATENT, ENTRY = selection.LATENT, sum(selection.WIDTHS)


def warm_up_batches(plan: PlanBuffers, values: int | None) -> list[int]:
    """Any batch loads all that AITER launches."""
    return [1]


def persistent_mla_decode(given: Inputs) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`; ValueError for what AITER would reject, by
    aborting, or silently misread."""
    q, kv_cache, plan, lse = given.q, given.kv_cache, given.plan, given.lse
    step, layout, companions, settings = plan.step, plan.layout, plan.aiter, plan.settings
    assert step is not None and companions is not None  # validated
    if given.epilogue is not None:
        raise ValueError("AITER's decode has no epilogue: multiply with W_UV after it")
    if q.shape[2] != ENTRY:
        why = f"AITER decodes entries of {ENTRY}, got {q.shape[2]}"
        raise ValueError(f"{why}: use the triton provider")
    if not kv_cache.is_contiguous():
        raise ValueError("AITER reads the cache as dense pages of one token: kv_cache is strided")
    companions.check_buffers(plan)
    verdict = planner_aiter.verdict(settings, step.max_query_len, return_lse=lse is not None)
    if verdict.unsupported:
        raise ValueError(f"{verdict.unsupported}: use the triton provider")
    if lse is not None and not selection.sizes_with_cap():
        raise ValueError(
            "not all persistent kernels of this AITER write the log-sum-exp: install v0.1.16 or "
            "newer, or use the triton provider"
        )
    decode = importlib.import_module("aiter.mla").mla_decode_fwd
    extra: dict[str, Any] = {} if lse is None else {"return_lse": True}
    extra |= {} if q.dtype == torch.bfloat16 else {"q_scale": given.q_scale}
    extra |= {} if kv_cache.dtype == torch.bfloat16 else {"kv_scale": given.kv_scale}
    if lacking := sorted(set(extra) - set(fused_region.parameters(decode, "mla_decode_fwd"))):
        raise ValueError(
            f"this AITER's mla_decode_fwd has no {' and no '.join(lacking)}: install v0.1.10.post2 "
            "or newer"
        )
    batch, query_len = step.batch, verdict.query_len
    even = query_len > 1
    query = _query(q, companions.source[: batch * query_len] if even else None, layout.padded)
    result = torch.empty((*query.shape[:2], LATENT), dtype=torch.bfloat16, device=q.device)
    _, logsumexp = decode(
        query, kv_cache.view(-1, 1, 1, ENTRY), result,
        (companions.even if even else plan.qo_indptr)[: batch + 1], plan.kv_indptr[: batch + 1],
        _entries(plan, companions, given.block_table, kv_cache.shape[1]),
        companions.last_page_lens[:batch], query_len,
        page_size=1, nhead_kv=1, sm_scale=given.softmax_scale,
        # Without it AITER may leave the plan aside for some shapes, silently.
        num_kv_splits=plan.rules.ctas, work_meta_data=plan.work_metadata_ptrs,
        **{name: getattr(plan, name) for name in AITER_BUFFERS[1:]}, **extra,
    )  # fmt: skip
    _store(companions, query_len, given.out, result, 0)
    if lse is not None:
        _store(companions, query_len, lse, logsumexp, -torch.inf)


def _entries(
    plan: PlanBuffers, companions: Companions, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The entry, int32, of each token of the concatenation of all sequences of the step, as AITER's
    pages hold one: the caller's list if there is one, else written once a refresh for all layers,
    by the first's block table and page size, with max_kv_len in a buffer of the plan. A graph that
    did not record the refresh writes its own at every decode: it would see no other one."""
    # Imported here: AITER's shapes are asked for where Triton is not.
    from mla_fusion.attention.aiter.entries_kernel import write_entries

    if companions.listed is not None:
        return companions.listed
    key = (plan.refreshes, block_table.data_ptr(), block_table.shape, page_size)
    shared = companions.captured or not capturing()
    if shared and companions.expanded is not None and companions.expanded[0] == key:
        return companions.expanded[1]
    if (found := companions.entries) is None:
        # As many as the block table can hold, so nothing waits for the device.
        found = block_table.new_zeros(block_table.numel() * page_size)
    write_entries(found, plan.kv_indptr[: len(block_table) + 1], block_table, page_size)
    companions.expanded = (key, found) if shared else None
    return found


def _query(q: torch.Tensor, source: torch.Tensor | None, heads: int) -> torch.Tensor:
    """The query as AITER takes it: dense, padded to `heads`, and if `source` says of which rows,
    with as many for every sequence."""
    values = q.view(torch.uint8)  # not every op knows fp8
    if source is not None:
        values = values.index_select(0, source)
    if missing := heads - q.shape[1]:
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
    return values.view(q.dtype).contiguous()


def _store(
    companions: Companions, query_len: int, target: torch.Tensor, found: torch.Tensor,
    nothing: float,
) -> None:  # fmt: skip
    """Copy the rows and heads of `target` from AITER's result, of `query_len` rows a sequence. It
    leaves garbage in a row that sees no key, which becomes `nothing`, and in the rows after the
    last sequence, where `target` keeps its values."""
    real = slice(min(len(target), len(companions.target)))
    shape = (-1, *(1,) * (target.dim() - 1))
    if query_len > 1:
        found = found.index_select(0, companions.target[real].clamp(max=len(found) - 1))
    value = found[real, : target.shape[1]].to(target.dtype)
    value = value.masked_fill(companions.blind[real].view(shape), nothing)
    target[real] = torch.where(companions.written[real].view(shape), value, target[real])
