"""Eligibility for fusion: of an engine by vLLM's config of it, and of an MLA layer by its facts."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_fusion import attention, gpu, kernels
from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.attention.aiter import selection
from mla_fusion.config import PLANNED, Options, is_chosen, models, read_options, vllm_compat
from mla_fusion.kernels.card import Widths
from mla_fusion.report.reasons import Decline

_CACHE_TYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32")}
INVARIANT = "batch-invariant"  # code of vLLM's promise that a result does not depend on its batch
UNCHOSEN = "unchosen-layer"  # code of a layer that the option `layers` leaves out
# Opaque per-token byte formats, int8 and fp4 caches are written by kernels of their own.
FUSABLE_CACHES = {"auto", "fp8", "fp8_e4m3", *_CACHE_TYPES}


def why_not(vllm_config: Any) -> Decline | None:
    """Why an engine whose flag is on has nothing of it. vLLM's defaults and its platform
    were applied to its config. Raises as `read_options`."""
    options = read_options(vllm_config.additional_config)
    version = vllm_compat.installed_version()
    if not vllm_compat.is_supported(version):
        return Decline("vllm-version", f"{version}, supported are {vllm_compat.window()}")
    # A draft model's config holds its own model, and shares the compilation config with the
    # engine's, which must not be decided differently.
    served = getattr(vllm_config.speculative_config, "target_model_config", None)
    model, compilation = served or vllm_config.model_config, vllm_config.compilation_config
    if model is None or not vllm_compat.uses_mla(model):
        return Decline("no-mla", getattr(model, "architecture", "") or "")
    if (decline := why_not_here()) and decline.code != INVARIANT:
        return decline
    # Before what vLLM does with the class: that depends on the release and on the platform.
    topk = getattr(model.hf_text_config, "index_topk", None)
    if decline := why_sparse(model.architecture, topk):
        return decline
    if vllm_compat.is_batch_invariant():
        return _why_not_invariant(vllm_config, options)
    if not options.provider:
        return Decline("provider-platform")
    if why := kernels.why_unavailable(options.provider):
        return Decline("provider-unavailable", f"{options.provider}: {why}")
    planned = options.attention in PLANNED
    if planned and (decline := why_no_plan(vllm_config, options)):
        return decline
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return Decline("context-parallel", "prefill")
    if parallel.decode_context_parallel_size > 1:
        if decline := kernels.PROVIDERS[options.provider].ranks:
            return decline
        if planned:
            return Decline("context-parallel", f"attention={options.attention}")
    whole, mode = compilation.splitting_ops == [], getattr(compilation.cudagraph_mode, "name", "")
    # vLLM turns the second into FULL when there is nothing to split at.
    if mode == "FULL" or (mode == "FULL_AND_PIECEWISE" and whole):
        return Decline("cudagraph-full")
    if compilation.inductor_compile_config.get("enable_auto_functionalized_v2"):
        return Decline("functionalization-v2")
    if compilation.mode == 0 and vllm_compat.runs_breakable_cudagraphs():
        return Decline("breakable-cudagraph", model.architecture)
    # Last: on a CPU the mode is only kept if nothing else speaks against fusion.
    if compilation.mode != 3 or compilation.backend not in ("", "inductor"):
        return Decline("not-compiled", f"mode {compilation.mode}, backend {compilation.backend!r}")
    return None


def _why_not_invariant(vllm_config: Any, options: Options) -> Decline | None:
    """Why no plan of chunks can decode every step, with VLLM_BATCH_INVARIANT=1."""
    parallel, asked = vllm_config.parallel_config, options.attention
    unmeasured = asked == "auto" and vllm_compat.gpu_arch() not in gpu.HOPPER
    context = getattr(parallel, "prefill_context_parallel_size", 1) > 1
    for applies, detail in (
        (context or parallel.decode_context_parallel_size > 1, "context parallelism"),
        (options.provider == "aiter", "provider=aiter"),
        (asked not in ("auto", "portable"), f"attention={asked}"),
        (unmeasured, "attention=auto, not measured on this GPU"),
    ):
        if applies:
            return Decline(INVARIANT, detail)
    return why_no_plan(vllm_config, replace(options, attention="portable"))


def why_sparse(architecture: str, topk: int | None) -> Decline | None:
    """Decline of a model whose layers attend to chosen keys, by its class and the `index_topk` of
    its config; None for any other model."""
    served = models.facts(architecture).sparse
    if topk and served == "custom":
        return Decline("sparse-attention", f"index_topk {topk}")
    if topk or served == "own":
        return Decline("sparse-model", architecture)
    return None


def why_not_here() -> Decline | None:
    """Why no graph fuses in this process, by its environment alone."""
    if names := vllm_compat.switched_off():
        return Decline("environment", ", ".join(f"{name}=1" for name in names))
    return Decline(INVARIANT) if vllm_compat.is_batch_invariant() else None


def why_no_plan(vllm_config: Any, options: Options) -> Decline | None:
    """Why the decode of `options.attention` cannot run in this engine, whatever its layers are."""
    asked, executor = f"attention={options.attention}", "aiter"
    if options.attention == "portable":
        executor = attention.portable_provider(torch.device(vllm_config.device_config.device_type))
        asked += f", {executor}"
    elif not vllm_compat.is_rocm():
        return Decline("attention-platform")
    try:
        attention.get_provider(executor)
        why = planner_aiter.cannot_cap(options.max_split_per_batch)
    except kernels.ProviderUnavailable as error:
        why = str(error)
    if why:
        return Decline("provider-unavailable", f"{asked}: {why}")
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        return Decline("microbatches")
    return None


@dataclass(frozen=True)
class LayerFacts:
    """The facts of one layer that the passes need, free of references to the model.

    decline: why the fused op cannot serve it.
    no_plan: why the persistent decode that `attention` may come to cannot serve it.
    query, cache, activation: types of the prepared query, of the cache and of the activations.
    no_product: why a decode cannot multiply with W_UV; empty if it can.
    planner: who decodes: "portable", "aiter" or, by any other word, vLLM's backend.
    """

    decline: Decline | None
    query: torch.dtype
    cache: torch.dtype
    activation: torch.dtype
    no_product: str = ""
    planner: str = ""
    no_plan: Decline | None = None

    @property
    def plain_output(self) -> str:
        """Why the decode has no epilogue, which could quantize the output; empty if it has one."""
        if self.planner == "portable":
            return self.no_product
        return "AITER's decode has none" if self.planner == "aiter" else "vLLM's backend decodes"


def facts(
    layer: Any, provider: str, model: torch.dtype, attention: str = "auto", query_len: int = 1,
    planner: str = "", layers: str = "",
) -> LayerFacts:  # fmt: skip
    """The facts of one `MLAAttention` layer of vLLM after its weights were loaded.

    Args:
        model: the type of the model's activations, for a layer whose W_UK is packed. Other layers
            have activations of the type of W_UK.
        query_len: the most query tokens of a sequence in a decode step.
        planner: the persistent decode that `attention` may choose. If the user asked for it, a
            layer that it cannot serve is declined.
        provider, attention, layers: as in `config.Options`.
    """
    weights, fp8 = vllm_compat.weights(layer), vllm_compat.fp8_dtype()
    activation = model if weights.w_uk is None else weights.w_uk.dtype
    query, cache = activation, _CACHE_TYPES.get(layer.kv_cache_dtype, activation)
    if layer.kv_cache_dtype.startswith("fp8"):
        query, cache = fp8 if layer.impl.supports_quant_query_input else activation, fp8
    no_product = _no_product(weights.w_uv, activation)
    decline = _decline(layer, provider, weights, activation, cache)
    if layers and not is_chosen(layers, layer.layer_name):
        decline = Decline(UNCHOSEN, f"layers={layers}")
    planner, no_plan = attention if attention in PLANNED else planner, None
    if decline is None and planner:
        why = _no_plan(layer, planner, query, cache, query_len)
        no_plan = Decline(f"{planner}-attention", why) if why else None
    if attention in PLANNED:
        decline = decline or no_plan
    if vllm_compat.is_batch_invariant():  # no graph changes, with the plugin or without
        no_plan = decline or no_plan
        decline = Decline(INVARIANT)
    return LayerFacts(decline, query, cache, activation, no_product, attention, no_plan)


def _no_product(w_uv: torch.Tensor | None, activation: torch.dtype) -> str:
    """Why a decode cannot multiply with W_UV; empty if it can."""
    if w_uv is None:
        return "neither W_UV nor W_UV.weight is a plain tensor"
    if w_uv.dtype not in (torch.bfloat16, torch.float16) or w_uv.dtype != activation:
        return f"W_UV is {w_uv.dtype}, the activations are {activation}"
    return ""


def _decline(
    layer: Any, provider: str, weights: vllm_compat.Weights, activation: torch.dtype,
    cache: torch.dtype,
) -> Decline | None:  # fmt: skip
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
    packed, card = weights.packed, kernels.PROVIDERS[provider]
    if packed and not card.packed:
        return Decline("packed-weights", f"AITER {packed}")
    if packed and activation != torch.bfloat16:
        why = f"AITER's {packed} product is one of bf16, not of {activation}"
        return Decline("packed-weights", why)
    if not packed and weights.w_uk is None:
        return Decline("packed-weights", "neither W_UK_T nor W_UK_T.weight is a plain tensor")
    if cache not in (activation, vllm_compat.fp8_dtype()):
        return Decline("kv-cache-dtype", f"{layer.kv_cache_dtype} cache, {activation} activations")
    widths = Widths(layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank)
    return card.why_not(widths, cache, gpu.of(layer._k_scale.device))


def _no_plan(
    layer: Any, planner: str, query: torch.dtype, cache: torch.dtype, query_len: int
) -> str:
    """Why the persistent decode "portable" or "aiter" cannot serve this layer; empty if it can."""
    if getattr(layer, "non_causal_multi_token_decode", False):
        return "a draft layer without causal mask"
    if getattr(layer, "sliding_window", None) is not None:
        return "a sliding window"
    if getattr(layer.impl, "sinks", None) is not None:
        return "attention sinks"
    device, widths = layer._k_scale.device, (layer.kv_lora_rank, layer.qk_rope_head_dim)
    if planner == "aiter":
        heads, arch = layer.num_heads, gpu.of(device).arch
        if why := selection.unsupported_widths(*widths):
            return why
        why = selection.aiter_verdict_up_to(heads, query_len, query, cache, arch).unsupported
        return f"{heads} heads, {why}" if why else ""
    impl, executor = type(layer.impl).__name__, attention.portable_provider(device)
    if "Aiter" in impl:
        return f"{impl} has a persistent plan of its own, and attention=aiter another"
    why = attention.get_provider(executor).unsupported(query, cache, *widths)
    return f"{executor}: {why}" if why else ""
