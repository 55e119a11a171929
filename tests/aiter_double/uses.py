"""Uses of the adapter `mla_fusion.attention.aiter`: a good one, spoilt in one place by a rule."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention import PersistentDecodePlan, persistent_mla_decode
from tests.aiter_double.calls import ENTRY, L

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.aiter_double import Double

    Change = Callable[[dict[str, Any]], dict[str, Any]]
    Spoil = Callable[[PersistentDecodePlan], None]

LENGTHS, DRAFT = (70, 3, 200), 2


def nothing(_: Any) -> Any:
    return {}


@dataclass(frozen=True)
class Use:
    """What is not as in the good use: 16 heads in the architecture's fp8, 3 sequences of 2 rows.

    Attributes:
        allocate: arguments of the allocation.
        refresh: gets the arguments of the refresh.
        before, after: get the plan, before and after its refresh.
        decode: gets the arguments of the decode.
        page: tokens in a block of the cache.
        lengths: keys of each sequence. rows: query rows of each, if not the most there may be.
        return_lse: as the decode takes it.
        overwrite: the caller uses the tensors of the step for another one before the decode.
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


def replace(**changes: Callable[[torch.Tensor], Any]) -> Spoil:
    """Put other tensors, made of its own, into the plan."""

    def spoil(plan: PersistentDecodePlan) -> None:
        for name, make in changes.items():
            setattr(plan, name, make(getattr(plan, name)))

    return spoil


def run(use: Use, double: Double) -> tuple[torch.Tensor, torch.Tensor]:
    """What the adapter returned [T, H, 512], and dense attention in float64."""
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
    heads, columns = settings.layout.heads, -(-longest // use.page)
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


def dense(a: dict[str, Any], queries: list[int], lengths: list[int]) -> torch.Tensor:
    """Causal attention over the blocks of each sequence; a row that sees no key is zero."""
    wide = torch.bfloat16
    q = a["q"].double() * (1 if a["q"].dtype == wide else a["q_scale"].double())
    cache = a["kv_cache"].double() * (1 if a["kv_cache"].dtype == wide else a["kv_scale"].double())
    out = torch.zeros((*q.shape[:2], L), dtype=torch.float64)
    for b, length in enumerate(lengths):
        blocks = a["block_table"][b, : -(-length // cache.shape[1])].long()
        keys = cache[blocks].flatten(0, 1)[:length]
        for row in range(queries[b], queries[b + 1]):
            seen = keys[: max(length - (queries[b + 1] - 1 - row), 0)]
            weights = torch.softmax(q[row] @ seen.T * a["softmax_scale"], dim=-1)
            out[row] = weights @ seen[:, :L]
    return out
