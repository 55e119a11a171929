"""Which decode steps of a sparse layer this library takes, and what all layers share for them.

The decode is `attention.sparse`. Its plan depends only on the number of tokens, because every row
of slots counts as a whole, with -1 for none. The first layer of a forward pass refreshes it; in a
captured graph that is a kernel of the graph.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention.layouts import FP8_DS_MLA, WIDE
from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from mla_fusion.attention.triton import Scope
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import triton as provider
from mla_fusion.report.reasons import Decline

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("vllm.mla_fusion")

# Of the implementation of a layer of CUSTOM.
ATTRIBUTE = "mla_fusion_step"
LATENT = FP8_DS_MLA.latent
# By vLLM's cache type, the layout of the entries; None for bf16, as the query.
LAYOUTS = {"fp8_ds_mla": FP8_DS_MLA, "auto": None, "bfloat16": None}
# By layout: most query heads of a rank, and most tokens of a step, that this library decodes faster
# than FlashMLA, which pads every rank to 64 heads. Measured on an H200 with 1 to 128 tokens of 8
# and 16 heads by itself (benchmarks/results/sparse_h200.csv), and with 1, 32 and 128 requests of 16
# heads in an engine (benchmarks/results/engine_sparse_h200.csv).
FASTER: dict[Any, tuple[tuple[int, int], ...]] = {FP8_DS_MLA: ((16, 128),), None: ((16, 32),)}


def most_tokens(heads: int, layout: Any) -> int:
    """Most tokens of a step that this library decodes with so many heads; 0 for none."""
    return next((tokens for most, tokens in FASTER[layout] if heads <= most), 0)


class SparseStep:
    """The scratch of one shape of layer, and the query and latents of the layer that runs."""

    def __init__(self, heads: int, width: int, layout: Any, device: torch.device) -> None:
        most = most_tokens(heads, layout)
        self.layout = layout
        self.scratch = sparse_scratch(
            max_tokens=most,
            num_heads=heads,
            widths=(width,),
            q_dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16 if layout is None else torch.float8_e4m3fn,
            device=device,
        )
        self.q, self.out = (
            torch.zeros(most, heads, columns, dtype=torch.bfloat16, device=device)
            for columns in (LATENT + WIDE, LATENT)
        )
        self._planned: tuple[Any, int] = (None, 0)

    def serves(self, tokens: int, metadata: Any) -> bool:
        """Whether this library decodes the step: few tokens, and none of them of a prefill."""
        return 0 < tokens <= len(self.out) and tokens == metadata.num_decode_tokens

    def decode(
        self, q: Any, cache: torch.Tensor, chosen: torch.Tensor, metadata: Any, scale: float
    ) -> torch.Tensor:
        """Latents [T, H, 512] of a step, at an address that the next layer writes again.

        Args:
            q: [T, H, 512 + 64], or its two parts.
            chosen: [T, n] int32, positions within a token's own sequence, -1 for none.
        """
        tokens = chosen.shape[0]
        # A new context for each forward pass.
        context = vllm_compat.forward_context()
        if self._planned[0] is not context or self._planned[1] != tokens:
            self.scratch.refresh(tokens, [None])
            self._planned = context, tokens
        if isinstance(q, tuple):
            latent, rotated = q
            q = self.q[:tokens]
            vllm_compat.join_query(latent, rotated, q)
        stored = cache if self.layout is None else cache.view(torch.uint8)
        scope = Scope(stored, vllm_compat.cache_slots(metadata, chosen), self.layout)
        out = self.out[:tokens]
        sparse_mla_decode(q, [scope], self.scratch, softmax_scale=scale, out=out)
        return out

    def describe(self) -> str:
        """What it is for, in a line of the log."""
        settings, scratch = self.scratch.plan.settings, self.scratch.plan.tensors().values()
        size = sum(x.nbytes for x in (*scratch, self.q, self.out)) / 2**20
        cache = "bf16" if self.layout is None else f"{self.layout.bytes} bytes an entry"
        return (
            f"decode steps of up to {settings.max_batch} tokens are this library's "
            f"({settings.num_heads} heads, {self.scratch.widths[0]} slots, {cache}, {size:.1f} MiB "
            "for all layers), larger ones are FLASHMLA_SPARSE's"
        )


# Shared by the layers of a process.
_shared = functools.cache(SparseStep)


def attach(layers: Mapping[str, Any], vllm_config: Any) -> None:
    """Give each layer of the backend CUSTOM what it shares with those of its shape.

    It stays None where vLLM decodes every step. The log says both, and each reason, once.
    """
    said: Counter[tuple[int, str]] = Counter()
    for layer in layers.values():
        impl: Any = getattr(layer, "impl", None)
        if not hasattr(impl, ATTRIBUTE):
            continue
        decline = why_not(impl, vllm_config)
        if decline is not None:
            left = f"every step is left to FLASHMLA_SPARSE: {decline.explain()}"
            said[logging.WARNING, left] += 1
            continue
        chosen = impl.topk_indices_buffer
        layout = LAYOUTS[impl.kv_cache_dtype]
        step = _shared(impl.num_heads, chosen.shape[1], layout, chosen.device)
        setattr(impl, ATTRIBUTE, step)
        said[logging.INFO, step.describe()] += 1
    if said and vllm_compat.is_first_rank():
        for (level, what), count in said.items():
            logger.log(level, "attention backend CUSTOM, %d layers: %s", count, what)


def why_not(impl: Any, vllm_config: Any) -> Decline | None:
    """Why no decode of a layer is this library's."""
    if not vllm_compat.is_hopper():
        return Decline("sparse-platform")
    try:
        provider.require()
    except ProviderUnavailable as error:
        return Decline("provider-unavailable", str(error))
    parallel = vllm_config.parallel_config
    widths = impl.kv_lora_rank, impl.qk_rope_head_dim
    found = {
        f"latents and rotated part of {widths}": widths != (LATENT, WIDE),
        f"kv_cache_dtype {impl.kv_cache_dtype}": impl.kv_cache_dtype not in LAYOUTS,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "HiSparse": vllm_compat.keeps_cache_on_host(vllm_config),
        "dual batch overlap": bool(getattr(parallel, "use_ubatching", False)),
        "no list of chosen tokens": impl.topk_indices_buffer is None,
    }
    named = [what for what, holds in found.items() if holds]
    if named:
        return Decline("sparse-layer", ", ".join(named))
    if not most_tokens(impl.num_heads, LAYOUTS[impl.kv_cache_dtype]):
        return Decline("sparse-slower", f"{impl.kv_cache_dtype}, {impl.num_heads} heads of a rank")
    return None
