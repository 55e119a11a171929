"""The plan of a persistent MLA decode: which worker decodes which keys of which sequence.

A plan is allocated once, for the largest batch, and refreshed in place at every step; its
addresses never change, so that a captured CUDA graph can read it. All layers of a step share it.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention.planner import WORK_COLUMNS, fill
from mla_fusion.attention.settings import Settings, complete

if TYPE_CHECKING:
    from mla_fusion.attention.aiter import Companions

_I32 = torch.int32


@dataclasses.dataclass(frozen=True)
class Step:
    """What a plan was last refreshed for, as the host knows it."""

    batch: int
    num_tokens: int
    max_query_len: int


@dataclasses.dataclass(eq=False)
class PersistentDecodePlan:
    """The buffers of a persistent decode, and what they were refreshed for.

    With W workers, B = max_batch * fold tiles (a tile is one head block of one sequence), and
    capacities N of work items and P of partial pieces (`planner.Rules`):

    work_metadata_ptrs: [2] uint64, the addresses of work_indptr and work_info_set.
    work_indptr: [W + 1] int32; worker w executes the items work_indptr[w] ... [w + 1] - 1.
    work_info_set: [N, 8] int32, a row for each work item:
        0 batch_idx   tile = sequence * fold + head block
        1 partial row first row in partial_output, -1 if the item is its whole sequence
        2, 3 qo_start, qo_end   rows of the folded query: those of head block f of sequence b
                      start at qo_indptr[b] * fold + f * (rows of b); row i among them is the
                      token qo_indptr[b] + i
        4, 5 kv_start, kv_end   tokens in the concatenation of all sequences: token
                      kv_start - kv_indptr[b] of sequence b, and so on
        6 kv_offset   tokens of this sequence from kv_end to its end
        7 padding
    reduce_indptr: [B + 1] int32; tile t is merged from the pieces reduce_indptr[t] ... [t + 1] - 1,
        none if it was not split; constant behind the last sequence.
    reduce_final_map: [B, 2] int32, (qo_start, qo_end) of a split tile; not written for others.
    reduce_partial_map: [P or more] int32, the first partial row of each piece.
    qo_indptr, kv_indptr: [max_batch + 1] int32, copies of the step's; constant behind its batch.
    partial_output, partial_lse: fp32 [P * max_query_len, per_work (, v_head_dim)]: row r of a
        piece and its natural-log LSE, normalized within the piece; an LSE of -inf stands for
        a row that sees no key of the piece. Empty if the plan is AITER's, which has its own.

    planner_scratch: [max_batch + W] int64, notes of the portable planner while it runs on a device.
        Empty if the plan is AITER's.

    refreshes: how often the plan was refreshed. fresh: whether no decode was launched since: the
    next one may then directly follow the kernel that writes the plan. aiter: what AITER's decode
    is called with beside the plan; None if the plan is portable.

    The causal rule: row i of n sees a token of its sequence iff n - 1 - i or more tokens follow
    it, so inside a work item token k of the concatenation iff
    k < kv_end + kv_offset - (n - 1 - i).

    The first six have AITER's names, shapes and meaning (`get_mla_metadata_v1`, page size 1).
    """

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
    step: Step | None = None
    fresh: bool = True
    refreshes: int = 0
    aiter: Companions | None = None

    @property
    def fold(self) -> int:
        """Head blocks of a sequence: sequence, block = divmod(batch_idx, fold)."""
        return self.settings.layout.fold

    @property
    def heads_per_work(self) -> int:
        """Heads of a work item; those from the query's head count on are padding."""
        return self.settings.layout.per_work

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self.work_indptr.device

    @classmethod
    def allocate(
        cls,
        *,
        max_batch: int,
        max_query_len: int,
        num_heads: int,
        q_dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device | str,
        workers: int | None = None,
        heads_per_work: int | None = None,
        max_split_per_batch: int = -1,
        kv_granularity: int = 16,
        overhead: int | None = None,
        v_head_dim: int = 512,
        planner: str = "auto",
    ) -> PersistentDecodePlan:
        """A plan for up to `max_batch` sequences of up to `max_query_len` query rows each.

        Args:
            num_heads: heads of the query on this rank.
            q_dtype, kv_dtype: of the query and the cache.
            device: where the plan and everything it is used with lives.
            workers: workgroups of the kernel, by default the multiprocessors of the device.
            heads_per_work: heads of a work item, a multiple of 16; by default as
                `heads.layout`.
            max_split_per_batch: -1, or a budget of this many pieces for each sequence (and head
                block), shared by all of them.
            kv_granularity: sequences are cut at multiples of this many tokens; for AITER's planner
                a power of two.
            overhead: fixed cost of a work item in units of kv_granularity tokens, by default 16.
            v_head_dim: width of the output, kv_lora_rank.
            planner: "portable", for this library's kernels; "aiter", for AITER's; or "auto", which
                is AITER's where `selection.aiter_verdict` has nothing against it.

        Raises:
            ValueError: an argument is out of range, or AITER was asked for and has no kernel; the
                message says why.
            ProviderUnavailable: AITER was asked for and is not here.
        """
        device = torch.device(device)
        settings = complete(
            max_batch=max_batch,
            max_query_len=max_query_len,
            num_heads=num_heads,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            device=device,
            workers=workers,
            heads_per_work=heads_per_work,
            max_split_per_batch=max_split_per_batch,
            kv_granularity=kv_granularity,
            overhead=overhead,
            v_head_dim=v_head_dim,
            planner=planner,
        )
        buffers: dict[str, Any]
        partial_rows = notes = 0
        if settings.planner == "aiter":
            from mla_fusion.attention import aiter

            buffers = aiter.allocate(settings, device)
        else:
            buffers = _allocate(settings, device)
            partial_rows = settings.rules.max_partials(max_batch) * max_query_len
            notes = max_batch + settings.rules.workers
        per_work = settings.layout.per_work
        return cls(
            **buffers,
            qo_indptr=torch.zeros(max_batch + 1, dtype=_I32, device=device),
            kv_indptr=torch.zeros(max_batch + 1, dtype=_I32, device=device),
            partial_output=torch.zeros((partial_rows, per_work, v_head_dim), device=device),
            partial_lse=torch.zeros((partial_rows, per_work), device=device),
            planner_scratch=torch.zeros(notes, dtype=torch.int64, device=device),
            settings=settings,
        )

    def refresh(
        self,
        *,
        qo_indptr: torch.Tensor,
        seq_lens: torch.Tensor,
        num_tokens: int,
        max_query_len: int,
    ) -> None:
        """Plan one step, in place: no host sync, the same addresses.

        On a GPU `qo_indptr` and `seq_lens` are read by kernels, the portable planner's is one and
        allocates nothing: a captured refresh replays with whatever lengths the two hold then.

        Args:
            qo_indptr: [batch + 1] int32 (vLLM's query_start_loc), from 0, not decreasing.
                Sequences without rows are padding.
            seq_lens: [batch] int32, KV tokens of each sequence, its new ones included.
            num_tokens: query rows of the step, with padding: the first dimension of the query.
            max_query_len: most query rows of a sequence in this step.

        Raises:
            ValueError: the step is larger than the plan, or a tensor is not as above.
        """
        settings, batch = self.settings, seq_lens.shape[0]
        for name, tensor, length in (
            ("qo_indptr", qo_indptr, batch + 1),
            ("seq_lens", seq_lens, batch),
        ):
            if tensor.dtype != _I32 or tensor.shape != (length,) or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} must be a dense int32 tensor of {length} elements (a batch of "
                    f"{batch}), got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if tensor.device != self.device:
                raise ValueError(f"{name} is on {tensor.device}, the plan on {self.device}")
        if not 1 <= batch <= settings.max_batch:
            raise ValueError(
                f"a batch of {batch} does not fit a plan for up to {settings.max_batch} "
                "sequences: allocate it for the largest batch"
            )
        if not 1 <= max_query_len <= settings.max_query_len:
            raise ValueError(
                f"{max_query_len} query rows do not fit a plan for up to "
                f"{settings.max_query_len} a sequence: allocate it for the longest query"
            )
        if settings.planner == "aiter":
            from mla_fusion.attention import aiter

            aiter.fill(self, qo_indptr, seq_lens, max_query_len)
        elif self.device.type == "cpu":
            fill(
                SimpleNamespace(**{name: getattr(self, name).numpy() for name in PLANNED}),
                settings.rules,
                qo_indptr.numpy(),
                seq_lens.numpy(),
                max_query_len,
            )
        else:
            from mla_fusion.attention import planner_triton

            planner_triton.fill(self, qo_indptr, seq_lens, max_query_len)
        self.step = Step(batch, num_tokens, max_query_len)
        self.fresh = True
        self.refreshes += 1


# The buffers that a refresh writes.
PLANNED = (
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
    "qo_indptr",
    "kv_indptr",
)


def _allocate(settings: Settings, device: torch.device) -> dict[str, torch.Tensor]:
    """The six buffers of the portable planner, zeroed."""
    rules, max_batch = settings.rules, settings.max_batch
    tiles = max_batch * rules.fold
    shapes = {
        "work_indptr": (rules.workers + 1,),
        "work_info_set": (rules.max_works(max_batch), WORK_COLUMNS),
        "reduce_indptr": (tiles + 1,),
        "reduce_final_map": (tiles, 2),
        "reduce_partial_map": (rules.partial_map_size(max_batch),),
    }
    six = {name: torch.zeros(shape, dtype=_I32, device=device) for name, shape in shapes.items()}
    addresses = [six["work_indptr"].data_ptr(), six["work_info_set"].data_ptr()]
    six["work_metadata_ptrs"] = torch.tensor(addresses, device=device).view(torch.uint64)
    return six
