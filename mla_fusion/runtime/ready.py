"""Kernels of an engine compile in other processes, from the first graph on that calls for them,
while vLLM compiles the rest. `collectives.prepare` waits for them."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from mla_fusion import attention, gpu, logger, report, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import dispatch, triton
from mla_fusion.kernels.ahead import compile_apart, on_meta
from mla_fusion.ops import Norm, Product
from mla_fusion.projections import plan_for
from mla_fusion.projections import triton as projections
from mla_fusion.runtime import layer_state
from mla_fusion.runtime.decode_choice import Choice
from mla_fusion.runtime.engine import Engine
from mla_fusion.runtime.step_plan import StepPlan

PROCESSES = 8  # at a time; each takes half a gigabyte of the host's memory
_started: dict[Any, Future[str]] = {}


def compile_ahead(engine: Engine, vllm_config: Any, local_rank: int) -> None:
    """Let the first rank of a host compile what the passes find, for all of them, into a folder of
    vLLM's compile cache, unless the operator named one: Inductor would name one in /tmp.

    Not on AMD GPUs: there Triton compiles for storages below 2 GiB apart, and the size of the cache
    is not known yet."""
    _started.clear()
    device = next((layer._k_scale.device for layer in engine.layers.values()), torch.device("cpu"))
    if gpu.of(device).vendor == "NVIDIA":
        folder = report.folder(vllm_compat.cache_root()) / "triton"
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))
        if local_rank == 0:
            found = _Found(engine, device, vllm_config, ThreadPoolExecutor(PROCESSES))
            report.listeners.append(found.see)


def wait() -> None:
    """Wait until all is compiled. What failed compiles where it is launched, which raises the error
    again if it was not the process's own."""
    for compiled in dict.fromkeys(_started.values()):
        if said := compiled.exception() or compiled.result():
            logger.warning("mla-fusion: a process that compiles kernels failed, %s", said)


@dataclass(frozen=True)
class _Found:
    """Products and norms that the passes of an engine find, and their compilation. pool: a thread
    for each process that compiles."""

    engine: Engine
    device: torch.device
    vllm_config: Any
    pool: ThreadPoolExecutor

    def see(self, graph: report.RangeReport) -> None:
        """Compile what the graphs of a range launch, each once."""
        if graph.range[1] > self.engine.bucket:
            return
        works: dict[Any, Any] = (
            {(*sorted(graph.outputs), ""): self.attention} if graph.fused else {}
        )
        works |= dict.fromkeys(graph.variants, self.region)
        works |= dict.fromkeys(graph.products, self.products)
        works |= dict.fromkeys(graph.norms, self.norm)
        found = [(works[each], each) for each in works.keys() - _started]
        # A process takes longer to begin than to compile a product or a norm.
        short = [work for work in found if isinstance(work[1], Product | Norm)]
        for job in filter(None, (short, *([work] for work in found if work not in short))):
            compiled = self.pool.submit(self.compile, job)
            _started.update((each, compiled) for _, each in job)

    def compile(self, job: list[tuple[Callable[[Any], Iterable[Any]], Any]]) -> str:
        launches = [launch for launches_of, each in job for launch in launches_of(each)]
        return compile_apart(launches, self.device)

    def attention(self, kinds: tuple[str, ...]) -> Iterator[partial[Any]]:
        for plan, layer, weight in runtime.planned(self.engine.layers):
            if plan.plan.aiter is None:
                given = vars(plan.plan.settings) | {"device": "meta"}
                cache, of = self.cache(layer), (layer.impl.scale, layer.v_head_dim)
                yield partial(
                    _warm_up, given, plan.out.dtype, cache, *of, on_meta(weight), kinds[:-1]
                )

    def region(self, variant: Any) -> Iterator[partial[Any]]:
        if self.engine.options.provider == "triton":
            yield from (partial(dispatch.prefer, *each) for each in dispatch.own.items())
            for batch in runtime.batches(self.engine.layers, [variant], self.cache):
                given = {name: on_meta(x) for name, x in batch.keywords.items()}
                made = partial(batch.func, **given)
                yield partial(triton.warmup, made, self.engine.bucket, print)

    def products(self, of: Product) -> list[partial[Any]]:
        plans = lambda tokens: [plan_for(self.device, of, tokens)]  # noqa: E731
        return projections.launches(of, self.engine.activation, plans)

    def norm(self, of: Norm) -> list[partial[Any]]:
        return [projections.norm_launch(of, self.engine.activation)]

    def cache(self, layer: Any) -> torch.Tensor:
        """Two pages of the layer's cache. vLLM allocates it later, and chooses pages once the model
        is loaded."""
        facts: Any = layer_state.of(layer).facts
        shape = 2, self.vllm_config.cache_config.block_size
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        return torch.empty((*shape, width), dtype=facts.cache, device="meta")


def _warm_up(
    settings: dict[str, Any], out: torch.dtype, cache: torch.Tensor, scale: float, values: int,
    weight: torch.Tensor | None, kinds: Iterable[str],
) -> None:  # fmt: skip
    """Launch what a plan with these settings launches, of meta tensors."""
    one = torch.ones((), device="meta")
    impl = SimpleNamespace(scale=scale)
    layer = SimpleNamespace(impl=impl, v_head_dim=values, _q_scale=one, _k_scale=one)
    plan = attention.PersistentDecodePlan.allocate(**settings)
    StepPlan(plan, out, Choice()).warm_up(cache, layer, weight, kinds)
