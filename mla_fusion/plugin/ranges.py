"""What Inductor does differently in the compile ranges of the decode bucket."""

from collections.abc import Callable
from typing import Any

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.plugin.wrap import wrap


def set_for_ranges() -> None:
    """Why: Inductor lets each RMS norm add up to five residual tensors anew, which costs a decode
    step. vLLM has one set of Inductor's options for all ranges, and prefill shall keep it.

    How: `CompilerManager.compile` gets the options of `for_range`. vLLM's cache key covers all that
    they depend on: the flag, the bucket and this library's source. Until: vLLM takes options for a
    range.
    """
    from vllm.compilation.backends import CompilerManager

    wrap(CompilerManager, "compile", _compile)


def _compile(
    original: Callable[..., Any], self: Any, graph: Any, example_inputs: Any,
    additional_inductor_config: dict[str, Any], compilation_config: Any, compile_range: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    options = additional_inductor_config
    if not kwargs.get("is_encoder", False):
        options = for_range(options, compilation_config.pass_config, compile_range)
    before = graph, example_inputs, options, compilation_config, compile_range
    return original(self, *before, *args, **kwargs)


def for_range(options: dict[str, Any], pass_config: Any, compile_range: Any) -> dict[str, Any]:
    """Inductor's options for a range: `options`, which all ranges share, or a copy with more."""
    fused = getattr(pass_config, config.FLAG, False) and vllm_compat.is_gpu()
    if fused and compile_range.end <= getattr(pass_config, config.THRESHOLD):
        return {config.REALIZE: 1, **options}
    return options
