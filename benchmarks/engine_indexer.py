"""An indexer without kernels for the sparse engines of `benchmarks/engine.py`, and their arms.

vLLM's indexer needs DeepGEMM. This one chooses by position alone, so all arms choose the same
tokens: up to `index_topk` every token, beyond that one of each of so many equal parts of the
sequence, the last token among them.

    other      FLASHMLA_SPARSE as vLLM calls it with 32 heads or more, each token a sequence
    custom     the backend CUSTOM as it comes
    ours       CUSTOM with no limit on heads and tokens of a step
    shifted    as `ours`, and wrong: slots 2n and 2n + 1 are swapped
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch
from vllm.model_executor.models import ModelRegistry, deepseek_v2
from vllm.utils.torch_utils import direct_register_custom_op

from mla_fusion.config import vllm_compat

PRIME, MODULUS = 7919, 1_000_003


def choose(positions: torch.Tensor, chosen: torch.Tensor, layer: int) -> None:
    """Write the choice of each token into its row of `chosen` [.., n] int32, -1 behind the last."""
    width = chosen.shape[1]
    seen = positions.long()[:, None] + 1
    column = torch.arange(width, device=positions.device)
    first, end = column * seen // width, (column + 1) * seen // width
    size = (end - first).clamp(min=1)
    offset = ((seen * PRIME + column * (layer + 1)) * PRIME % MODULUS) % size
    picked = torch.where(column == width - 1, seen - 1, first + offset)
    every = torch.where(column < seen, column, -1)
    chosen[: len(positions)] = torch.where(seen <= width, every, picked).int()


direct_register_custom_op(
    op_name="mla_fusion_fixed_indexer",
    op_func=choose,
    mutates_args=["chosen"],
    fake_impl=lambda positions, chosen, layer: None,
)


class Indexer(torch.nn.Module):
    """In place of vLLM's, with its arguments."""

    def __init__(
        self, vllm_config: Any, config: Any, hidden_size: int, q_lora_rank: int, quant_config: Any,
        cache_config: Any, topk_indices_buffer: torch.Tensor, prefix: str, **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.topk_tokens, self.topk_indices_buffer = config.index_topk, topk_indices_buffer
        self.layer = int(prefix.split("layers.")[1].split(".")[0])
        # Of a cache that it does not have.
        self.k_cache = types.SimpleNamespace(prefix="")

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rope: Any
    ) -> torch.Tensor:
        """The buffer that all layers share."""
        torch.ops.vllm.mla_fusion_fixed_indexer(positions, self.topk_indices_buffer, self.layer)
        return self.topk_indices_buffer


def has_class_for_cuda() -> bool:
    """Whether vLLM's registry has classes of the model by platform."""
    registered = ModelRegistry.models["DeepseekV32ForCausalLM"]
    return bool(registered.module_name == "vllm.models.deepseek_v32")


def replace_attention() -> None:
    """Let layers of the model's class for CUDA choose by `choose`."""
    from vllm.models.deepseek_v32 import attention
    from vllm.models.deepseek_v32.nvidia import model

    class Attention(attention.DeepseekV32Attention):  # type: ignore[misc, name-defined]
        """Each layer stays the first one of a choice, as with an indexer of its own."""

        indexer_cls = Indexer

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.skip_topk = True

        def _sparse_indexer_and_attn(self, positions: torch.Tensor, *rest: Any) -> None:
            self.indexer(None, None, positions, None)
            super()._sparse_indexer_and_attn(positions, *rest)

    model.DeepseekV32Attention = Attention
    if importlib.util.find_spec("cutlass") is None:
        # Imported on every NVIDIA GPU for a kernel of those from sm_100 on.
        name = "vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl"
        absent = types.ModuleType(name)
        absent.fused_q_cutedsl = None
        absent.is_fused_q_cutedsl_supported = lambda *_, **__: False
        sys.modules[name] = absent


def install(arm: str) -> None:
    """Replace the indexer in this process, and do what the arm is."""
    deepseek_v2.Indexer = Indexer
    if has_class_for_cuda():
        replace_attention()
    if arm == "other":
        from vllm.v1.attention.backends.mla import flashmla_sparse

        flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL = 0
    if arm in ("ours", "shifted"):
        from mla_fusion.runtime import sparse_step

        sparse_step.most_tokens = lambda heads, cache: 128
    if arm == "shifted":
        right = vllm_compat.cache_slots

        def wrong(metadata: Any, chosen: torch.Tensor) -> torch.Tensor:
            slots = right(metadata, chosen)
            return torch.where(slots < 0, slots, slots ^ 1)

        vllm_compat.cache_slots = wrong
