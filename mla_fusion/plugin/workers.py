"""The work of a worker once it has loaded its model, before its first request, and in each step."""

from collections.abc import Callable
from typing import Any

from mla_fusion import config
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import decode_graph, sparse
from mla_fusion.plugin.wrap import replace, wrap

ENGINE = "_mla_fusion_engine"  # on a worker whose flag is on, once its model is loaded
STEPS = "_mla_fusion_step_counter"  # on a worker and on its MLA layers
_ROWS = "_mla_fusion_rows"  # on an MLA layer with a batch-invariant plan: of a decode, at most
_GROUP = "_mla_fusion_group"  # on a metadata builder: its first layer, and the name of that


def prepare_workers() -> None:
    """Why: a worker must know the ops, have its kernels compiled and its plans made before a
    request. The operator must read what fused, even from a warm compile cache.

    How: register the ops when a worker is made, and wrap methods of its class, which overrides
    them. Every worker answers `collective_rpc("mla_fusion_steps")`, even if the
    flag was switched off: vLLM would raise NotImplementedError. Until: vLLM offers hooks after
    loading, reloading and compilation.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    wrap(WorkerBase, "__init__", _init)
    replace(WorkerBase, "mla_fusion_steps", mla_fusion_steps)


def count_steps() -> None:
    """Why: an operator wants to see how many steps take the fused path, and under full CUDA graphs
    the ops run no Python.

    How: count what `MLACommonMetadataBuilder.build` returns, under the name of the first layer the
    builder was made for. A batch-invariant plan has room for decodes alone: short prompts are
    prefills there. After the warm-up that layer holds the counter of its worker.
    `runtime.metrics` says which passes have no build. Until: vLLM lets a plugin observe steps.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    wrap(MLACommonMetadataBuilder, "__init__", _init_builder)
    wrap(MLACommonMetadataBuilder, "build", _build)


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    wrap(type(self), "load_model", prepare_layers)
    wrap(type(self), "compile_or_warm_up_model", warm_up_and_publish)
    for name in filter(lambda name: hasattr(type(self), name), vllm_compat.LOADS_WEIGHTS):
        wrap(type(self), name, refresh_tables)
    original(self, *args, **kwargs)
    if config.is_on(self.vllm_config):
        from mla_fusion import report, runtime

        # No pass registers the ops if a graph that calls them comes from a warm cache.
        runtime.register_ops()
        report.forget()


def mla_fusion_steps(self: Any) -> dict[str, dict[str, int]]:
    """The answer of a worker: the snapshot of its counter, empty if it has none."""
    steps: Any = getattr(self, STEPS, None)
    return {} if steps is None else steps.snapshot()


def prepare_layers(load_model: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`load_model` of a worker, after which its layers have what persistent and sparse decodes
    need: it must be there before vLLM measures what memory is left."""
    with sparse.loading(self.vllm_config):
        result = load_model(self, *args, **kwargs)
    if config.is_on(self.vllm_config):
        from mla_fusion.runtime import ready
        from mla_fusion.runtime.engine import Engine

        engine = Engine.of(self.vllm_config)
        setattr(self, ENGINE, engine)
        attach(engine)
        ready.compile_ahead(engine, self.vllm_config, self.local_rank)
    return result


def attach(engine: Any) -> None:
    """Why: an op and a pass find a layer by its name, and need what was decided for it.

    How: an attribute of each MLA layer holds its `LayerState`. A batch-invariant plan decodes in
    every step, with or without a prefill, so it takes the place of `forward_mqa`. Until: vLLM keeps
    the state of a plugin.
    """
    from mla_fusion.runtime import layer_state

    for name, state in layer_state.make(engine).items():
        setattr(engine.layers[name], layer_state.ATTRIBUTE, state)
        if state.plan and state.choice.chunks:
            engine.layers[name].impl.forward_mqa = state.plan.forward_mqa
            setattr(engine.layers[name], _ROWS, engine.rows)


def warm_up_and_publish(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile the kernels before `compile_or_warm_up_model` of a worker captures graphs, because
    nothing may compile during capture; then publish the report and count steps."""
    engine: Any = getattr(self, ENGINE, None)
    if engine is None:
        return original(self, *args, **kwargs)
    from mla_fusion import report
    from mla_fusion.runtime import collectives, metrics

    made, cached = collectives.prepare(engine, self.vllm_config)
    with decode_graph.starting():
        result = original(self, *args, **kwargs)
    if vllm_compat.is_first_rank():
        report.publish(made, engine.model, cached)
    compilation, rank = self.vllm_config.compilation_config, self.vllm_config.parallel_config.rank
    steps = metrics.StepCounter(rank, made, compilation.cudagraph_capture_sizes or [])
    for counted in (self, *engine.layers.values()):
        setattr(counted, STEPS, steps)
    return result


def refresh_tables(load: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`load`, after which weights or buffers may be others, and then what was derived from them."""
    result = load(self, *args, **kwargs)
    tags = kwargs.get("tags", args[0] if args else None) if load.__name__ == "wake_up" else None
    engine: Any = getattr(self, ENGINE, None)
    # Weights that still sleep have no memory.
    if engine is not None and (tags is None or "weights" in tags):
        from mla_fusion.runtime import tables

        tables.refresh(engine.tables)
    return result


def _init_builder(
    original: Callable[..., Any], self: Any, spec: Any, layer_names: Any, vllm_config: Any,
    *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    original(self, spec, layer_names, vllm_config, *args, **kwargs)
    layers = vllm_config.compilation_config.static_forward_context
    layer = layers.get(layer_names[0])
    setattr(self, _GROUP, (layer, layer_names[0]))
    if rows := getattr(layer, _ROWS, 0):
        # Some backends count short prompts as decodes, unless a long one stands before them.
        self.reorder_batch_threshold = rows


def _build(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    metadata = original(self, *args, **kwargs)
    layer, name = getattr(self, _GROUP, (None, ""))  # None: it is older than this wrapper
    if steps := getattr(layer, STEPS, None):
        steps.count(name, metadata)
    return metadata
