"""Sparse layers on ROCm: whether their decode is this library's, and where their slots are.

Nothing here has run on AMD hardware, so nothing is taken unless an operator asks for it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mla_fusion import config
from mla_fusion.attention.cdna.fits import why_no_sparse
from mla_fusion.attention.plan.device import cdna
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline


class FirstColumns:
    """Rows of slots from the metadata of ROCM_AITER_MLA_SPARSE.

    The first columns of a token's row of positions are its choice, as many as two elements of
    `paged_kv_indptr` differ, in a row of padding none. vLLM lists their slots without gaps, as
    pages of one token. Here its kernel writes them in rows of one width, and the plan counts as
    many of each: both decodes read the same entries.
    """

    def __init__(self, most: int, width: int, device: torch.device) -> None:
        ends = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.starts = ends * width
        self.lens = torch.zeros(most, dtype=torch.int32, device=device)
        self.slots = torch.zeros(most, width, dtype=torch.int32, device=device)

    def lengths(self, tokens: int, metadata: Any) -> torch.Tensor:
        """[T]: columns of each token that count, as the metadata's tensors have them now."""
        ends = metadata.paged_kv_indptr
        return torch.sub(ends[1 : tokens + 1], ends[:tokens], out=self.lens[:tokens])

    def convert(self, metadata: Any, chosen: torch.Tensor) -> torch.Tensor:
        """[T, n]: slots of the positions in `chosen`; columns that do not count hold any."""
        tokens = chosen.shape[0]
        out = self.slots[:tokens]
        vllm_compat.write_cache_slots(metadata, chosen, self.starts[: tokens + 1], out.view(-1))
        return out

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds at fixed addresses."""
        return self.starts, self.lens, self.slots


def why_not(vllm_config: Any) -> Decline | None:
    """Why no sparse layer of an engine is decoded by this library."""
    if not cdna(vllm_config.device_config.device_type):
        return Decline("sparse-platform")
    if config.read_options(vllm_config.additional_config).attention != "portable":
        return Decline("sparse-unmeasured")
    why = why_no_sparse()
    return Decline("provider-unavailable", why) if why else None


def caches() -> Mapping[str, torch.dtype]:
    """By vLLM's cache type, that of the entries: as a bf16 query, or fp8 with the layer's scale."""
    fp8 = vllm_compat.fp8_dtype()
    return {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8": fp8, "fp8_e4m3": fp8}


def unserved(impl: Any, vllm_config: Any) -> dict[str, bool]:
    """What vLLM's layers have on ROCm alone, and whether this one has it."""
    model, chosen = vllm_config.model_config, impl.topk_indices_buffer
    most = model.hf_text_config.index_topk
    columns = most if chosen is None else chosen.shape[1]
    return {
        f"activations of {model.dtype}": model.dtype != torch.bfloat16,
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a quantized query": bool(impl.supports_quant_query_input),
        f"{columns} columns for {most} chosen tokens": columns != most,
    }
