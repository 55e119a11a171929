"""The arguments of a persistent decode, checked before anything is launched."""

import dataclasses
import math
import numbers
import operator
from typing import Any

import torch

from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.layouts import CacheLayout
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.inputs import check, check_whole, fits

OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Scope:
    """A cache, and of each sequence a row of `table`: its blocks, or in sparse decode slots."""

    kv_cache: torch.Tensor
    table: torch.Tensor
    layout: CacheLayout | None = None


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Arguments that sparse decode adds. extra: the scope after the first one; lens: [B] int32, how
    many of the first scope's `first` columns count; sink: [H] fp32 or None."""

    extra: Scope
    first: int
    lens: torch.Tensor
    sink: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of a dense or sparse decode, with `out` and, if wanted, `lse` allocated. kept:
    see `persistent_mla_decode`."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    plan: PlanBuffers
    block_table: torch.Tensor
    softmax_scale: float
    q_scale: torch.Tensor | None
    kv_scale: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    epilogue: Epilogue | None = None
    layout: CacheLayout | None = None
    sparse: Sparse | None = None
    kept: list[Any] | None = None

    @property
    def rows(self) -> int:
        """Query rows (position x head) of a work item."""
        return self.plan.layout.per_work * self.plan.settings.max_query_len

    @property
    def widths(self) -> tuple[int, int]:
        """L and R."""
        latent = self.plan.settings.v_head_dim
        return latent, self.q.shape[2] - latent

    def or_unused(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A tensor for an argument that is not read where there is none."""
        return self.plan.partial_lse if tensor is None else tensor

    @property
    def sink(self) -> torch.Tensor | None:
        return None if self.sparse is None else self.sparse.sink

    def entry(self, cache: torch.Tensor) -> int:
        """Elements from one entry of a page to the next."""
        return cache.stride(1) if self.layout is None else self.layout.entry_stride(cache)


def check_step(
    plan: PlanBuffers, qo_indptr: Any, seq_lens: Any, num_tokens: Any, max_query_len: Any
) -> None:
    """Raise ValueError unless the arguments are as `PersistentDecodePlan.refresh` has them; values
    of tensors are read on a CPU alone."""
    for name, indices in ("qo_indptr", qo_indptr), ("seq_lens", seq_lens):
        ok = isinstance(indices, torch.Tensor) and indices.dim() == 1
        check(name, ok, "a tensor of one dimension", indices)
    batch, most, longest = len(seq_lens), plan.settings.max_batch, plan.settings.max_query_len
    given = {"qo_indptr": (qo_indptr, batch + 1), "seq_lens": (seq_lens, batch)}
    for name, (tensor, length) in given.items():
        ok = fits(tensor, torch.int32, (length,), plan.device) and tensor.is_contiguous()
        want = f"a dense int32 tensor of {length} elements (a batch of {batch})"
        check(name, ok, f"{want} on {plan.device}", tensor)
    want = f"1 to {most} sequences: allocate the plan for the largest batch"
    check("the batch", 1 <= batch <= most, want, batch)
    check_whole("num_tokens", num_tokens)
    check("num_tokens", num_tokens >= 0, "0 or more", num_tokens)
    check_whole("max_query_len", max_query_len)
    want = f"1 to {longest}: allocate the plan for the longest query"
    check("max_query_len", 1 <= max_query_len <= longest, want, max_query_len)
    if plan.device.type != "cpu":
        return
    starts, shortest = qo_indptr.numpy().tolist(), int(seq_lens.numpy().min())
    check("qo_indptr", starts[0] == 0, "0 at its start", starts[0])
    for rows in map(operator.sub, starts[1:], starts):
        want = f"0 to {max_query_len} (max_query_len) more than the one before"
        check("each element of qo_indptr", 0 <= rows <= max_query_len, want, rows)
    check("seq_lens", shortest >= 0, "0 or more", shortest)
    if plan.rules.chunk:
        most, longest = plan.rules.room, int(seq_lens.max())
        want = f"at most {most} (max_kv_len)"
        check("seq_lens", longest <= most, want, longest)
    want = f"at least {starts[-1]}, the query rows of qo_indptr"
    check("num_tokens", num_tokens >= starts[-1], want, num_tokens)


def validate(given: Inputs) -> None:
    """Raise ValueError unless the arguments fit; lengths and block numbers are trusted, unread."""
    q, kv_cache, table, out = given.q, given.kv_cache, given.block_table, given.out
    tensors: dict[str, Any] = {"q": q, "kv_cache": kv_cache, "block_table": table, "out": out}
    for name, tensor in tensors.items():
        check(name, isinstance(tensor, torch.Tensor), "a tensor", tensor)
    plan, settings, step = given.plan, given.plan.settings, given.plan.step
    if step is None:
        raise ValueError("the plan was never refreshed: call plan.refresh(...) once a step")
    heads, latent, batch = settings.num_heads, settings.v_head_dim, step.batch
    check("q", q.dim() == 3, "[T, H, L + R]", q)
    tokens, width = q.shape[0], q.shape[2]
    rows = step.num_tokens
    of = f"the plan was refreshed for {rows} query rows in {batch} sequences; refresh it every step"
    check("q", tokens == rows, f"of {rows} rows: {of}", tokens)
    check("q", q.shape[1] == heads, f"of {heads} heads, as the plan", q.shape[1])
    check("q", width >= latent, f"{latent} wide (the latent width of the plan) or wider", width)
    check("q", q.dtype == settings.q_dtype, f"{settings.q_dtype}, as the plan", q.dtype)
    stored, kv_dtype, source = width, settings.kv_dtype, "as the plan"
    if given.layout is not None:
        stored, kv_dtype, source = given.layout.bytes, torch.uint8, "the bytes of its layout"
    ok = kv_cache.dim() == 3 and kv_cache.shape[2] == stored and kv_cache.shape[1] > 0
    check("kv_cache", ok, f"[blocks, page_size, {stored}], page_size 1 or more", kv_cache)
    check("kv_cache", kv_cache.dtype == kv_dtype, f"{kv_dtype}, {source}", kv_cache.dtype)
    ok = table.dim() == 2 and table.shape[0] == batch
    check("block_table", ok, f"[{batch}, max_blocks]: {of}", table)
    check("block_table", table.dtype == torch.int32, "int32", table.dtype)
    check("out", out.shape == (tokens, heads, latent), f"[{tokens}, {heads}, {latent}]", out)
    check("out", out.dtype in OUTPUT_DTYPES, "bf16, fp16 or fp32", out.dtype)
    number: Any = given.softmax_scale
    ok = isinstance(number, (float, numbers.Real)) and math.isfinite(number)
    check("softmax_scale", ok, "a finite number", number)
    for name, tensor in tensors.items():
        check(name, tensor.stride(-1) == 1, "dense in its last dimension", tensor.stride())
    if given.epilogue is not None:
        tensors |= given.epilogue.validate(tokens, heads, latent)
        weight = given.epilogue.w_uv.dtype
        check("out", out.dtype == weight, f"{weight}, as w_uv: it holds latents", out.dtype)
    scales = (("q_scale", given.q_scale, q), ("kv_scale", given.kv_scale, kv_cache))
    for name, scale, scaled in scales:
        if scale is not None or scaled.dtype in FP8_DTYPES:
            found = (scale.dtype, scale.numel()) if isinstance(scale, torch.Tensor) else None
            want = "a tensor of one fp32 element (None only without fp8)"
            check(name, found == (torch.float32, 1), want, scale)
            tensors[name] = scale
    for name, tensor in tensors.items():
        check(name, tensor.device == plan.device, f"on {plan.device}, as the plan", tensor.device)


def covers(given: Inputs) -> None:
    """Raise ValueError if the block table of a dense decode has too few columns for the lengths of
    the plan, or names a block that the cache does not have; it reads both."""
    plan, (count, page, _), table = given.plan, given.kv_cache.shape, given.block_table
    has_rows = plan.qo_indptr.diff() > 0
    lengths = (plan.kv_indptr.diff() * has_rows)[: len(table), None]
    longest = int(lengths.max())
    blocks, columns = -(-longest // page), table.shape[1]
    want = f"{blocks} blocks wide or wider, for {longest} KV tokens in pages of {page}"
    check("block_table", columns >= blocks, want, columns)
    named = table[torch.arange(columns, device=table.device) * page < lengths]
    wrong = named[(named < 0) | (named >= count)].tolist()
    check("block_table", not wrong, f"of blocks 0 to {count - 1} of kv_cache", wrong[:1])
