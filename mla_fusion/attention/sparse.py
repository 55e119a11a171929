"""Sparse MLA decode: attention of each token over a list of cache slots, of one or two scopes.

A scope is a cache and, for each token, a row of slots in it: a sliding window, or what an indexer
chose, or both (DeepSeek-V3.2, V4). A token becomes a sequence of a persistent plan: the columns of
the first scope, padded to whole tiles, then those of the last. So both scopes are one launch, one
softmax runs over them, and the log-sum-exp merge of the splits is the plan's own reduction.

A cache is of one type, or of bytes in a layout of `plan/layouts.py`, which kernels read in place.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention import PersistentDecodePlan, cards
from mla_fusion.attention import triton as provider
from mla_fusion.attention.card import Decodes
from mla_fusion.attention.plan import buffers, layouts
from mla_fusion.attention.plan.inputs import Inputs, Scope, Sparse, validate
from mla_fusion.kernels.inputs import check, check_whole, fits

TILE = 64  # scopes change between tiles, and both kernels' tiles divide this
# Slots of a token with one scope that are not split: a reduction takes longer than a tile. V4's
# window has 128, and drafts beside it.
UNSPLIT = 3 * TILE


@dataclasses.dataclass(eq=False)
class SparseScratch:
    """The plan and workspaces of sparse decode steps of one shape, at fixed addresses.

    `sparse_scratch` makes it. It depends on the number of tokens and on lengths, not on the slots,
    so all layers with the same lengths share it; others, even of equal shape, need another. Of each
    scope, widths: most columns of its index rows; counted: the last refresh was given lengths."""

    widths: tuple[int, ...]
    plan: PersistentDecodePlan
    qo_indptr: torch.Tensor
    first_lens: torch.Tensor
    seq_lens: torch.Tensor
    counted: tuple[bool, ...] = (False, False)

    @property
    def first(self) -> int:
        """Columns that the first of two scopes takes, whole tiles; 0 if there is only one."""
        return -(-self.widths[0] // TILE) * TILE if len(self.widths) == 2 else 0

    def refresh(self, num_tokens: int, lengths: Sequence[torch.Tensor | None]) -> None:
        """Plan one step, in place, without allocation or host sync; once a step, for all layers.

        Captured in a CUDA graph, a replay reads the lengths that the tensors hold then.

        Args:
            num_tokens: query rows of the step.
            lengths: for each scope [num_tokens] int32, how many columns of each row count, at
                most its width; slots from there on are not read. None: all of them.

        Raises:
            ValueError: more tokens than the scratch holds, or lengths that are not as above.
        """
        most, scopes, device = self.plan.settings.max_batch, len(self.widths), self.plan.device
        check_whole("num_tokens", num_tokens)
        want = f"1 to {most}: make the scratch for the largest step"
        check("num_tokens", 1 <= num_tokens <= most, want, num_tokens)
        ok = isinstance(lengths, (list, tuple)) and len(lengths) == scopes
        check("lengths", ok, f"a list of {scopes}, one for each scope", lengths)
        for scope, given in enumerate(lengths):
            ok = given is None or fits(given, torch.int32, (num_tokens,), device)
            check(f"lengths of scope {scope}", ok, f"int32 [{num_tokens}] on {device}", given)
        self.counted = tuple(given is not None for given in lengths)
        seq_lens = self.seq_lens[:num_tokens]
        if lengths[-1] is None:
            seq_lens.fill_(self.first + self.widths[-1])
        else:
            torch.add(lengths[-1], self.first, out=seq_lens)
        if len(lengths) == 2:
            self.first_lens[:num_tokens] = self.widths[0] if lengths[0] is None else lengths[0]
        rows = {"num_tokens": num_tokens, "max_query_len": 1}
        self.plan.refresh(qo_indptr=self.qo_indptr[: num_tokens + 1], seq_lens=seq_lens, **rows)


def sparse_scratch(
    *, max_tokens: int, num_heads: int, widths: tuple[int, ...], q_dtype: torch.dtype,
    kv_dtype: torch.dtype, device: torch.device | str, layout: layouts.CacheLayout | None = None,
    ctas: int | None = None, v_head_dim: int = 512,
) -> SparseScratch:  # fmt: skip
    """A new scratch for steps of up to `max_tokens` tokens.

    Args:
        widths: most columns of the index rows of one or two scopes.
        kv_dtype: of the caches; of the e4m3 values where they are of bytes.
        layout: of caches of bytes. The plan suits the kernel that reads them.
        Others, and errors, as `PersistentDecodePlan.allocate` has them.
    """
    given: Any = widths
    ok = isinstance(given, (list, tuple)) and len(given) in (1, 2)
    ok = ok and all(type(width) is int and width >= 1 for width in given)
    check("widths", ok, "those of one or two scopes, whole numbers of 1 or more", widths)
    ok = layout is None or isinstance(layout, layouts.CacheLayout)
    check("layout", ok, "a CacheLayout or None", layout)
    check_whole("num_heads", num_heads)
    decodes = Decodes(num_heads, 1, kv_dtype, 0, len(widths), layout)
    settings = cards.settings(gpu.of(buffers.device_of(device)), decodes)
    if len(widths) == 1 and widths[0] <= UNSPLIT:
        settings["kv_granularity"] = UNSPLIT
    if ctas is not None:
        settings["ctas"] = ctas
    plan = PersistentDecodePlan.allocate(
        max_batch=max_tokens, max_query_len=1, num_heads=num_heads, q_dtype=q_dtype,
        kv_dtype=kv_dtype, device=device, v_head_dim=v_head_dim, **settings,
    )  # fmt: skip
    starts = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
    return SparseScratch(widths, plan, starts, 0 * starts[:-1], 0 * starts[:-1])


def sparse_mla_decode(
    q: torch.Tensor, scopes: Sequence[Scope], scratch: SparseScratch, *, softmax_scale: float,
    sink: torch.Tensor | None = None, q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None, out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attention of token t over the keys in the slots that row t of each scope lists.

    With k the cached [latent | rope] rows of all slots of token t that count and are not -1, one
    for each time a slot is listed, and L the latent width:

        lse = log sum_k exp(softmax_scale * q . k)
        out = sum_k exp(softmax_scale * q . k) k[:L] / (exp(lse) + exp(sink))

    without the last term if there is no sink. A row without keys is zero, with an LSE of -inf.

    Args:
        scopes: one or two. Each cache [blocks, page_size, L + R] is of the scratch's type, dense
            in its last dimension; each table [T, width] int32 lists slots, block * page_size
            + entry, or -1 for none, anywhere in the row. A table may be narrower than the scratch
            if the refresh was given lengths. With a `CacheLayout`, the same for both scopes, the
            query is bf16 and a cache uint8 [blocks, page_size, layout.bytes]. A key is then
            [latent | rope] after dequantization: value * scale in fp32, rounded to bf16 for both
            products. L is `layout.latent` = 512; `FP8_DS_MLA` has 64 rotated columns beside it,
            `FP8_DS_MLA_V4` has them as the last 64 of it.
        scratch: refreshed for this step.
        sink: [H] fp32, one more score for each head, of a key whose value is zero; not in the LSE.
        Others, results and errors as `persistent_mla_decode` has them, but a layout has no
            kv_scale: its entries have scales of their own.
    """
    provider.require()
    kind = type(scratch).__name__  # not itself: shown, it would read its tensors
    check("scratch", isinstance(scratch, SparseScratch), "a SparseScratch", kind)
    check("q", isinstance(q, torch.Tensor), "a tensor", q)
    latent, count = scratch.plan.settings.v_head_dim, len(scratch.widths)
    found = scopes if isinstance(scopes, (list, tuple)) else [scopes]
    kinds = [type(scope).__name__ for scope in found]
    ok = found is scopes and kinds == ["Scope"] * count
    check("scopes", ok, f"a list of {count} Scope, as of the scratch", kinds)
    if out is None:
        dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
        out = q.new_empty((*q.shape[:2], latent), dtype=dtype)
    used = [scope.layout for scope in scopes]
    ok = all(layout is None or isinstance(layout, layouts.CacheLayout) for layout in used)
    check("the layouts of scopes", ok, "CacheLayouts or None", used)
    check("both scopes", len({*used}) == 1, "of one layout: one launch reads one of them", used)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    every = []
    for number, scope in enumerate(scopes):
        given = Inputs(
            q, scope.kv_cache, scratch.plan, scope.table, softmax_scale, q_scale, kv_scale, out,
            lse, layout=scope.layout,
        )  # fmt: skip
        try:
            _check_scope(given, scratch.widths[number], scratch.counted[number], sink)
        except ValueError as error:
            raise ValueError(f"scope {number}: {error}") from None
        every.append(given)
    added = Sparse(scopes[-1], scratch.first, scratch.first_lens, sink)
    provider.launch(dataclasses.replace(every[0], sparse=added))
    return out, lse


def _check_scope(given: Inputs, width: int, counted: bool, sink: torch.Tensor | None) -> None:
    """Raise ValueError unless the arguments for one scope fit."""
    validate(given)
    latent, heads = given.plan.settings.v_head_dim, given.plan.settings.num_heads
    if given.layout is None:
        provider.check_types(given.q, given.kv_cache, latent)
    else:
        none = "None: the entries of the cache have scales of their own"
        check("kv_scale", given.kv_scale is None, none, given.kv_scale)
        layouts.validate(given.q, given.kv_cache, given.plan.settings, given.layout)
        provider.refuse_fp8(given.q.device, kv_cache=given.plan.settings.kv_dtype)
    columns = given.block_table.shape[1]
    most = " at most" if counted else ", as no lengths were given"
    ok = columns == width or (columns < width and counted)
    check("the table", ok, f"{width} columns wide{most}", columns)
    if sink is not None:
        ok = fits(sink, torch.float32, (heads,), given.plan.device) and sink.is_contiguous()
        check("sink", ok, f"dense fp32 [{heads}] on {given.plan.device}", sink)
