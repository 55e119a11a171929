"""The plan of a persistent MLA decode: which CTA decodes which keys of which sequence.

A plan is allocated once, for the largest batch, and refreshed in place at every step; its
addresses never change, so that a captured CUDA graph can read it. All layers of a step share it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.attention.plan import planner
from mla_fusion.attention.plan.buffers import PlanBuffers, Settings, Step


@dataclasses.dataclass(eq=False, kw_only=True)
class PersistentDecodePlan(PlanBuffers):
    """`PlanBuffers` with the planner that writes them, a module that has

    PROVIDERS               names of the providers that execute its plans, the default first
    require(settings)       raises ValueError or ProviderUnavailable where it cannot plan
    allocate(settings)      the fields of `PlanBuffers`
    fill(plan, qo_indptr, seq_lens, max_query_len)    writes the plan of a step, in place
    """

    planner: Any

    @classmethod
    def allocate(cls, **arguments: Any) -> PersistentDecodePlan:
        """A plan for up to `max_batch` sequences of up to `max_query_len` query rows each.

        Args:
            arguments: the fields of `plan.buffers.Settings`; `device` may be a string.

        Raises:
            ValueError: an argument is out of range, or AITER was asked for and has no kernel.
            ProviderUnavailable: AITER was asked for and is not here.
        """
        settings = Settings(**arguments)
        portable: Any = planner
        if settings.device.type != "cpu":
            # Imported here: a CPU does without Triton.
            from mla_fusion.attention.plan import planner_triton as portable
        modules = {"portable": portable, "aiter": planner_aiter}
        if settings.planner not in modules:
            raise ValueError(
                f"unknown planner {settings.planner!r}: choose one of {', '.join(modules)}"
            )
        module = modules[settings.planner]
        module.require(settings)
        return cls(**module.allocate(settings), planner=module)

    def refresh(
        self,
        *,
        qo_indptr: torch.Tensor,
        seq_lens: torch.Tensor,
        num_tokens: int,
        max_query_len: int,
    ) -> None:
        """Plan one step, in place: no host sync, the same addresses.

        On a GPU kernels read `qo_indptr` and `seq_lens`. The portable planner is one kernel and
        allocates nothing: a captured refresh replays with the lengths that the two hold then.

        Args:
            qo_indptr: [batch + 1] int32 (vLLM's query_start_loc), from 0, not decreasing.
                Sequences without rows are padding.
            seq_lens: [batch] int32, KV tokens of each sequence, its new ones included; on a CPU
                2^31 - 1 together, at most.
            num_tokens: query rows of the step, with padding: the first dimension of the query.
            max_query_len: most query rows of a sequence in this step.

        Raises:
            ValueError: the step is larger than the plan, or a tensor is not as above.
        """
        settings, batch = self.settings, seq_lens.shape[0]
        given = {"qo_indptr": (qo_indptr, batch + 1), "seq_lens": (seq_lens, batch)}
        for name, (tensor, length) in given.items():
            shaped = tensor.shape == (length,) and tensor.is_contiguous()
            if tensor.dtype != torch.int32 or not shaped:
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
        self.planner.fill(self, qo_indptr, seq_lens, max_query_len)
        self.step = Step(batch, num_tokens, max_query_len)
        self.fresh = True
        self.refreshes += 1
