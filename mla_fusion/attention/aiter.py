"""AITER's persistent MLA decode: its planner and its kernel, from the plan of this library.

The contract is that of AITER's sources from v0.1.10.post2 to v0.1.20. It is tested against a
stand-in for the module that records the calls; no AMD hardware has run it.

A failed check of AITER may abort the process, and a missing buffer makes it allocate or read other
memory. So everything is checked in Python first, all six buffers are handed over or none, and
arguments go by keyword: releases inserted new ones in the middle (docs/persistent-decode.md).
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as fused_region
from mla_fusion.kernels.capture import capturing

if TYPE_CHECKING:
    from collections.abc import Callable

    from mla_fusion.attention.plan import PersistentDecodePlan
    from mla_fusion.attention.settings import Settings

# In the order of get_mla_metadata_info_v1.
BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
LATENT, ENTRY = 512, 576


@dataclasses.dataclass(eq=False)
class Companions:
    """What AITER's decode is called with, and what corrects its result, beside the six buffers.

    With N = max_batch * max_query_len query rows; all but `entries` are of fixed addresses, and
    `written` and `blind` are written by each refresh: a captured decode reads those of its step.

    buffers: the six that AITER asked for, by name: a plan is for these and for their addresses.
    last_page_lens: [max_batch] int32, ones: a page holds one token.
    row: [N] int32, counting.
    written: [N] bool, the row is one of a sequence; blind: [N] bool, it sees no key.
    entries: of the last decode outside a graph, what its block table was, and what came of it.
    """

    buffers: dict[str, torch.Tensor]
    last_page_lens: torch.Tensor
    row: torch.Tensor
    written: torch.Tensor
    blind: torch.Tensor
    entries: tuple[tuple[Any, ...], torch.Tensor] | None = None

    @classmethod
    def allocate(
        cls, buffers: dict[str, torch.Tensor], max_batch: int, max_query_len: int
    ) -> Companions:
        """Those of a plan that was not refreshed yet."""
        rows, device = max_batch * max_query_len, buffers["work_indptr"].device
        return cls(
            buffers,
            torch.ones(max_batch, dtype=torch.int32, device=device),
            torch.arange(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def check(self, plan: PersistentDecodePlan) -> None:
        """Raise ValueError unless `plan` still has the buffers it was allocated with."""
        replaced = [name for name, own in self.buffers.items() if getattr(plan, name) is not own]
        if replaced:
            raise ValueError(
                "AITER takes the six buffers that it sized for the plan, or none; "
                f"{', '.join(replaced)} is another tensor: allocate a new plan"
            )

    def refresh(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
        """Write them from the indptrs [max_batch + 1] of the plan."""
        sequence = torch.searchsorted(qo_indptr[1:], self.row, right=True)
        sequence.clamp_(max=len(self.last_page_lens) - 1)
        torch.lt(self.row, qo_indptr[-1], out=self.written)
        length = kv_indptr[sequence + 1] - kv_indptr[sequence]
        # Row i of n sees all but the last n - 1 - i keys of its sequence.
        unseen = qo_indptr[sequence + 1] - 1 - self.row
        torch.le(length, unseen, out=self.blind)

    def store(self, target: torch.Tensor, found: torch.Tensor, nothing: float) -> None:
        """Copy AITER's result [T, padded heads, ...] for the rows and heads there are.

        AITER leaves rubbish in a row that sees no key, which becomes `nothing`, and in the rows
        behind the last sequence, which keep what `target` holds.
        """
        rows = slice(min(len(target), len(self.row)))
        shape = (-1, *(1,) * (target.dim() - 1))
        real = found[rows, : target.shape[1]].to(target.dtype)
        real = real.masked_fill(self.blind[rows].view(shape), nothing)
        target[rows] = torch.where(self.written[rows].view(shape), real, target[rows])


def require() -> None:
    """Raise ProviderUnavailable unless an AITER is here that plans as this adapter expects."""
    fused_region.require()
    _, _, names = _planner()
    if "kv_last_page_lens" not in names:
        raise ProviderUnavailable(
            "this AITER's get_mla_metadata_v1 has no kv_last_page_lens: install v0.1.10.post2 or "
            "newer"
        )


def allocate(settings: Settings, device: torch.device) -> dict[str, Any]:
    """The six buffers, zeroed, of the sizes that AITER asks for, and what it takes beside them.

    Raises:
        ValueError: this AITER sizes its buffers without the cap that was asked for.
    """
    size, _, _ = _planner()
    cap = settings.rules.max_split_per_batch
    capped = {"max_split_per_batch": cap} if cap > 0 else {}
    if capped and not _sizes_with_cap():
        raise ValueError(
            "this AITER sizes its buffers without max_split_per_batch: leave it at -1, or install "
            "v0.1.16 or newer"
        )
    shapes = size(
        settings.max_batch,
        settings.max_query_len,
        settings.layout.padded,
        settings.q_dtype,
        settings.kv_dtype,
        is_sparse=False,
        fast_mode=True,
        **capped,
    )
    six = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in zip(BUFFERS, shapes, strict=True)
    }
    return {
        **six,
        "aiter": Companions.allocate(six, settings.max_batch, settings.max_query_len),
    }


def fill(
    plan: PersistentDecodePlan, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
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
    companions.refresh(plan.qo_indptr, plan.kv_indptr)
    settings = plan.settings
    _, write, names = _planner()
    types = {"dtype_q": settings.q_dtype, "dtype_kv": settings.kv_dtype}
    if "dtype_q" not in names:
        parts = ("nope", "rope")
        types = {f"{name}_{part}": types[name] for name in types for part in parts}
    write(
        plan.qo_indptr[: batch + 1],
        plan.kv_indptr[: batch + 1],
        companions.last_page_lens[:batch],
        settings.layout.padded,
        1,
        True,
        **{name: getattr(plan, name) for name in BUFFERS},
        page_size=1,
        kv_granularity=settings.rules.granularity,
        max_seqlen_qo=max_query_len,
        uni_seqlen_qo=-1,
        fast_mode=True,
        max_split_per_batch=settings.rules.max_split_per_batch,
        **types,
    )


def persistent_mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: PersistentDecodePlan,
    *,
    block_table: torch.Tensor,
    softmax_scale: float,
    q_scale: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`.

    Raises:
        ValueError: an argument that AITER would reject, by aborting, or silently misread.
    """
    from mla_fusion.attention import selection

    step, layout, companions = plan.step, plan.settings.layout, plan.aiter
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
    if lse is not None and not _sizes_with_cap():
        raise ValueError(
            "not all persistent kernels of this AITER write the log-sum-exp: install v0.1.16 or "
            "newer, or use the triton provider"
        )
    decode = importlib.import_module("aiter.mla").mla_decode_fwd
    extra: dict[str, Any] = {}
    for name, scale, tensor in (("q_scale", q_scale, q), ("kv_scale", kv_scale, kv_cache)):
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
        _entries(plan, companions, block_table, kv_cache.shape[1]),
        companions.last_page_lens[:batch],
        step.max_query_len,
        page_size=1,
        nhead_kv=1,
        sm_scale=softmax_scale,
        # Without it AITER may leave the plan aside for some shapes, silently.
        num_kv_splits=settings.rules.workers,
        work_meta_data=plan.work_metadata_ptrs,
        **{name: getattr(plan, name) for name in BUFFERS[1:]},
        **extra,
    )
    companions.store(out, result, 0)
    if lse is not None:
        companions.store(lse, logsumexp, -torch.inf)


def _planner() -> tuple[Callable[..., Any], Callable[..., Any], tuple[str, ...]]:
    """(what sizes the buffers, what fills them, the argument names of the latter)."""
    aiter = importlib.import_module("aiter")
    try:
        size, write = aiter.get_mla_metadata_info_v1, aiter.get_mla_metadata_v1
        importlib.import_module("aiter.mla")
    except (AttributeError, ImportError) as error:
        raise ProviderUnavailable(
            f"this AITER has no persistent MLA decode ({error}): install v0.1.10.post2 or newer"
        ) from error
    return size, write, fused_region.parameters(write, "get_mla_metadata_v1")


def _sizes_with_cap() -> bool:
    """Whether the buffers can be sized for max_split_per_batch, which tells v0.1.16 from older."""
    size, _, _ = _planner()
    names = fused_region.parameters(size, "get_mla_metadata_info_v1")
    return "max_split_per_batch" in names


def _entries(
    plan: PersistentDecodePlan, companions: Companions, block_table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Cache entry of each KV token of the plan, [block_table.numel() * page_size] int32.

    As many as the block table may hold, so that nothing waits for the device; those behind the
    last token are 0. Computed once a refresh for all layers; but a graph has to compute what its
    replays read, and until a replay nobody else can read what it computes.
    """
    if capturing():
        return _expand(plan, block_table, page_size)
    key = (plan.refreshes, block_table.data_ptr(), block_table.shape, page_size)
    if companions.entries is None or companions.entries[0] != key:
        companions.entries = key, _expand(plan, block_table, page_size)
    return companions.entries[1]


def _expand(plan: PersistentDecodePlan, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """See `_entries`."""
    batch, columns = block_table.shape
    token = torch.arange(batch * columns * page_size, dtype=torch.int32, device=block_table.device)
    ends = plan.kv_indptr[1 : batch + 1]
    sequence = torch.searchsorted(ends, token, right=True).clamp_(max=batch - 1)
    at = (token - plan.kv_indptr[sequence]).clamp_(max=columns * page_size - 1)
    entries = block_table[sequence, at // page_size] * page_size + at % page_size
    return entries.masked_fill_(token >= ends[-1], 0)
