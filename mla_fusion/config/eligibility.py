"""Which MLA layers the fused op can serve: facts read from vLLM's layer, and the verdict."""

from dataclasses import dataclass
from typing import Any

import torch

from mla_fusion import kernels
from mla_fusion.attention import get_provider, portable_provider
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.plan import device
from mla_fusion.config import PLANNED, vllm_compat
from mla_fusion.kernels.triton import no_fp8
from mla_fusion.report.reasons import Decline

_CACHE_TYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
# Opaque per-token byte formats, int8 and fp4 caches are written by kernels of their own.
FUSABLE_CACHES = {"auto", "fp8", "fp8_e4m3", *_CACHE_TYPES}


@dataclass(frozen=True)
class LayerFacts:
    """What the passes need to know of one layer, free of references to the model.

    `decline` says why the fused op cannot serve it; `quantized_query`: the backend takes an fp8
    query over an fp8 cache; `plain_output` says why its attention op cannot quantize its output.
    """

    decline: Decline | None
    quantized_query: bool
    plain_output: str = ""

    def query_dtype(self, activation: torch.dtype) -> torch.dtype:
        """The type of the prepared query."""
        return vllm_compat.fp8_dtype() if self.quantized_query else activation


def facts(
    layer: Any, provider: str, activation: torch.dtype, attention: str = "auto", query_len: int = 1
) -> LayerFacts:
    """The facts of one `MLAAttention` layer of vLLM after its weights were loaded.

    `activation` is the type of the graph's activations, `query_len` the most query tokens of a
    sequence in a decode step; the other two as in `config.Options`.
    """
    fp8 = layer.kv_cache_dtype.startswith("fp8")
    quantized = fp8 and bool(layer.impl.supports_quant_query_input)
    decline = _decline(layer, provider, activation)
    if decline is None and attention in PLANNED:
        types = vllm_compat.fp8_dtype() if quantized else activation, cache_dtype(layer, activation)
        code, found = "portable-attention", _not_causal(layer)
        if attention == "aiter":
            code, found = "aiter-attention", found or _not_of_aiter(layer, *types, query_len)
        else:
            found = found or _not_portable(layer, *types)
        decline = Decline(code, found) if found else None
    return LayerFacts(decline, quantized, no_epilogue(layer, attention, activation))


def no_epilogue(layer: Any, attention: str, activation: torch.dtype) -> str:
    """Why the decode of this layer by "portable", "aiter" or another word, vLLM's backend, has no
    epilogue; empty if it has one."""
    if attention != "portable":
        return "AITER's decode has none" if attention == "aiter" else "vLLM's backend decodes"
    weight = vllm_compat.value_weight(layer)
    if weight is None:
        return "neither W_UV nor W_UV.weight is a plain tensor"
    if weight.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != activation:
        return f"W_UV is {weight.dtype}, the activations are {activation}"
    return ""


def cache_dtype(layer: Any, activation: torch.dtype) -> torch.dtype:
    """The type of a layer's cache, one of `FUSABLE_CACHES`."""
    if layer.kv_cache_dtype.startswith("fp8"):
        return vllm_compat.fp8_dtype()
    return _CACHE_TYPES.get(layer.kv_cache_dtype, activation)


def _decline(layer: Any, provider: str, activation: torch.dtype) -> Decline | None:
    impl = layer.impl
    if getattr(impl, "is_sparse", False) or getattr(layer, "use_sparse", False):
        return Decline("sparse-attention", type(impl).__name__)
    if getattr(layer, "hisparse_cache", None) is not None:
        return Decline("hisparse")
    if getattr(layer, "use_pcp", False):
        return Decline("context-parallel", "prefill")
    padded = getattr(layer, "q_pad_num_heads", None)
    if padded not in (None, layer.num_heads):
        return Decline("padded-heads", f"{layer.num_heads} to {padded}")
    if layer.kv_cache_dtype not in FUSABLE_CACHES:
        return Decline("kv-cache-dtype", layer.kv_cache_dtype)
    if getattr(layer, "is_amx_bmm_enabled", False):
        return Decline("packed-weights", "AMX")
    packed = vllm_compat.packed_weight(layer)
    if packed and provider != "aiter":
        return Decline("packed-weights", f"AITER {packed}")
    if packed and activation != torch.bfloat16:
        why = f"AITER's {packed} product is one of bf16, not of {activation}"
        return Decline("packed-weights", why)
    if not packed and vllm_compat.absorb_weight(layer) is None:
        return Decline("packed-weights", "neither W_UK_T nor W_UK_T.weight is a plain tensor")
    if cache_dtype(layer, activation) not in (activation, vllm_compat.fp8_dtype()):
        return Decline("kv-cache-dtype", f"{layer.kv_cache_dtype} cache, {activation} activations")
    fp8 = provider == "triton" and layer.kv_cache_dtype.startswith("fp8")
    if fp8 and (why := no_fp8(layer._k_scale.device)):
        return Decline("kv-cache-dtype", why)
    widths = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    if why := kernels.unsupported(provider, *widths):
        return Decline("shape", f"provider {provider}: {why}")
    return None


def _not_causal(layer: Any) -> str:
    """Why the attention of this layer is not plain and causal, as every plan is; empty if it is."""
    found = {
        "a draft layer without causal mask": getattr(layer, "non_causal_multi_token_decode", False),
        "a sliding window": getattr(layer, "sliding_window", None) is not None,
        "attention sinks": getattr(layer.impl, "sinks", None) is not None,
    }
    return next((detail for detail, is_so in found.items() if is_so), "")


def _not_portable(layer: Any, query: torch.dtype, cache: torch.dtype) -> str:
    """Why the portable decode cannot serve this layer; empty if it can."""
    impl = type(layer.impl).__name__
    if "Aiter" in impl:
        return f"{impl} has a persistent plan of its own, and attention=aiter another"
    executor = portable_provider(layer._k_scale.device)
    widths = layer.kv_lora_rank, layer.qk_rope_head_dim
    unsupported = get_provider(executor).unsupported(query, cache, *widths)
    return f"{executor}: {unsupported}" if unsupported else ""


def _not_of_aiter(layer: Any, query: torch.dtype, cache: torch.dtype, query_len: int) -> str:
    """Why AITER's persistent decode cannot serve this layer; empty if it can."""
    if widths := selection.unsupported_widths(layer.kv_lora_rank, layer.qk_rope_head_dim):
        return widths
    arch = device.architecture(layer._k_scale.device)
    why = selection.aiter_verdict_up_to(layer.num_heads, query_len, query, cache, arch).unsupported
    return f"{layer.num_heads} heads, {why}" if why else ""
