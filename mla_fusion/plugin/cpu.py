"""vLLM's compilation mode on a CPU."""

import logging
from typing import Any

from mla_fusion import config
from mla_fusion.plugin import decision
from mla_fusion.plugin.wrap import WRAPPED

logger = logging.getLogger("vllm.mla_fusion")

_SINGLE_TRACE = 2  # CompilationMode.DYNAMO_TRACE_ONCE, an IntEnum


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
        if became[0] == _SINGLE_TRACE and keeps_vllm_compile(vllm_config):
            # vLLM would derive them from the sizes of CUDA graphs, which a CPU does not have.
            compilation.compile_sizes = compilation.compile_sizes or []
            logger.debug("%s needs compilation mode VLLM_COMPILE, kept on the CPU", config.FLAG)
        else:
            compilation.mode, compilation.backend, compilation.ir_enable_torch_wrap = became

    platform.check_and_update_config = classmethod(check_and_update_config)
    setattr(platform, WRAPPED, True)


def keeps_vllm_compile(vllm_config: Any) -> bool:
    """Whether fusion would apply to this engine if its compilation mode stayed as it was."""
    return config.is_on(vllm_config) and decision.decide(vllm_config).applies
