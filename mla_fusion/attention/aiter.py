"""AITER's persistent MLA decode: its planner and its kernel, from the plan of this library.

The contract is that of AITER's sources from v0.1.10.post2 to v0.1.20. It is tested against a
stand-in for the module that records the calls; no AMD hardware has run it.

A failed check of AITER may abort the process, and a missing buffer makes it allocate or read other
memory. So everything is checked in Python first, all six buffers are handed over or none, and
arguments go by keyword: releases inserted new ones in the middle (docs/persistent-decode.md).
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import aiter as fused_region

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
    if capped and "max_split_per_batch" not in parameters(size, "get_mla_metadata_info_v1"):
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
    six: dict[str, Any] = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in zip(BUFFERS, shapes, strict=True)
    }
    # Pages hold one token, and so does the last page of every sequence.
    ones = torch.ones(settings.max_batch, dtype=torch.int32, device=device)
    return six | {"kept": {"last_page_lens": ones}}


def fill(
    plan: PersistentDecodePlan, qo_indptr: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int
) -> None:
    """Copy the lengths of the step and let AITER plan it, in place."""
    batch = seq_lens.shape[0]
    for kept in (plan.qo_indptr, plan.kv_indptr):
        kept[0].zero_()
    plan.qo_indptr[: batch + 1].copy_(qo_indptr)
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=plan.kv_indptr[1 : batch + 1])
    for kept in (plan.qo_indptr, plan.kv_indptr):
        kept[batch + 1 :].copy_(kept[batch].expand_as(kept[batch + 1 :]))
    settings = plan.settings
    _, write, names = _planner()
    types = {"dtype_q": settings.q_dtype, "dtype_kv": settings.kv_dtype}
    if "dtype_q" not in names:
        parts = ("nope", "rope")
        types = {f"{name}_{part}": types[name] for name in types for part in parts}
    write(
        plan.qo_indptr[: batch + 1],
        plan.kv_indptr[: batch + 1],
        plan.kept["last_page_lens"][:batch],
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

    step, layout = plan.step, plan.settings.layout
    assert step is not None  # validated
    settings = plan.settings
    if (q.shape[2], settings.v_head_dim) != (ENTRY, LATENT):
        raise ValueError(
            f"AITER decodes entries of {ENTRY} with values of {LATENT}, got {q.shape[2]} and "
            f"{settings.v_head_dim}: use the triton provider"
        )
    if not kv_cache.is_contiguous():
        raise ValueError("AITER reads the cache as dense pages of one token: kv_cache is strided")
    missing = [name for name in BUFFERS if not getattr(plan, name).numel()]
    if missing:
        raise ValueError(f"AITER takes all six buffers or none; {', '.join(missing)} is empty")
    verdict = selection.aiter_verdict(
        layout.heads, step.max_query_len, settings.q_dtype, settings.kv_dtype, step.batch,
        selection.architecture(plan.device), return_lse=lse is not None,
    )  # fmt: skip
    if verdict.unsupported:
        raise ValueError(f"{verdict.unsupported}: use the triton provider")
    decode = importlib.import_module("aiter.mla").mla_decode_fwd
    extra: dict[str, Any] = {}
    for name, scale, tensor in (("q_scale", q_scale, q), ("kv_scale", kv_scale, kv_cache)):
        if tensor.dtype != torch.bfloat16:
            extra[name] = scale
    if lse is not None:
        extra["return_lse"] = True
    if lacking := sorted(set(extra) - set(parameters(decode, "mla_decode_fwd"))):
        raise ValueError(
            f"this AITER's mla_decode_fwd has no {' and no '.join(lacking)}: install v0.1.10.post2 "
            "or newer"
        )
    indices, sees_nothing = _derived(plan, block_table, kv_cache.shape[1], q.shape[0])
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
        indices,
        plan.kept["last_page_lens"][:batch],
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
    out.copy_(result[:, : layout.heads].masked_fill(sees_nothing[:, None, None], 0))
    if lse is not None:
        kept = logsumexp[:, : layout.heads]
        lse.copy_(kept.masked_fill(sees_nothing[:, None], -torch.inf))


def parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Names of the arguments of `aiter.name`; a compiled op hides them, so those of its schema."""
    found = inspect.signature(function).parameters
    if tuple(found) != ("args", "kwargs"):
        return tuple(found)
    op = getattr(torch.ops.aiter, name, None)
    if op is None:
        raise ProviderUnavailable(
            f"the arguments of AITER's {name} cannot be read: reinstall AITER"
        )
    return tuple(argument.name for argument in op.default._schema.arguments)


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
    return size, write, parameters(write, "get_mla_metadata_v1")


def _derived(
    plan: PersistentDecodePlan, block_table: torch.Tensor, page_size: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache entry of each KV token, whether a query row sees no key), once for all layers.

    Shapes are those of the block table, so that nothing waits for the device.
    """
    key = (plan.refreshes, block_table.data_ptr(), block_table.shape, page_size)
    if plan.kept.get("key") != key:
        assert plan.step is not None
        batch = plan.step.batch
        device = plan.device

        def sequence_of(indptr: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            ends = indptr[1 : batch + 1].contiguous()
            return torch.searchsorted(ends, index, right=True).clamp(max=batch - 1)

        entry = torch.arange(block_table.numel() * page_size, dtype=torch.int32, device=device)
        sequence = sequence_of(plan.kv_indptr, entry)
        at = (entry - plan.kv_indptr[sequence]).clamp(max=block_table.shape[1] * page_size - 1)
        indices = block_table[sequence, at // page_size] * page_size + at % page_size
        row = torch.arange(tokens, dtype=torch.int32, device=device)
        sequence = sequence_of(plan.qo_indptr, row)
        length = plan.kv_indptr[sequence + 1] - plan.kv_indptr[sequence]
        visible = length - (plan.qo_indptr[sequence + 1] - 1 - row)
        plan.kept |= {"key": key, "derived": (indices.to(torch.int32), visible <= 0)}
    return plan.kept["derived"]
