"""The data of a plan: its settings, its buffers and the step it was refreshed for.

Planners write these buffers and executors read them; neither imports the other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention.plan.heads import HeadLayout
from mla_fusion.kernels.inputs import check, check_whole

MOST_TOKENS = 2**31 - 1  # of kv_indptr
OVERHEAD = 16  # default fixed cost of a work item, in blocks: AITER's
# The planner's kernel sums in 32 bits: the fixed costs of a step, in blocks, and the tokens of a
# block leave room for the keys.
MOST_FIXED, MOST_OVERHEAD, MOST_GRANULARITY = 2**28, 2**10, 2**16
PLANNER_LANES = 8  # budgets that it may try at once

# Of a batch-invariant plan: chunks of the first kind, and the length of its first two kinds in
# such chunks. On an H200 short contexts want short chunks, and long ones would fill memory.
NEAR, FAR = 4, 32

# The six buffers that AITER knows, in the order of get_mla_metadata_info_v1.
AITER_BUFFERS = (
    "work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map",
    "reduce_partial_map",
)  # fmt: skip
PLANNED = (*AITER_BUFFERS[1:], "qo_indptr", "kv_indptr")  # what a refresh writes


def device_of(device: Any) -> torch.device:
    """The argument `device` as torch has it; ValueError if it names none."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"device must be one such as 'cuda' or 'cpu', got {device!r}") from None


def cuts(tokens: int, near: int, middle: int, far: int) -> list[int]:
    """The tokens at which the chunks of a sequence of `tokens` begin, with `Settings.chunks`."""
    first, second = NEAR * near, FAR * near
    behind = [*range(first, min(tokens, second), middle), *range(second, tokens, far)]
    return [*range(0, min(max(tokens, 1), first), near), *behind]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The constants of a planner, as in `Settings`; fold: head blocks of a sequence."""

    ctas: int
    fold: int
    granularity: int
    overhead: int
    max_split_per_batch: int
    chunk: int = 0  # tokens; 0: the batch decides where a sequence is cut
    middle: int = 0  # tokens of a chunk behind the first NEAR
    far: int = 0  # and from token FAR * chunk on
    room: int = 0  # most tokens of a sequence

    def cuts(self, tokens: int) -> list[int]:
        """The tokens at which the chunks of a sequence begin."""
        return cuts(tokens, self.chunk, self.middle, self.far)

    def busy_ctas(self, batch: int) -> int:
        """CTAs that may get work from `batch` sequences."""
        cap = self.max_split_per_batch * batch * self.fold
        return self.ctas if self.max_split_per_batch < 0 else min(self.ctas, cap)

    def max_works(self, max_batch: int) -> int:
        """Most work items of a plan: each tile ends once, each CTA but one cuts once; or all
        chunks."""
        if self.chunk:
            return max_batch * self.fold * len(self.cuts(self.room))
        return max_batch * self.fold + self.ctas - 1

    def max_partials(self, max_batch: int) -> int:
        """Most splits that are merged: two for each CTA, one for the first and the last; or all
        chunks, each of which has its own."""
        works = self.max_works(max_batch)
        return works if self.chunk else min(works, 2 * (self.ctas - 1))

    def partial_map_size(self, max_batch: int) -> int:
        """Length of reduce_partial_map, which AITER makes larger than needed with a cap. The
        reduction reads the second in any case."""
        tiles, cap = max_batch * self.fold, self.max_split_per_batch
        with_cap = tiles + min(self.ctas, cap * tiles) if cap > 0 else 0
        return max(self.max_partials(max_batch), with_cap, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `PersistentDecodePlan.allocate`.

    Attributes:
        max_batch, max_query_len: most sequences, and query rows of each.
        num_heads: of this rank.
        ctas: by default as many as the device has SMs.
        heads_per_work: heads of a work item, a multiple of 16; by default as `heads.layout`.
        max_split_per_batch: -1, or a budget of this many splits for each sequence (and head
            block), shared by all of them.
        max_kv_len: most KV tokens of a sequence. AITER's plan then holds the cache entry of every
            token at a fixed address; without it the first decode of a step allocates them. A
            batch-invariant plan needs it: it has room for all chunks of max_batch sequences.
        kv_granularity: tokens of a block, 65536 at most: sequences are cut at multiples of it.
            AITER's planner takes a power of two.
        overhead: fixed cost of a work item, in blocks; by default 16. At most 1024, and less for
            more than 2^18 tiles: 2^28 blocks over max_batch * num_heads / 16.
        v_head_dim: L, the latent width: columns of the output of the decode, in front of its
            product with W_UV. It is kv_lora_rank of a model, 512 for DeepSeek, and not the
            model's v_head_dim.
        planner: "portable", for the kernels of this library, or "aiter", for AITER's.
        batch_invariant: every sequence is cut into `chunks`, and its splits are merged in order.
            The bits of a row then depend on its query and the keys that it sees alone: neither on
            the other sequences of a step or their number, nor on the drafts behind the row, ctas or
            max_batch. For a kernel computes every row of a tile by itself, its tiles begin at fixed
            tokens of a sequence, and a key that a row does not see adds a zero. An epilogue has a
            kernel for that on Hopper alone.
        chunks: tokens of the first NEAR chunks, of those up to token FAR * chunks[0], and of those
            behind it: multiples of kv_granularity, the second a divisor of (FAR - NEAR) *
            chunks[0]. The bits depend on them.
    """

    max_batch: int
    max_query_len: int
    num_heads: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    ctas: int | None = None
    heads_per_work: int | None = None
    max_split_per_batch: int = -1
    max_kv_len: int | None = None
    kv_granularity: int = 16
    overhead: int | None = None
    v_head_dim: int = 512
    planner: str = "portable"
    batch_invariant: bool = False
    chunks: tuple[int, int, int] = (256, 512, 1024)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_of(self.device))
        cap = self.max_split_per_batch
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "torch.dtype":
                is_type = isinstance(value, torch.dtype)
                check(field.name, is_type, "a type such as torch.bfloat16", value)
                ok = value.is_floating_point and value.itemsize <= 4
                check(field.name, ok, "bf16, fp16, fp32 or fp8", value)
            elif field.type.startswith("int") and not (value is None and "None" in field.type):
                check_whole(field.name, value)
                ok = field.name == "max_split_per_batch" or value >= 1
                check(field.name, ok, "at least 1", value)
        check("max_split_per_batch", cap == -1 or cap >= 1, "-1 (no cap) or at least 1", cap)
        known = self.planner in ("portable", "aiter")
        check("planner", known, '"portable" or "aiter"', self.planner)
        tiles = self.max_batch * -(-self.num_heads // 16)
        most, overhead = min(MOST_OVERHEAD, MOST_FIXED // tiles), self.overhead or OVERHEAD
        want = f"at most {most} for {tiles} tiles, whose costs are summed in 32 bits"
        check("overhead", overhead <= most, want, overhead)
        granularity, want = self.kv_granularity, f"at most {MOST_GRANULARITY}"
        check("kv_granularity", granularity <= MOST_GRANULARITY, want, granularity)
        if self.batch_invariant:
            check("planner", self.planner == "portable", '"portable", with chunks', self.planner)
            check("max_kv_len", self.max_kv_len is not None, "given, with chunks", None)
            near, middle, _ = self.chunks
            ok = min(self.chunks) > 0 and (FAR - NEAR) * near % middle == 0
            ok &= not any(tokens % granularity for tokens in self.chunks)
            want = f"three multiples of kv_granularity ({granularity}), {FAR - NEAR} of the first "
            check("chunks", ok, want + "a multiple of the second", self.chunks)
        if (tokens := self.max_batch * (self.max_kv_len or 0)) > MOST_TOKENS:
            raise ValueError(
                f"{self.max_batch} sequences of {self.max_kv_len} KV tokens are {tokens}, and a "
                f"plan counts them in 32 bits: {MOST_TOKENS} at most; lower max_batch (vLLM: "
                "max_num_seqs) or max_kv_len (max_model_len)"
            )

    def rules(self, fold: int) -> Rules:
        """The rules for sequences of `fold` head blocks; ValueError without a default of `ctas`."""
        ctas = gpu.of(self.device).sms if self.ctas is None else self.ctas
        if not ctas:
            raise ValueError(f"ctas must be given on {self.device}: it has no SMs")
        overhead = OVERHEAD if self.overhead is None else self.overhead
        common = ctas, fold, self.kv_granularity, overhead, self.max_split_per_batch
        if not self.batch_invariant:
            return Rules(*common)
        assert self.max_kv_len is not None, "checked"
        return Rules(*common, *self.chunks, self.max_kv_len)


@dataclasses.dataclass(frozen=True)
class Step:
    """The step of the last refresh, as the host knows it."""

    batch: int
    num_tokens: int
    max_query_len: int


@dataclasses.dataclass(eq=False)
class Companions:
    """Tensors that AITER's decode takes besides the plan, and tensors that correct its result.

    AITER gets the number of rows of every sequence that its kernel is for. The rows of a shorter
    query are the last of them, and the rows in front hold anything. N = max_batch * max_query_len
    query rows become M >= N of AITER's. Addresses are fixed, but for `expanded` without `entries`.
    A refresh writes `even` to `blind`.

    buffers: the six that AITER asked for, by name: a plan is for these and their addresses.
    last_page_lens: [max_batch] int32, ones: a page holds one token. counting: [M + 1], from 0.
    even: [max_batch + 1] int32, AITER's first row of each sequence.
    source: [M] int32, the query row of each of AITER's rows, or any where it has none.
    target: [N] int32, AITER's row of each query row.
    written, blind: [N] bool, the row belongs to a sequence; it sees no key.
    entries: [max_batch * max_kv_len] int32, the cache entry of each KV token of the plan; None
        without max_kv_len. listed: the same of a step, at an address of the caller's.
    captured: whether a CUDA graph recorded the last refresh.
    expanded: (key, cache entries) that the decodes of a step share."""

    buffers: dict[str, torch.Tensor]
    last_page_lens: torch.Tensor
    counting: torch.Tensor
    even: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    written: torch.Tensor
    blind: torch.Tensor
    entries: torch.Tensor | None
    listed: torch.Tensor | None = None
    captured: bool = False
    expanded: tuple[tuple[Any, ...], torch.Tensor] | None = None

    def check_buffers(self, plan: PlanBuffers) -> None:
        """Raise ValueError unless `plan` still has the buffers it was allocated with."""
        if replaced := [n for n, own in self.buffers.items() if getattr(plan, n) is not own]:
            raise ValueError(
                "AITER takes the six buffers that it sized for the plan, or none; "
                f"{', '.join(replaced)} is another tensor: allocate a new plan"
            )


@dataclasses.dataclass(eq=False, kw_only=True, repr=False)
class PlanBuffers:
    """The buffers of a persistent decode and the step they were refreshed for.

    W CTAs, B = max_batch * fold tiles (a tile is one head block of one sequence), room for N work
    items and P splits (`Rules`). The first six have AITER's names, shapes and meaning
    (`get_mla_metadata_v1`, page size 1):

    work_metadata_ptrs: [2] uint64, the addresses of work_indptr and work_info_set.
    work_indptr: [W + 1] int32; CTA w executes the items work_indptr[w] ... [w + 1] - 1.
    work_info_set: [N, 8] int32, a row for each work item:
        0 batch_idx   tile = sequence * fold + head block
        1 partial row first row in partial_output, -1 if the item is its whole sequence
        2, 3 qo_start, qo_end   rows of the folded query: those of head block f of sequence b start
                      at qo_indptr[b] * fold + f * (rows of b); row i is the token qo_indptr[b] + i
        4, 5 kv_start, kv_end   tokens in the concatenation of all sequences: the first is token
                      kv_start - kv_indptr[b] of sequence b
        6 kv_offset   tokens of this sequence from kv_end to its end
        7 kv_first    kv_indptr[b]; AITER has padding here
    reduce_indptr: [B + 1] int32; tile t is merged from the splits reduce_indptr[t] ... [t + 1] - 1,
        none if it was not split; constant after the last sequence.
    reduce_final_map: [B, 2] int32, (qo_start, qo_end) of a split tile; not written for others.
    reduce_partial_map: [P or more] int32, the first partial row of each split; max_query_len apart.
    qo_indptr, kv_indptr: [max_batch + 1] int32, copies of the step's; constant after its batch.
    partial_output, partial_lse: fp32 [P * max_query_len, per_work (, v_head_dim)]: a row of a split
        and its natural-log LSE, normalized within the split; -inf if the row sees no key of it.
    planner_scratch: int64, workspace of the portable planner on a device.

    AITER's plan, with `aiter`, has the last three empty: its decode has workspaces of its own.
    fresh: no decode was launched since the last refresh: the next may follow the planner's kernel.

    The causal rule: row i of n sees a token of its sequence iff n - 1 - i or more follow it, so in
    a work item token k of the concatenation iff k < kv_end + kv_offset - (n - 1 - i)."""

    work_metadata_ptrs: torch.Tensor
    work_indptr: torch.Tensor
    work_info_set: torch.Tensor
    reduce_indptr: torch.Tensor
    reduce_final_map: torch.Tensor
    reduce_partial_map: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    partial_output: torch.Tensor
    partial_lse: torch.Tensor
    planner_scratch: torch.Tensor
    settings: Settings
    layout: HeadLayout
    rules: Rules
    step: Step | None = None
    fresh: bool = True
    refreshes: int = 0
    aiter: Companions | None = None

    def __repr__(self) -> str:
        of, step = self.settings, self.step
        now = f"refreshed for {step.batch} sequences" if step else "never refreshed"
        return (
            f"{type(self).__name__}({of.planner}, {of.max_batch} sequences x {of.max_query_len} "
            f"rows, {of.num_heads} heads, {of.q_dtype} over {of.kv_dtype}, {self.rules.ctas} CTAs "
            f"on {of.device}, {now})"
        )

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self.work_indptr.device

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the plan and of its companions, by name; not the caller's `listed`."""
        owned = vars(self) if self.aiter is None else vars(self) | vars(self.aiter) | {"listed": 0}
        return {name: value for name, value in owned.items() if isinstance(value, torch.Tensor)}


def common_buffers(settings: Settings, layout: HeadLayout, *, portable: bool) -> dict[str, Any]:
    """The fields of a plan that every planner fills alike, zeroed. portable: it is not AITER's."""
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device=settings.device)
    rules, batch = settings.rules(layout.fold), settings.max_batch
    rows = rules.max_partials(batch) * settings.max_query_len if portable else 0
    tiles = batch * layout.fold + 1
    scratch = batch + rules.ctas + 1 + (2 + 2 * PLANNER_LANES) * tiles
    return {
        "settings": settings, "layout": layout, "rules": rules,
        "qo_indptr": zeros(batch + 1, dtype=torch.int32),
        "kv_indptr": zeros(batch + 1, dtype=torch.int32),
        "partial_output": zeros(rows, layout.per_work, settings.v_head_dim),
        "partial_lse": zeros(rows, layout.per_work),
        "planner_scratch": zeros(scratch if portable else 0, dtype=torch.int64),
    }  # fmt: skip
