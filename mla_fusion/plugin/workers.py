"""What a worker does once it has loaded its model, and before its first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_fusion import config, report, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.plugin.steps import STEPS, count_steps
from mla_fusion.plugin.wrap import wrap
from mla_fusion.runtime import collectives, metrics, sparse_step, step_plan, tables

if TYPE_CHECKING:
    from collections.abc import Callable


def prepare_workers() -> None:
    """Why: a worker must know the ops, have its kernels compiled and its plans made before a
    request. The operator must read what fused, even from a warm compile cache.

    How: register the ops and make a step counter when a worker is made; wrap methods of its class,
    which overrides them. Every worker answers `collective_rpc("mla_fusion_steps")`, even if the
    flag was switched off: vLLM would raise NotImplementedError. Until: vLLM offers hooks after
    loading, reloading and compilation.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            wrap(type(self), "load_model", prepare_layers)
            wrap(type(self), "compile_or_warm_up_model", warm_up_and_publish)
            for name in filter(lambda name: hasattr(type(self), name), vllm_compat.LOADS_WEIGHTS):
                wrap(type(self), name, tables.refreshing)
            original(self, *args, **kwargs)
            if config.is_on(self.vllm_config):
                # No pass registers the ops if a graph that calls them comes from a warm cache.
                runtime.register_ops()
                setattr(self, STEPS, metrics.StepCounter(self.vllm_config.parallel_config.rank))
                count_steps()
                report.forget()

        return wrapper

    def mla_fusion_steps(self: Any) -> dict[str, dict[str, int]]:
        steps: metrics.StepCounter | None = getattr(self, STEPS, None)
        return {} if steps is None else steps.snapshot()

    wrap(WorkerBase, "__init__", init)
    WorkerBase.mla_fusion_steps = mla_fusion_steps


def prepare_layers(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """`load_model` of a worker, after which its layers have its step counter, and what persistent
    and sparse decodes need: it must be there before vLLM measures what memory is left."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_model(self, *args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        sparse_step.attach(layers, self.vllm_config)
        if config.is_on(self.vllm_config):
            for layer in vllm_compat.mla_layers(layers).values():
                setattr(layer, STEPS, getattr(self, STEPS))
            options = config.read_options(self.vllm_config.additional_config)
            step_plan.attach(layers, options, self.vllm_config)
        return result

    return wrapper


def warm_up_and_publish(compile_or_warm_up_model: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the kernels before `compile_or_warm_up_model` of a worker captures graphs, because
    nothing may compile during capture; then publish the report and count steps."""

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.is_on(self.vllm_config):
            return compile_or_warm_up_model(self, *args, **kwargs)
        made, cached = collectives.prepare(self.vllm_config)
        result = compile_or_warm_up_model(self, *args, **kwargs)
        if vllm_compat.is_first_rank():
            report.publish(made, self.vllm_config.model_config.architecture, cached)
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or []
        getattr(self, STEPS).start(made, sizes)
        return result

    return wrapper
