"""Whether fusion applies to an engine, by vLLM's config of it."""

from typing import Any

import torch

from mla_fusion import attention, kernels
from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.config import PLANNED, Options, read_options, vllm_compat
from mla_fusion.report.reasons import Decline, sparse


def why_not(vllm_config: Any, partition_refused: bool = False) -> Decline | None:
    """Why the passes cannot fire in an engine whose flag is on, and whose operator switched
    Inductor's graph partition off if `partition_refused`. vLLM's defaults and its platform were
    applied to its config.

    Raises:
        OptionError: as `read_options`.
    """
    options = read_options(vllm_config.additional_config)
    version = vllm_compat.installed_version()
    if not vllm_compat.is_supported(version):
        return Decline("vllm-version", f"{version}, supported are {vllm_compat.window()}")
    model, compilation = _served_model(vllm_config), vllm_config.compilation_config
    if model is None or not vllm_compat.uses_mla(model):
        return Decline("no-mla", getattr(model, "architecture", "") or "")
    # Before what vLLM does with the class: that depends on the release and on the platform.
    if decline := sparse(model.architecture, getattr(model.hf_text_config, "index_topk", None)):
        return decline
    if not options.provider:
        return Decline("provider-platform")
    try:
        kernels.get_provider(options.provider)
    except kernels.ProviderUnavailable as error:
        return Decline("provider-unavailable", f"{options.provider}: {error}")
    planned = options.attention in PLANNED
    if planned and (decline := why_no_plan(vllm_config, options)):
        return decline
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return Decline("context-parallel", "prefill")
    if parallel.decode_context_parallel_size > 1:
        if options.provider == "aiter":
            return Decline("context-parallel", "AITER leaves out queries of other ranks' tokens")
        if planned:
            return Decline("context-parallel", f"attention={options.attention}")
    if partition_refused and compilation.splitting_ops != []:
        return Decline("graph-partition")
    cudagraph_mode = getattr(compilation.cudagraph_mode, "name", None)
    # vLLM turns the second into FULL when there is nothing to split at.
    if cudagraph_mode == "FULL" or (
        cudagraph_mode == "FULL_AND_PIECEWISE" and compilation.splitting_ops == []
    ):
        return Decline("cudagraph-full")
    if compilation.inductor_compile_config.get("enable_auto_functionalized_v2"):
        return Decline("functionalization-v2")
    if compilation.mode == 0 and vllm_compat.runs_breakable_cudagraphs():
        return Decline("breakable-cudagraph", model.architecture)
    # Last: on a CPU the mode is only kept if nothing else speaks against fusion.
    if compilation.mode != 3 or compilation.backend not in ("", "inductor"):
        return Decline("not-compiled", f"mode {compilation.mode}, backend {compilation.backend!r}")
    return None


def _served_model(vllm_config: Any) -> Any:
    """The config of the model that the engine serves: a draft model's VllmConfig holds its own, and
    shares the compilation config with the engine's, which must not be decided differently."""
    target = getattr(vllm_config.speculative_config, "target_model_config", None)
    return target or vllm_config.model_config


def why_no_plan(vllm_config: Any, options: Options) -> Decline | None:
    """Why the decode of `options.attention` cannot run in this engine, whatever its layers are."""
    asked = f"attention={options.attention}"
    executor = "aiter"
    if options.attention == "portable":
        executor = attention.portable_provider(torch.device(vllm_config.device_config.device_type))
        asked += f", {executor}"
    elif not vllm_compat.is_rocm():
        return Decline("attention-platform")
    try:
        attention.get_provider(executor)
    except kernels.ProviderUnavailable as error:
        return Decline("provider-unavailable", f"{asked}: {error}")
    if why := planner_aiter.cannot_cap(options.max_split_per_batch):
        return Decline("provider-unavailable", f"{asked}: {why}")
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        return Decline("microbatches")
    return None
