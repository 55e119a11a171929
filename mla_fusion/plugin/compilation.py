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
        if not config.rewrites(vllm_config.compilation_config):
            return
        from mla_fusion.passes.pipeline import LastStep, MLAFusionPass, NoStep

        cpu = current_platform.is_cpu()
        if _has_passes(vllm_config.compilation_config):
            options = config.read_options(vllm_config.additional_config)
            bucket, rows = config.decode_bucket(vllm_config), config.query_rows(vllm_config)
            chosen = options.provider, bucket, options.attention, rows, options.projections
            self.add(MLAFusionPass(*chosen, options.layers))
            self.fix_functionalization = LastStep(None if cpu else self.fix_functionalization)
        elif cpu:
            self.fix_functionalization = NoStep()

    wrap(PostGradPassManager, "configure", configure)


def compile_pieces() -> None:
    """Why: in every RMSNorm Inductor recomputes the sum of up to five residuals, which costs a
    decode step time. vLLM has one set of Inductor's options for all ranges, and prefill shall keep
    it. vLLM also stores the first of several equal pieces alone, so that a warm start hashes all
    others, of two graphs with the flag: 20 ms each.

    How: `CompilerManager.compile` gets the options of `for_range`, and stores an equal piece under
    the first one's name; `load` returns code that was loaded before. The passes learn the layers of
    a piece, whose names are inputs: pieces of a layer that fuses and of another are not equal.
    vLLM's cache key covers all that the options depend on: the flag, the bucket and this library's
    source. Until: vLLM takes options for a range, and stores equal pieces.
    """
    from vllm.compilation.backends import CompilerManager

    def compile_piece(
        original: Callable[..., Any], self: Any, graph: Any, example_inputs: Any,
        additional_inductor_config: dict[str, Any], compilation_config: Any, compile_range: Any,
        graph_index: int = 0, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        options = for_range(additional_inductor_config, compilation_config, compile_range)
        given = graph, example_inputs, options, compilation_config, compile_range, graph_index
        if not config.rewrites(compilation_config) or kwargs.get("is_encoder", False):
            return original(self, *given, *args, **kwargs)
        from mla_fusion import report
        from mla_fusion.passes import pipeline

        names = map(vllm_compat.traced_layer_name, example_inputs)
        with pipeline.piece_of(filter(None, names)), report.of_equal_graphs() as compiled:
            compiled.append(original(self, *given, *args, **kwargs))
        _store_equal_piece(self, compile_range, graph_index, compiled[0])
        return compiled[0]

    def load(
        original: Callable[..., Any], self: Any, graph: Any, example_inputs: Any,
        graph_index: int, compile_range: Any,
    ) -> Any:  # fmt: skip
        entry = self.cache.get((compile_range, graph_index, self.compiler.name))
        if config.rewrites(self.compilation_config) and entry:
            code = self.loaded_artifacts.get(entry["cache_key"]) if entry["cache_key"] else None
            if code is not None:
                return code
        return original(self, graph, example_inputs, graph_index, compile_range)

    wrap(CompilerManager, "compile", compile_piece)
    wrap(CompilerManager, "load", load)


def _store_equal_piece(manager: Any, compile_range: Any, graph_index: int, code: Any) -> None:
    """Store `code`, which vLLM took from an equal piece, under this piece's name too."""
    place = compile_range, graph_index, manager.compiler.name
    keys = {key for key, known in manager.loaded_artifacts.items() if known is code}
    if place not in manager.cache:
        for entry in [each for each in manager.cache.values() if each["cache_key"] in keys][:1]:
            manager.cache[place] = entry


def _has_passes(compilation_config: Any) -> bool:
    """True if the passes run in the graphs of an engine, or of its decode steps, with this."""
    return config.rewrites(compilation_config) and config.in_one_graph(compilation_config)


def for_range(
    options: dict[str, Any], compilation_config: Any, compile_range: Any
) -> dict[str, Any]:
    """Inductor's options for a range: `options`, which all ranges share, or a copy with more."""
    bucket = getattr(compilation_config.pass_config, config.THRESHOLD, 0)
    inside = _has_passes(compilation_config) and compile_range.end <= bucket
    return {config.REALIZE: 1, **options} if inside and vllm_compat.is_gpu() else options
