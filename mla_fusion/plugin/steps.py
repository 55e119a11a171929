"""Steps of a served engine, counted by path."""

from collections.abc import Callable
from typing import Any

from mla_fusion.plugin.wrap import wrap

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

    wrap(MLACommonMetadataBuilder, "__init__", _init)
    wrap(MLACommonMetadataBuilder, "build", _build)


def _init(
    original: Callable[..., Any], self: Any, spec: Any, layer_names: Any, vllm_config: Any,
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    original(self, spec, layer_names, vllm_config, *args, **kwargs)
    layers = vllm_config.compilation_config.static_forward_context
    steps = getattr(layers.get(layer_names[0]), STEPS, None)
    setattr(self, _GROUP, (steps, layer_names[0]))


def _build(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    metadata = original(self, *args, **kwargs)
    steps, name = getattr(self, _GROUP, (None, ""))  # None: it is older than this wrapper
    if steps is not None:
        steps.count(name, metadata)
    return metadata
