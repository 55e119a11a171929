"""Whether the flag applies to an engine, decided while vLLM makes the engine's config."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mla_fusion import config, ops, report
from mla_fusion.config import no_effect, vllm_compat
from mla_fusion.plugin import flag
from mla_fusion.plugin.wrap import wrap
from mla_fusion.runtime import decode_choice, sparse_step

if TYPE_CHECKING:
    from collections.abc import Callable

# Below vLLM's logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.mla_fusion")

_REFUSED = "_mla_fusion_refused"  # on a VllmConfig: what the operator switched off


def decide_in_vllm_config() -> None:
    """Why: the decode bucket must be a compile-range endpoint, and RoPE, cache write and attention
    must end up in one graph, before vLLM freezes both.

    How: note what the operator set before `VllmConfig.__post_init__`, decide in
    `_set_compile_ranges` (the defaults and the platform are applied by then, the ranges and the
    splitting ops are not), and add the ops to splitting_ops afterwards. Until: vLLM lets a plugin
    take part in config resolution.
    """
    from vllm.config import VllmConfig

    def post_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            pass_config = self.compilation_config.pass_config
            _adopt(pass_config)
            if not config.is_on(self):
                no_effect.warn(self, vllm_compat.chose_sparse_backend(self, sparse_step.BACKEND))
                original(self, *args, **kwargs)
                return
            setattr(self, _REFUSED, config.refused_by_operator(self.compilation_config))
            try:
                original(self, *args, **kwargs)
            finally:
                # `replace`, with which vLLM makes a draft model's config, only takes known fields.
                delattr(self, _REFUSED)
            if config.is_on(self):
                _extend_splitting_ops(self.compilation_config)

        return wrapper

    def set_compile_ranges(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any) -> None:
            if config.is_on(self):
                apply_decision(self)
            original(self)

        return wrapper

    wrap(VllmConfig, "__post_init__", post_init)
    wrap(VllmConfig, "_set_compile_ranges", set_compile_ranges)


def _adopt(pass_config: Any) -> None:
    """Make vLLM's PassConfig one of ours if the flag was set on it as an attribute."""
    if config.FLAG in vars(pass_config):
        fields = {config.FLAG: False, config.THRESHOLD: None, **vars(pass_config)}
        pass_config.__class__ = type(flag.instance(fields))
        pass_config.__dict__ = fields


def decide(vllm_config: Any) -> config.Decision:
    """`config.decide` of a config, with what its operator refused."""
    refused: frozenset[str] = getattr(vllm_config, _REFUSED, frozenset())
    return config.decide(vllm_config, partition_refused=config.PARTITION in refused)


def apply_decision(vllm_config: Any) -> None:
    """Switch the prerequisites on, or the flag off."""
    from vllm.platforms import current_platform

    compilation = vllm_config.compilation_config
    refused: frozenset[str] = getattr(vllm_config, _REFUSED, frozenset())
    decision = decide(vllm_config)
    if decision.decline:
        setattr(compilation.pass_config, config.FLAG, False)
        setattr(compilation.pass_config, config.THRESHOLD, None)
        no_effect.is_told(compilation)
        logger.warning("%s is switched off: %s", report.FLAG_LINE, decision.decline.explain())
        return
    switched = []
    if compilation.splitting_ops != [] and not compilation.use_inductor_graph_partition:
        compilation.use_inductor_graph_partition = True
        switched.append(config.PARTITION)
    inductor = compilation.inductor_compile_config
    if current_platform.is_cuda_alike() and config.REALIZE not in inductor:
        inductor[config.REALIZE] = 1  # else RMS norms add up to five residual tensors anew
        switched.append(f"{config.REALIZE}=1")
    pass_config = compilation.pass_config
    if not current_platform.is_cuda_alike():
        # vLLM switches it on where RoPE and cache write share a graph, but its pass manager only
        # imports that pass for GPUs.
        pass_config.fuse_rope_kvcache_cat_mla = False
    elif vllm_config.parallel_config.decode_context_parallel_size > 1:
        # Its kernel takes a slot of -1 for padding and rotates neither query nor key there; under
        # decode context parallelism that is the slot of another rank's token, also in prefill.
        if pass_config.fuse_rope_kvcache_cat_mla:
            logger.warning(
                "mla-fusion: fuse_rope_kvcache_cat_mla is switched off: under decode context "
                "parallelism it leaves the tokens of other ranks unrotated"
            )
        pass_config.fuse_rope_kvcache_cat_mla = False
    elif not pass_config.fuse_rope_kvcache_cat_mla and config.ROPE_CAT not in refused:
        pass_config.fuse_rope_kvcache_cat_mla = True
        switched.append(config.ROPE_CAT)
    if switched:
        said = "%s sets for the whole engine, prefill included: %s"
        logger.info(said, report.FLAG_LINE, ", ".join(switched))
    decode_choice.choose_page(vllm_config)
    asked = getattr(pass_config, config.THRESHOLD)
    if asked not in (None, decision.bucket):
        logger.warning(
            "mla-fusion: %s=%d becomes %d: it is at least 2, vLLM's smallest compile range, and "
            "at most max_num_batched_tokens",
            config.THRESHOLD, asked, decision.bucket,
        )  # fmt: skip
    # Kept: the bucket depends on the sizes of CUDA graphs, which vLLM may change later.
    setattr(pass_config, config.THRESHOLD, decision.bucket)
    endpoints = set(compilation.compile_ranges_endpoints or [])
    if decision.bucket not in endpoints:
        compilation.compile_ranges_endpoints = sorted({*endpoints, decision.bucket})
        fused = "%s: graphs for up to %d tokens are fused by the %s provider"
        logger.debug(fused, config.FLAG, decision.bucket, decision.provider)


def _extend_splitting_ops(compilation: Any) -> None:
    if "vllm::unified_mla_attention_with_output" in (compilation.splitting_ops or []):
        missing = [op for op in ops.RUNTIME_OPS if op not in compilation.splitting_ops]
        compilation.splitting_ops = [*compilation.splitting_ops, *missing]
