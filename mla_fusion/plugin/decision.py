"""Whether the flag applies to an engine, decided while vLLM makes the engine's config."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mla_fusion import config
from mla_fusion.config import no_effect, vllm_compat
from mla_fusion.plugin import flag
from mla_fusion.plugin.wrap import wrap

if TYPE_CHECKING:
    from mla_fusion.config.engine import Decision

_REFUSED = "_mla_fusion_refused"  # on a VllmConfig: the operator switched graph partition off


def decide_in_vllm_config() -> None:
    """Why: the decode bucket must be a compile-range endpoint, and RoPE, cache write and attention
    must end up in one graph, before vLLM freezes both.

    How: note what the operator set before `VllmConfig.__post_init__`, decide in
    `_set_compile_ranges` (the defaults and the platform are applied by then, the ranges and the
    splitting ops are not), and add the ops to splitting_ops afterwards. Until: vLLM lets a plugin
    take part in config resolution.
    """
    from vllm.config import VllmConfig

    wrap(VllmConfig, "__post_init__", _post_init)
    wrap(VllmConfig, "_set_compile_ranges", _set_compile_ranges)


def _post_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    _adopt(self.compilation_config.pass_config)
    if not config.is_on(self):
        no_effect.warn(self, vllm_compat.chose_sparse_backend(self, config.SPARSE_BACKEND))
        original(self, *args, **kwargs)
        return
    # vLLM's defaults fill in what is None.
    setattr(self, _REFUSED, self.compilation_config.use_inductor_graph_partition is False)
    try:
        original(self, *args, **kwargs)
    finally:
        # `replace`, with which vLLM makes a draft model's config, only takes known fields.
        delattr(self, _REFUSED)
    if config.is_on(self):
        _extend_splitting_ops(self.compilation_config)


def _set_compile_ranges(original: Callable[..., Any], self: Any) -> None:
    if config.is_on(self):
        from mla_fusion.plugin import prerequisites

        prerequisites.apply(self, decide(self))
    original(self)


def _adopt(pass_config: Any) -> None:
    """Make vLLM's PassConfig one of ours if the flag was set on it as an attribute."""
    if config.FLAG in vars(pass_config):
        fields = {config.FLAG: False, config.THRESHOLD: None, **vars(pass_config)}
        pass_config.__class__ = type(flag.instance(fields))
        pass_config.__dict__ = fields


def decide(vllm_config: Any) -> Decision:
    """`config.engine.decide` of a config, with what its operator refused."""
    from mla_fusion.config import engine

    return engine.decide(vllm_config, partition_refused=getattr(vllm_config, _REFUSED, False))


def _extend_splitting_ops(compilation: Any) -> None:
    from mla_fusion import ops

    if "vllm::unified_mla_attention_with_output" in (compilation.splitting_ops or []):
        missing = [op for op in ops.RUNTIME_OPS if op not in compilation.splitting_ops]
        compilation.splitting_ops = [*compilation.splitting_ops, *missing]
