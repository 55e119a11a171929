"""Steps of a served engine, counted by path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_fusion.plugin.wrap import wrap

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = "_mla_fusion_step_counter"  # on a worker and on its MLA layers
_GROUP = "_mla_fusion_group"  # on a metadata builder: (its worker's counter, its first layer)


def count_steps() -> None:
    """Why: an operator wants to see how many steps take the fused path, and under full CUDA graphs
    the ops run no Python.

    How: count what `MLACommonMetadataBuilder.build` returns, under the name of the first layer the
    builder was made for. That layer holds the counter of its worker. `runtime.metrics` says which
    passes have no build. Until: vLLM lets a plugin observe steps.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(
            self: Any, spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kwargs: Any
        ) -> None:
            original(self, spec, layer_names, vllm_config, *args, **kwargs)
            layers = vllm_config.compilation_config.static_forward_context
            steps = getattr(layers.get(layer_names[0]), STEPS, None)
            setattr(self, _GROUP, (steps, layer_names[0]))

        return wrapper

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = original(self, *args, **kwargs)
            steps, name = getattr(self, _GROUP, (None, ""))  # None: it is older than this wrapper
            if steps is not None:
                steps.count(name, metadata)
            return metadata

        return wrapper

    wrap(MLACommonMetadataBuilder, "__init__", init)
    wrap(MLACommonMetadataBuilder, "build", build)
