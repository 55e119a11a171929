"""The flag, the plugin's options, the decode bucket, and whether fusion applies to an engine.

Everything here reads vLLM's config objects and changes none; the plugin does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mla_fusion import attention, kernels
from mla_fusion.attention.aiter import planner as planner_aiter
from mla_fusion.config import vllm_compat
from mla_fusion.report.reasons import Decline, sparse

FLAG = "fuse_aiter_qk_rope_kvcache_mla"
THRESHOLD = "aiter_qk_rope_kvcache_fusion_max_token_num"
OPTIONS_KEY = "mla_fusion"
# Prerequisites that vLLM's defaults or the plugin switch on where the operator did not refuse them.
PARTITION, ROPE_CAT = "use_inductor_graph_partition", "fuse_rope_kvcache_cat_mla"
# Of torch._inductor.config: a value that is used twice is stored if it has more inputs.
REALIZE = "realize_reads_threshold"
# Of `Options.attention`: those that ask for a persistent decode.
PLANNED = ("portable", "aiter")
ATTENTION = ("auto", *PLANNED, "vllm")
_CHOICES = {"provider": kernels.PROVIDERS, "attention": ATTENTION}
_CAP = "max_split_per_batch"


class OptionError(ValueError):
    """The plugin's entry in additional_config has another name, or holds something unknown."""


@dataclass(frozen=True)
class Options:
    """additional_config["mla_fusion"].

    provider: who computes the fused op: "aiter" (default on ROCm), "triton" (default on CUDA) or
        "reference"; empty on a platform without a default.
    attention: who decodes with the prepared query: "portable", this library's persistent decode;
        "aiter", AITER's by a plan of this library; "vllm", vLLM's backend; or "auto" (default): the
        first where it was measured not slower than the last, else the last.
    max_split_per_batch: with "aiter", a budget of this many splits for each sequence, shared by all
        of a batch; -1 (default) for none.
    """

    provider: str
    attention: str = "auto"
    max_split_per_batch: int = -1


def read_options(additional_config: Any) -> Options:
    """The options of this plugin in vLLM's `additional_config`.

    Raises:
        OptionError: an unknown option, an unknown value of one, or the distribution's name as key.
    """
    given = additional_config if isinstance(additional_config, dict) else {}
    if "mla-fusion" in given:
        raise OptionError(
            f'additional_config["mla-fusion"]: the key is "{OPTIONS_KEY}", with an underscore'
        )
    raw = given.get(OPTIONS_KEY, {})
    if not isinstance(raw, dict):
        raise OptionError(
            f'additional_config["{OPTIONS_KEY}"] must be a dictionary such as '
            f'{{"provider": "triton"}}, got {raw!r}'
        )
    unknown = sorted(set(raw) - {*_CHOICES, _CAP})
    if unknown:
        known = "; ".join(f"{name} ({', '.join(_CHOICES[name])})" for name in _CHOICES)
        known += f"; {_CAP} (-1, or a whole number from 1 on)"
        raise OptionError(
            f'unknown option {", ".join(unknown)} in additional_config["{OPTIONS_KEY}"]; '
            f"there are {known}"
        )
    for name in _CHOICES.keys() & raw:
        if raw[name] not in _CHOICES[name]:
            raise OptionError(
                f"unknown {name} {raw[name]!r} in additional_config["
                f'"{OPTIONS_KEY}"]: choose one of {", ".join(_CHOICES[name])}'
            )
    _check_cap(raw)
    return Options(**{"provider": vllm_compat.default_provider(), **raw})


def _check_cap(raw: dict[str, Any]) -> None:
    """Raise OptionError unless the cap on splits is one, and somebody obeys it."""
    if _CAP not in raw:
        return
    cap, where = raw[_CAP], f'{_CAP} in additional_config["{OPTIONS_KEY}"]'
    # True is an int.
    if type(cap) is not int or (cap != -1 and cap < 1):
        raise OptionError(
            f"{where} must be -1, for no cap, or a whole number from 1 on, got {cap!r}"
        )
    if raw.get("attention") != "aiter":
        raise OptionError(
            f'{where} caps the plan of "attention": "aiter", and attention is '
            f'"{raw.get("attention", "auto")}": set both, or leave it out'
        )


def is_on(vllm_config: Any) -> bool:
    """Whether the flag is set; a config built before the plugin was loaded has no such field."""
    return bool(getattr(vllm_config.compilation_config.pass_config, FLAG, False))


def decode_bucket(vllm_config: Any) -> int:
    """The largest number of tokens of a graph in which the passes run.

    It is max_num_seqs * (1 + num_speculative_tokens), vLLM's own bound of a decode CUDA graph, or
    the size of the CUDA graph that vLLM pads such a batch to, unless the operator overrides it; and
    never more than max_num_batched_tokens. vLLM has no compile range for a single token, so the
    smallest bucket is 2.
    """
    scheduler = vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    bucket = getattr(compilation.pass_config, THRESHOLD, None)
    if bucket is None:
        query_len = 1 + draft_tokens(vllm_config)
        bucket = scheduler.max_num_seqs * query_len
        sizes = [n for n in compilation.cudagraph_capture_sizes or () if n >= bucket]
        if sizes:  # vLLM also rounds the sizes of decode graphs up to whole queries
            bucket = -(-min(sizes) // query_len) * query_len
    return min(max(bucket, 2), scheduler.max_num_batched_tokens)


def draft_tokens(vllm_config: Any) -> int:
    """Draft tokens that speculative decoding adds to each token of a decode step."""
    speculative = vllm_config.speculative_config
    return (speculative.num_speculative_tokens or 0) if speculative is not None else 0


@dataclass(frozen=True)
class Decision:
    """Whether the passes can fire in an engine; `decline` says why not."""

    provider: str
    bucket: int
    decline: Decline | None

    @property
    def applies(self) -> bool:
        """Whether there is no reason against it."""
        return self.decline is None


def refused_by_operator(compilation: Any) -> frozenset[str]:
    """The prerequisites that are False before vLLM's defaults fill in what is None."""
    values = {
        PARTITION: compilation.use_inductor_graph_partition,
        ROPE_CAT: compilation.pass_config.fuse_rope_kvcache_cat_mla,
    }
    return frozenset(name for name, value in values.items() if value is False)


def decide(vllm_config: Any, *, partition_refused: bool) -> Decision:
    """Whether fusion applies to an engine whose flag is on.

    Args:
        vllm_config: vLLM's, after its defaults and its platform were applied.
        partition_refused: whether PARTITION is in `refused_by_operator`.

    Raises:
        OptionError: as `read_options`.
    """
    options = read_options(vllm_config.additional_config)
    decline = _why_not(vllm_config, options, partition_refused)
    return Decision(options.provider, decode_bucket(vllm_config), decline)


def _served_model(vllm_config: Any) -> Any:
    """The config of the model the engine serves.

    A draft model's VllmConfig holds its own model, and shares the compilation config with the
    engine's: it must not be decided twice, and differently.
    """
    target = getattr(vllm_config.speculative_config, "target_model_config", None)
    return target or vllm_config.model_config


def _why_not(vllm_config: Any, options: Options, partition_refused: bool) -> Decline | None:
    version = vllm_compat.installed_version()
    if not vllm_compat.is_supported(version):
        return Decline("vllm-version", f"{version}, supported are {vllm_compat.window()}")
    model, compilation = _served_model(vllm_config), vllm_config.compilation_config
    if model is None or not vllm_compat.uses_mla(model):
        return Decline("no-mla", getattr(model, "architecture", "") or "")
    # Before what vLLM does with the class: that depends on the release and on the platform.
    if topk := getattr(model.hf_text_config, "index_topk", None):
        return sparse(model.architecture, topk)
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
