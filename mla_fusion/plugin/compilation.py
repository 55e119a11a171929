"""The passes that vLLM runs, and Inductor's options in the decode bucket."""

from collections.abc import Callable
from typing import Any

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.plugin.wrap import wrap


def add_passes() -> None:
    """Why: vLLM's hook for custom passes has one slot, which belongs to the user, and its last
    step cannot be extended.

    How: after `PostGradPassManager.configure`, append the passes and put pass 5 in place of
    `fix_functionalization`. Until: vLLM takes several custom passes.
    """
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.platforms import current_platform

    def configure(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        if not config.is_on(vllm_config):
            return
        from mla_fusion.passes.pipeline import LastStep, MLAFusionPass, NoStep

        cpu = current_platform.is_cpu()
        if _has_passes(vllm_config.compilation_config):
            options = config.read_options(vllm_config.additional_config)
            bucket, rows = config.decode_bucket(vllm_config), config.query_rows(vllm_config)
            chosen = options.provider, bucket, options.attention, rows, options.projections
            self.add(MLAFusionPass(*chosen))
            self.fix_functionalization = LastStep(None if cpu else self.fix_functionalization)
        elif cpu:
            self.fix_functionalization = NoStep()

    wrap(PostGradPassManager, "configure", configure)


def set_options_for_ranges() -> None:
    """Why: in every RMSNorm Inductor recomputes the sum of up to five residuals, which costs a
    decode step time. vLLM has one set of Inductor's options for all ranges, and prefill shall keep
    it.

    How: `CompilerManager.compile` gets the options of `for_range`. vLLM's cache key covers all that
    they depend on: the flag, the bucket and this library's source. Until: vLLM takes options for a
    range.
    """
    from vllm.compilation.backends import CompilerManager

    def compile_range(
        original: Callable[..., Any], self: Any, graph: Any, example_inputs: Any,
        additional_inductor_config: dict[str, Any], compilation_config: Any, compile_range: Any,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        options = additional_inductor_config
        if kwargs.get("is_encoder", False) or not _has_passes(compilation_config):
            given = graph, example_inputs, options, compilation_config, compile_range
            return original(self, *given, *args, **kwargs)
        from mla_fusion import report

        options = for_range(options, compilation_config, compile_range)
        given = graph, example_inputs, options, compilation_config, compile_range
        with report.of_equal_graphs() as compiled:
            compiled.append(original(self, *given, *args, **kwargs))
        return compiled[0]

    wrap(CompilerManager, "compile", compile_range)


def _has_passes(compilation_config: Any) -> bool:
    """True if the passes run in the graphs of an engine, or of its decode steps, with this."""
    on = getattr(compilation_config.pass_config, config.FLAG, False)
    return on and config.in_one_graph(compilation_config)


def for_range(
    options: dict[str, Any], compilation_config: Any, compile_range: Any
) -> dict[str, Any]:
    """Inductor's options for a range: `options`, which all ranges share, or a copy with more."""
    bucket = getattr(compilation_config.pass_config, config.THRESHOLD, 0)
    inside = _has_passes(compilation_config) and compile_range.end <= bucket
    return {config.REALIZE: 1, **options} if inside and vllm_compat.is_gpu() else options
