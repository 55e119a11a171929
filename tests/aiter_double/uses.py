"""Uses of the adapter `mla_fusion.attention.aiter`: a good one, which rules spoil in one place."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion import attention as persistent
from mla_fusion.attention import PersistentDecodePlan, persistent_mla_decode
from mla_fusion.attention.plan import buffers, device
from tests.aiter_double.calls import ENTRY, L

if TYPE_CHECKING:
    from collections.abc import Callable

    Change = Callable[[dict[str, Any]], dict[str, Any]]
    Spoil = Callable[[PersistentDecodePlan], None]

BF16, LENGTHS, DRAFT = torch.bfloat16, (70, 3, 200), 2


def nothing(_):
    return {}


@dataclass(frozen=True)
class Use:
    """The differences from the good use: 16 heads in fp8, 3 sequences of 2 rows.

    Attributes:
        allocate: arguments of the allocation.
        refresh: gets the arguments of the refresh.
        before, after: get the plan, before and after its refresh.
        decode: gets the arguments of the decode.
        page: tokens in a block of the cache.
        lengths: keys of each sequence. rows: query rows of each, if not the most there may be.
        return_lse: as the decode takes it.
        overwrite: the caller reuses the step's tensors before the decode.
    """

    allocate: dict[str, Any] = field(default_factory=dict)
    refresh: Change = nothing
    before: Spoil = nothing
    after: Spoil = nothing
    decode: Change = nothing
    page: int = 16
    lengths: tuple[int, ...] = LENGTHS
    rows: tuple[int, ...] = ()
    return_lse: bool = False
    overwrite: bool = False


def replace(**changes):
    """Put other tensors, made of its own, into the plan."""

    def spoil(plan):
        for name, make in changes.items():
            setattr(plan, name, make(getattr(plan, name)))

    return spoil


def found(double, monkeypatch):
    """The library finds the architecture of the double."""
    # Uncached: a test without AITER must not be given the module of this one.
    monkeypatch.setattr(persistent, "get_provider", persistent.get_provider.__wrapped__)
    monkeypatch.setattr(device, "architecture", lambda device: double.arch.name)
    monkeypatch.setattr(buffers, "sm_count", lambda device: double.arch.compute_units)


def run(use, double):
    """The adapter's output [T, H, 512], and dense attention in float64."""
    g = torch.Generator().manual_seed(5)
    fields = {
        "max_batch": 3, "max_query_len": DRAFT, "num_heads": 16, "q_dtype": double.arch.fp8,
        "kv_dtype": double.arch.fp8, "device": "cpu", "planner": "aiter",
    }  # fmt: skip
    plan = PersistentDecodePlan.allocate(**{**fields, **use.allocate})
    settings, batch, longest = plan.settings, len(use.lengths), max(use.lengths)
    rows = use.rows or (settings.max_query_len,) * batch
    step = {
        "qo_indptr": torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        "seq_lens": torch.tensor(use.lengths, dtype=torch.int32),
        "num_tokens": sum(rows),
        "max_query_len": max(rows),
    }
    step |= use.refresh(step)
    use.before(plan)
    plan.refresh(**step)
    use.after(plan)
    queries, lengths = step["qo_indptr"].tolist(), step["seq_lens"].tolist()
    if use.overwrite:
        step["qo_indptr"].zero_()
        step["seq_lens"].fill_(1)
    heads, columns = settings.num_heads, -(-longest // use.page)
    table = torch.arange(batch * columns, dtype=torch.int32).view(batch, columns)
    cache = torch.randn((batch * columns, use.page, ENTRY), generator=g)
    given = {
        "q": torch.randn((queries[-1], heads, ENTRY), generator=g).to(settings.q_dtype),
        "kv_cache": cache.to(settings.kv_dtype),
        "block_table": table.flip(1).contiguous(),
        "softmax_scale": 0.05,
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([0.25]),
        "return_lse": use.return_lse,
    }
    given |= use.decode(given)
    out, _ = persistent_mla_decode(plan=plan, **given)
    return out, dense(given, queries, lengths)


def dense(a, queries, lengths):
    """Attention over the blocks of each sequence, from the arguments of the adapter's decode."""
    cache = a["kv_cache"].double() * (1 if a["kv_cache"].dtype == BF16 else a["kv_scale"].double())
    size = cache.shape[1]
    keys = [
        cache[blocks[: -(-n // size)].long()].flatten(0, 1)[:n]
        for blocks, n in zip(a["block_table"], lengths, strict=True)
    ]
    q = a["q"].double() * (1 if a["q"].dtype == BF16 else a["q_scale"].double())
    return causal_attention(q, keys, queries, a["softmax_scale"])


def causal_attention(q, keys, queries, scale, latent=L):
    """Attention [T, H, latent] in float64 of each query to the keys of its sequence up to itself.

    q is [T, H, L + R]; keys has the [n, L + R] of each sequence, whose last row is that of its last
    query; queries are the rows of q at which sequences begin and end. No key gives zeros.
    """
    out = torch.zeros((*q.shape[:2], latent), dtype=torch.float64)
    for own, (first, end) in zip(keys, itertools.pairwise(queries), strict=True):
        for row in range(first, end):
            seen = own[: max(len(own) - (end - 1 - row), 0)]
            out[row] = torch.softmax(q[row] @ seen.T * scale, dim=-1) @ seen[:, :latent]
    return out
