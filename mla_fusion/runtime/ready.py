"""What an engine can launch, compiled from the first graph on that calls for it, while vLLM
compiles the rest. `collectives.prepare` waits for it."""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from mla_fusion import attention, gpu, logger, report, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import triton
from mla_fusion.kernels.ahead import compile_apart
from mla_fusion.projections import triton as projections
from mla_fusion.runtime import layer_state
from mla_fusion.runtime.decode_choice import Choice
from mla_fusion.runtime.engine import Engine
from mla_fusion.runtime.step_plan import StepPlan

_started: dict[Any, Future[str]] = {}


def compile_ahead(engine: Engine, local_rank: int) -> None:
    """Let the first rank of a host compile what the passes find, for all of them, into a folder
    that the next start has too: Inductor names one once it compiles, and that start does not."""
    _started.clear()
    device = next((layer._k_scale.device for layer in engine.layers.values()), torch.device("cpu"))
    if gpu.of(device).vendor == "NVIDIA":
        folder = report.folder(vllm_compat.cache_root()) / "triton"
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
        if local_rank == 0:
            report.listeners.append(partial(_see, engine, device, ThreadPoolExecutor()))


def wait() -> None:
    """Wait until all is compiled. What failed compiles where it is launched, which raises the error
    again if it was not the process's own."""
    for said in filter(None, (each.result() for each in _started.values())):
        logger.warning("mla-fusion: a process that compiles kernels failed, %s", said)


def _see(
    engine: Engine, device: torch.device, pool: ThreadPoolExecutor, graph: report.RangeReport
) -> None:
    """Compile what the graphs of a range launch, each once."""
    if graph.range[1] > engine.bucket:
        return
    works: dict[Any, Any] = {(*sorted(graph.outputs), ""): _attention} if graph.fused else {}
    works |= dict.fromkeys(graph.variants, _region) | dict.fromkeys(graph.products, _products)
    for each, launches_of in works.items():
        if each not in _started and (launches := [*launches_of(engine, device, each)]):
            _started[each] = pool.submit(compile_apart, launches, device)


def _attention(engine: Engine, _: torch.device, kinds: tuple[str, ...]) -> Iterator[partial[Any]]:
    for plan, layer, weight in runtime.planned(engine.layers):
        if plan.plan.aiter is None:
            given = vars(plan.plan.settings) | {"device": "meta"}
            cache, of = _cache(engine.page, layer), (layer.impl.scale, layer.v_head_dim)
            yield partial(_warm_up, given, plan.out.dtype, cache, *of, _meta(weight), kinds[:-1])


def _region(engine: Engine, _: torch.device, variant: Any) -> Iterator[partial[Any]]:
    if engine.options.provider == "triton":
        for batch in runtime.batches(engine.layers, [variant], partial(_cache, engine.page)):
            on_meta = partial(batch.func, **{n: _meta(x) for n, x in batch.keywords.items()})
            yield partial(triton.warmup, on_meta, engine.bucket, print)


def _products(engine: Engine, device: torch.device, widths: str) -> list[partial[Any]]:
    k, *sizes = map(int, re.findall(r"\d+", widths))
    return projections.launches(device, tuple(sizes), k, engine.activation)


def _warm_up(
    settings: dict[str, Any], out: torch.dtype, cache: torch.Tensor, scale: float, values: int,
    weight: torch.Tensor | None, kinds: Iterable[str],
) -> None:  # fmt: skip
    """Launch what a plan with these settings launches, of meta tensors."""
    one = torch.ones((), device="meta")
    impl, product = SimpleNamespace(scale=scale), lambda attended, out: None
    layer = SimpleNamespace(
        impl=impl, v_head_dim=values, _q_scale=one, _k_scale=one, _v_up_proj=product
    )
    plan = attention.PersistentDecodePlan.allocate(**settings)
    StepPlan(plan, out, Choice()).warm_up(cache, layer, weight, kinds)


def _cache(page: int, layer: Any) -> torch.Tensor:
    """Two pages of the layer's cache, which vLLM has not allocated yet."""
    facts: Any = layer_state.of(layer).facts
    shape = 2, page, layer.kv_lora_rank + layer.qk_rope_head_dim
    return torch.empty(shape, dtype=facts.cache, device="meta")


def _meta(value: Any) -> Any:
    """A tensor's type, shape and strides; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
