"""Shapes of the sparse decode for `sparse.py`, their inputs, and who computes them.

A candidate is a function of `Inputs` that returns a call; that of the last cache, with -1, writes
`Inputs.out`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from mla_fusion.attention.plan import layouts
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4, WIDE, CacheLayout
from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.selftest.sparse import Variant, make_bank
from mla_fusion.measure.decode_peers import BF16, FP8, PAGE, ROTATED
from mla_fusion.measure.distances import exact_attention
from mla_fusion.measure.timing import Call

DEVICE = "cuda"
LATENT = 512
WINDOW, RECENT = 128, 4 * PAGE  # V4's window of a token, and its entries that the window lies in
CHUNK = 65536  # entries that are drawn at once
ALIGNED = 576  # bytes: vLLM pads V4's pages to a multiple, as FlashMLA demands
# V4's layers with a compression ratio of 128 have pages of two entries.
LAYOUTS = {
    "fp8_ds_mla": FP8_DS_MLA, "fp8_ds_mla_v4": FP8_DS_MLA_V4, "fp8_ds_mla_v4_128": FP8_DS_MLA_V4,
    "bf16": None,
}  # fmt: skip
# Of the models; V4's layers without compression have the window alone.
TOPK = {
    "fp8_ds_mla": (2048,), "fp8_ds_mla_v4": (0, 512, 1024), "fp8_ds_mla_v4_128": (512, 1024),
    "bf16": (2048,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """`topk` random slots of each token, among its own `context` entries of the cache.

    V4 has a window of 128 slots in a row beside them, in a cache of its own, and a sink.
    """

    tokens: int
    heads: int
    topk: int
    context: int
    cache: str

    @property
    def layout(self) -> CacheLayout | None:
        """Of the cache's bytes."""
        return LAYOUTS[self.cache]

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache's values."""
        return BF16 if self.layout is None else FP8

    @property
    def width(self) -> int:
        """Of a query and of a key."""
        return LATENT + WIDE if self.layout is None else self.layout.width

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.width**-0.5)

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return 2 * self.width if self.layout is None else self.layout.bytes

    @property
    def has_window(self) -> bool:
        """Whether there is a scope of recent tokens, and a sink."""
        return self.layout is FP8_DS_MLA_V4

    @property
    def widths(self) -> tuple[int, ...]:
        """Slots of a token in each scope."""
        every = (WINDOW, self.topk) if self.has_window else (self.topk,)
        return tuple(width for width in every if width)

    @property
    def padded(self) -> int:
        """Query heads that FlashMLA has a kernel for."""
        return 64 if self.heads <= 64 else 128

    @property
    def page(self) -> int:
        """Entries of a page of what is chosen."""
        return 2 if self.cache.endswith("_128") else PAGE

    def bytes(self) -> int:
        """Fewest bytes: the listed entries, their slots, queries and outputs once."""
        rows = self.tokens * self.heads * (self.width + LATENT) * 2
        return self.tokens * sum(self.widths) * (self.entry + 4) + rows

    def flops(self) -> int:
        """Operations of both products, without padding."""
        return 2 * self.tokens * self.heads * sum(self.widths) * (self.width + LATENT)


@dataclasses.dataclass
class Inputs:
    """Query [T, H, width], sink [H] or None, for each call of a graph its scopes, and the output
    [T, H, L]."""

    case: Case
    q: torch.Tensor
    sink: torch.Tensor | None
    scopes: list[list[Scope]]
    out: torch.Tensor


def byte_pages(layout: CacheLayout, count: int, page: int) -> torch.Tensor:
    """`count` random entries in pages: uint8 [blocks, page, bytes], as vLLM has them."""
    (data, *scales), _ = make_bank(Variant(1, layout=layout, kv=FP8), count, DEVICE)
    if not scales:
        return data.view(-1, page, layout.bytes)
    blocks, size = count // page, page * layout.bytes
    step = -(-size // ALIGNED) * ALIGNED
    whole = torch.zeros(blocks, step, dtype=torch.uint8, device=DEVICE)
    whole[:, :size] = torch.cat((data.view(blocks, -1), scales[0].view(blocks, -1)), 1)
    return whole.as_strided((blocks, page, layout.bytes), (step, layout.bytes, 1))


def make_cache(case: Case, size: int, page: int = PAGE) -> torch.Tensor:
    """Random pages of `size` entries."""
    if case.layout is None:
        return torch.randn(size, case.width, device=DEVICE, dtype=BF16).view(-1, PAGE, case.width)
    parts = [byte_pages(case.layout, min(CHUNK, size - n), page) for n in range(0, size, CHUNK)]
    # Parts are whole blocks; what lies between blocks is copied with them.
    step = parts[0].stride(0)
    flat = torch.cat([part.as_strided((len(part), step), (step, 1)) for part in parts])
    return flat.as_strided((len(flat), *parts[0].shape[1:]), parts[0].stride())


def window_of(case: Case) -> Scope:
    """The last tokens of each sequence: slots in a row, in a cache of their own."""
    first = torch.arange(case.tokens, device=DEVICE)[:, None] * RECENT
    start = torch.randint(0, RECENT - WINDOW + 1, (case.tokens, 1), device=DEVICE)
    slots = first + start + torch.arange(WINDOW, device=DEVICE)
    return Scope(make_cache(case, case.tokens * RECENT), slots.int(), case.layout)


def chosen_of(case: Case) -> Scope:
    """What an indexer chooses: a token lists no slot twice."""
    first = torch.arange(case.tokens, device=DEVICE)[:, None] * case.context
    order = torch.rand(case.tokens, case.context, device=DEVICE).argsort(1)
    slots = (first + order[:, : case.topk]).int()
    return Scope(make_cache(case, case.tokens * case.context, case.page), slots, case.layout)


def make(case: Case) -> Inputs:
    """Random inputs."""
    size, scopes = case.tokens * (case.context + (RECENT if case.has_window else 0)), []
    for _ in range(max(2, min(128, ROTATED // (size * case.entry)))):
        recent = [window_of(case)] if case.has_window else []
        scopes.append(recent + ([chosen_of(case)] if case.topk else []))
    q = torch.randn(case.tokens, case.heads, case.width, device=DEVICE).to(BF16)
    # A sink counts as much as the keys do: its absence must show.
    weight = math.log(sum(case.widths))
    sink = weight + torch.randn(case.heads, device=DEVICE) if case.has_window else None
    return Inputs(case, q, sink, scopes, q.new_empty(case.tokens, case.heads, LATENT))


def exact(inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """float64 attention of some tokens over the last scopes [n, H, L], keys as they are stored."""
    case, rows = inputs.case, []
    for token in tokens.tolist():
        parts = []
        for scope in inputs.scopes[-1]:
            slots = scope.table[token].long()
            if case.layout is None:
                parts.append(scope.kv_cache.flatten(0, 1)[slots])
            else:
                parts.append(layouts.read_keys(scope.kv_cache, slots, case.layout, case.dtype))
        q, keys = inputs.q[None, token].double(), torch.cat(parts).double()
        rows.append(exact_attention(q, keys, LATENT, inputs.sink)[0])
    return torch.cat(rows)


def ours(inputs: Inputs) -> Call:
    """This library."""
    case = inputs.case
    scratch = sparse_scratch(
        max_tokens=case.tokens, num_heads=case.heads, widths=case.widths, q_dtype=BF16,
        kv_dtype=case.dtype, device=DEVICE, layout=case.layout,
    )  # fmt: skip
    scratch.refresh(case.tokens, [None] * len(case.widths))

    def call(i: int) -> None:
        sparse_mla_decode(
            inputs.q, inputs.scopes[i], scratch, softmax_scale=case.scale, sink=inputs.sink,
            out=inputs.out,
        )  # fmt: skip

    return call


def flashmla(inputs: Inputs, together: bool) -> Call:
    """FlashMLA sparse, padded; the tokens as one sequence if `together`."""
    from vllm.v1.attention.ops import flashmla as ops

    case, padded = inputs.case, inputs.case.padded
    sequences, rows = (1, case.tokens) if together else (case.tokens, 1)
    lens = torch.full((sequences,), case.context, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(sequences, 1, dtype=torch.int32, device=DEVICE)
    schedule = ops.get_mla_metadata()[0]  # filled by the first call

    def call(i: int) -> None:
        [scope] = inputs.scopes[i]
        q = inputs.q.view(sequences, rows, case.heads, case.width)
        if case.heads < padded:
            wide = q.new_zeros(sequences, rows, padded, case.width)
            wide[:, :, : case.heads] = q
            q = wide
        result, _ = ops.flash_mla_with_kvcache(
            q=q, k_cache=scope.kv_cache.unsqueeze(-2), block_table=table, head_dim_v=LATENT,
            cache_seqlens=lens, tile_scheduler_metadata=schedule, is_fp8_kvcache=True,
            indices=scope.table.view(sequences, rows, case.topk), softmax_scale=case.scale,
        )  # fmt: skip
        if i < 0:
            inputs.out.copy_(result[:, :, : case.heads].flatten(0, 1))

    return call


def flashmla_v4(inputs: Inputs) -> Call:
    """FlashMLA sparse with a second scope and a sink, as vLLM's layers of DeepSeek-V4 call it.

    They keep query and output padded: the kernel in front writes the query so.
    """
    from vllm.v1.attention.ops import flashmla as ops

    case, padded = inputs.case, inputs.case.padded
    q = inputs.q.new_zeros(case.tokens, padded, case.width)
    q[:, : case.heads] = inputs.q
    sink = torch.full((padded,), -torch.inf, device=DEVICE)
    sink[: case.heads] = inputs.sink
    window, *topk = (
        torch.full((case.tokens,), width, dtype=torch.int32, device=DEVICE) for width in case.widths
    )
    schedule = ops.get_mla_metadata()[0]  # filled by the first call
    out = torch.empty(case.tokens, padded, LATENT, device=DEVICE, dtype=BF16)

    def call(i: int) -> None:
        recent, *chosen = inputs.scopes[i]
        extra = {}
        if chosen:
            extra["extra_k_cache"] = chosen[0].kv_cache.unsqueeze(-2)
            extra["extra_indices_in_kvcache"] = chosen[0].table.unsqueeze(1)
            extra["extra_topk_length"] = topk[0]
        ops.flash_mla_with_kvcache(
            q=q.unsqueeze(1), k_cache=recent.kv_cache.unsqueeze(-2), block_table=None,
            head_dim_v=LATENT, tile_scheduler_metadata=schedule, cache_seqlens=None,
            is_fp8_kvcache=True, indices=recent.table.unsqueeze(1), topk_length=window,
            softmax_scale=case.scale, attn_sink=sink, out=out.unsqueeze(1),
            **extra,
        )  # fmt: skip
        if i < 0:
            inputs.out.copy_(out[:, : case.heads])

    return call


def fa3(inputs: Inputs) -> Call:
    """FlashAttention 3 with pages of one entry, as vLLM's FLASH_ATTN_MLA_SPARSE calls it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    case = inputs.case
    starts = torch.arange(case.tokens + 1, dtype=torch.int32, device=DEVICE)
    counts = torch.full_like(starts[1:], case.topk)
    latent, rope = (part.contiguous() for part in inputs.q.split([LATENT, WIDE], dim=-1))

    def call(i: int) -> None:
        [scope] = inputs.scopes[i]
        keys = scope.kv_cache.view(-1, 1, 1, case.width)
        result = flash_attn_varlen_func(
            q=rope, q_v=latent, k=keys[..., LATENT:], v=keys[..., :LATENT], max_seqlen_q=1,
            cu_seqlens_q=starts, max_seqlen_k=case.topk, seqused_k=counts,
            block_table=scope.table, softmax_scale=case.scale, causal=True, fa_version=3,
        )  # fmt: skip
        if i < 0:
            inputs.out.copy_(result)

    return call


CANDIDATES: dict[str, dict[str, Callable[[Inputs], Call]]] = {
    "fp8_ds_mla": {
        "ours": ours,
        "flashmla": lambda inputs: flashmla(inputs, True),
        "flashmla, by token": lambda inputs: flashmla(inputs, False),
    },
    "fp8_ds_mla_v4": {"ours": ours, "flashmla": flashmla_v4},
    "fp8_ds_mla_v4_128": {"ours": ours, "flashmla": flashmla_v4},
    "bf16": {"ours": ours, "fa3": fa3},
}


def vllm_default(case: Case) -> str:
    """The candidate that vLLM calls, on Hopper."""
    if case.layout is None:
        return "fa3"
    return "flashmla" if case.heads < 32 or case.has_window else "flashmla, by token"
