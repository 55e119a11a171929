"""Which decode steps of a sparse layer this library takes, and what all layers share for them.

The decode is `attention.sparse`. The first layer of a forward pass refreshes its plan; in a
captured graph that is a kernel of the graph. On Hopper the plan depends on the number of tokens
alone: every column of a row of slots counts, -1 is none. `sparse_rocm` has what differs on ROCm.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mla_fusion import config
from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, WIDE
from mla_fusion.attention.sparse import sparse_mla_decode, sparse_scratch
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import ProviderUnavailable
from mla_fusion.kernels import triton as provider
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import sparse_rocm

# Of the implementation of a layer with the attention backend CUSTOM.
ATTRIBUTE = "mla_fusion_step"
LATENT = FP8_DS_MLA.latent
# By vLLM's cache type, the layout of the entries; None for bf16, as the query.
LAYOUTS = {"fp8_ds_mla": FP8_DS_MLA, "auto": None, "bfloat16": None}
# By layout: most query heads of a rank, and most tokens of a step, that this library decodes faster
# than vLLM's choice; FlashMLA pads a rank to 64 or 128 heads. Measured by itself on an H200, 1 to
# 128 tokens (benchmarks/results/sparse_h200.csv).
FASTER: dict[Any, tuple[tuple[int, int], ...]] = {
    FP8_DS_MLA: ((32, 128), (64, 64), (128, 16)),
    None: ((16, 16),),
}


def most_tokens(heads: int, layout: Any) -> int:
    """Most tokens of a step that this library decodes with so many heads; 0 for none."""
    return next((tokens for most, tokens in FASTER[layout] if heads <= most), 0)


class Shared:
    """The scratch that layers of one shape and engine share, and the forward pass of its plan."""

    kind = ""  # of several in a model

    def __init__(
        self, most: int, heads: int, widths: tuple[int, ...], layout: Any, kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.heads, self.most, self.layout, self.kv_dtype = heads, most, layout, kv_dtype
        self.scratch = sparse_scratch(
            max_tokens=most, num_heads=heads, widths=widths, q_dtype=torch.bfloat16,
            kv_dtype=kv_dtype, device=device, layout=layout,
        )  # fmt: skip
        self._planned: tuple[Any, int] = (None, 0)

    def begins(self, tokens: int) -> bool:
        """Whether its plan is of another forward pass, drafts' too, or of another size."""
        before, self._planned = self._planned, (vllm_compat.forward_context(), tokens)
        return before[0] is not self._planned[0] or before[1] != tokens

    def tensors(self) -> list[torch.Tensor]:
        """What it holds at fixed addresses."""
        return [*self.scratch.plan.tensors().values()]


class Step(Shared):
    """What all layers of a shape share: query and latents of the layer that runs too."""

    def __init__(
        self, most: int, heads: int, width: int, layout: Any, kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(most, heads, (width,), layout, kv_dtype, device)
        rocm = vllm_compat.is_rocm()
        self.rows = sparse_rocm.FirstColumns(most, width, device) if rocm else None
        self.q, self.out = (
            torch.zeros(most, heads, columns, dtype=torch.bfloat16, device=device)
            for columns in (LATENT + WIDE, LATENT)
        )

    def serves(self, tokens: int, metadata: Any) -> bool:
        """Whether this library decodes the step: few tokens, and none of them of a prefill."""
        return 0 < tokens <= len(self.out) and tokens == metadata.num_decode_tokens

    def decode(
        self, q: Any, cache: torch.Tensor, chosen: torch.Tensor, metadata: Any, layer: Any,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """Latents [T, H, 512] of a step, at an address that the next layer writes again.

        q: [T, H, 512 + 64], or its two parts. chosen: [T, n] int32, positions within a token's own
        sequence, -1 for none. layer: whose `_k_scale` an fp8 cache without a layout has.
        """
        tokens, rows = chosen.shape[0], self.rows
        if self.begins(tokens):
            self.scratch.refresh(tokens, [rows.lengths(tokens, metadata) if rows else None])
        if isinstance(q, tuple):
            latent, rotated = q
            q = self.q[:tokens]
            vllm_compat.join_query(latent, rotated, q)
        scaled = self.layout is None and self.kv_dtype.itemsize == 1
        stored = cache.view(self.kv_dtype if self.layout is None else torch.uint8)
        slots = (rows.convert if rows else vllm_compat.cache_slots)(metadata, chosen)
        out = self.out[:tokens]
        sparse_mla_decode(
            q, [Scope(stored, slots, self.layout)], self.scratch, softmax_scale=scale,
            kv_scale=layer._k_scale if scaled else None, out=out,
        )  # fmt: skip
        return out

    def tensors(self) -> list[torch.Tensor]:
        """What it holds at fixed addresses."""
        return [*super().tensors(), self.q, self.out, *(self.rows.tensors() if self.rows else ())]


def shape(impl: Any, vllm_config: Any) -> tuple[Any, ...]:
    """The arguments of `Step` for a layer that this library decodes."""
    heads, chosen, cache = impl.num_heads, impl.topk_indices_buffer, impl.kv_cache_dtype
    width, device = chosen.shape[1], chosen.device
    if vllm_compat.is_rocm():
        most, kv_dtype = config.decode_bucket(vllm_config), sparse_rocm.caches()[cache]
        return most, heads, width, None, kv_dtype, device
    layout = LAYOUTS[cache]
    kv_dtype = torch.bfloat16 if layout is None else torch.float8_e4m3fn
    return most_tokens(heads, layout), heads, width, layout, kv_dtype, device


def why_not(impl: Any, vllm_config: Any) -> Decline | None:
    """Why no decode of a layer is this library's."""
    rocm = vllm_compat.is_rocm()
    if not (rocm or vllm_compat.is_hopper()):
        return Decline("sparse-platform")
    if rocm and (decline := sparse_rocm.why_not(vllm_config)):
        return decline
    if decline := unavailable():
        return decline
    widths = vllm_compat.sparse_widths(impl)
    caches: Mapping[str, Any] = sparse_rocm.caches() if rocm else LAYOUTS
    found = {
        f"latents and rotated part of {widths}": widths != (LATENT, WIDE),
        f"kv_cache_dtype {impl.kv_cache_dtype}": impl.kv_cache_dtype not in caches,
        "no list of chosen tokens": impl.topk_indices_buffer is None,
        **unserved(vllm_config),
        **(sparse_rocm.unserved(impl, vllm_config) if rocm else {}),
    }
    if named := [what for what, holds in found.items() if holds]:
        return Decline("sparse-layer", ", ".join(named))
    if not rocm and not most_tokens(impl.num_heads, LAYOUTS[impl.kv_cache_dtype]):
        return Decline("sparse-slower", f"{impl.kv_cache_dtype}, {impl.num_heads} heads of a rank")
    return None


def unavailable() -> Decline | None:
    """Why the kernels of this library cannot run in this process."""
    try:
        provider.require()
    except ProviderUnavailable as error:
        return Decline("provider-unavailable", str(error))
    return None


def unserved(vllm_config: Any) -> dict[str, bool]:
    """What engines may have that no sparse decode of this library takes, and whether one has it."""
    parallel = vllm_config.parallel_config
    return {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "HiSparse": vllm_compat.keeps_cache_on_host(vllm_config),
        "dual batch overlap": bool(getattr(parallel, "use_ubatching", False)),
    }
