"""Whether the flag applies to an engine, decided while vLLM makes the engine's config."""

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import flag
from mla_fusion.plugin.wrap import WRAPPED, wrap

if TYPE_CHECKING:
    from mla_fusion.report.reasons import Decline

logger = logging.getLogger("vllm.mla_fusion")

_REFUSED = "_mla_fusion_refused"  # on a VllmConfig: the operator switched graph partition off
_SINGLE_TRACE = 2  # CompilationMode.DYNAMO_TRACE_ONCE, an IntEnum
# Compilation configs whose operator was told all there is to tell of a flag that is off, by id:
# other configs of an engine, as a draft model's, are made with the same one.
_told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


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


def keep_vllm_compile() -> None:
    """Why: on a CPU vLLM replaces its piecewise backend, which runs passes, by a single trace.

    How: if only the mode speaks against fusion, restore mode and backend after the platform's
    check. Until: vLLM keeps VLLM_COMPILE on a CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    original = platform.check_and_update_config
    if hasattr(platform, WRAPPED):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        original(vllm_config)
        became = compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap
        compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = asked
        on = became[0] == _SINGLE_TRACE and config.is_on(vllm_config)
        if on and why_not(vllm_config) is None:
            # vLLM would derive them from the sizes of CUDA graphs, which a CPU does not have.
            compilation.compile_sizes = compilation.compile_sizes or []
            logger.debug("%s needs compilation mode VLLM_COMPILE, kept on the CPU", config.FLAG)
        else:
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = became

    platform.check_and_update_config = classmethod(check_and_update_config)
    setattr(platform, WRAPPED, True)


def _post_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    _adopt(self.compilation_config.pass_config)
    if not config.is_on(self):
        _warn_of_no_effect(self)
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
        from mla_fusion import ops

        splitting = self.compilation_config.splitting_ops or []
        if "vllm::unified_mla_attention_with_output" in splitting:
            missing = [op for op in ops.RUNTIME_OPS if op not in splitting]
            self.compilation_config.splitting_ops = [*splitting, *missing]


def _set_compile_ranges(original: Callable[..., Any], self: Any) -> None:
    if config.is_on(self):
        from mla_fusion.plugin import prerequisites

        prerequisites.apply(self, why_not(self))
        if not config.is_on(self):
            _told[id(self.compilation_config)] = self.compilation_config
    original(self)


def _adopt(pass_config: Any) -> None:
    """Make vLLM's PassConfig one of ours if the flag was set on it as an attribute."""
    if config.FLAG in vars(pass_config):
        fields = {config.FLAG: False, config.THRESHOLD: None, **vars(pass_config)}
        pass_config.__class__ = type(flag.instance(fields))
        pass_config.__dict__ = fields


def why_not(vllm_config: Any) -> "Decline | None":
    """`config.eligibility.why_not` of a config, with what its operator refused."""
    from mla_fusion.config import eligibility

    return eligibility.why_not(vllm_config, getattr(vllm_config, _REFUSED, False))


def _warn_of_no_effect(vllm_config: Any) -> None:
    """Name once what an operator set for a flag that is off: the threshold, and the options unless
    the sparse decode reads them, which it does without the flag."""
    compilation, given = vllm_config.compilation_config, vllm_config.additional_config
    if id(compilation) in _told:
        return
    _told[id(compilation)] = compilation
    sparse, unused = vllm_compat.chose_sparse_backend(vllm_config), []
    if getattr(compilation.pass_config, config.THRESHOLD, None) is not None:
        unused.append(config.THRESHOLD)
    if isinstance(given, dict) and config.OPTIONS_KEY in given and not sparse:
        unused.append(f'additional_config["{config.OPTIONS_KEY}"]')
    for name in unused:
        logger.warning(
            "mla-fusion: %s has no effect without pass_config.%s: set both", name, config.FLAG
        )
