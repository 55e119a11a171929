"""Messages between the ranks of an engine while it starts: every rank calls `prepare`."""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mla_fusion import logger, report, runtime
from mla_fusion.config import vllm_compat
from mla_fusion.config.identity import graphs_hash
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, layer_state, ready
from mla_fusion.runtime.engine import Engine


def prepare(engine: Engine, vllm_config: Any) -> tuple[report.Report | None, bool]:
    """Compile the kernels of this engine on every rank, and return what `collect` does."""
    began = time.perf_counter()
    with on_every_rank():
        ready.wait()
    made, cached = collect(engine, vllm_config)
    with on_every_rank():
        runtime.warm_up_attention(engine.layers, made.quantizations() if made else ())
        if made:
            variants = [variant for each in made.ranges for variant in each.variants]
            runtime.warm_up(engine.layers, variants, made.provider, made.bucket)
    if vllm_compat.is_first_rank():
        logger.info("mla-fusion: kernels ready in %.1f s", time.perf_counter() - began)
    return made, cached


@contextlib.contextmanager
def on_every_rank() -> Iterator[None]:
    """Let an error of one rank end the start of all: the others would wait for it in vain, and only
    the first one's console may be at hand."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised again below
        failed = error
    try:
        told = vllm_compat.gather(failed and f"{type(failed).__name__}: {failed}")
    except RuntimeError as error:  # the connection to it is closed
        raise RuntimeError(
            "a rank of this engine ended while mla_fusion prepared its kernels: the log of that "
            "rank, or of the system if it was killed, says why"
        ) from (failed or error)
    if failed:
        raise failed
    if errors := [f"rank {rank}: {error}" for rank, error in enumerate(told) if error]:
        raise RuntimeError(f"mla_fusion could not prepare its kernels on {'; '.join(errors)}")


def collect(engine: Engine, vllm_config: Any) -> tuple[report.Report | None, bool]:
    """(report, whether an earlier start made it) for all ranks of this engine: the first rank
    stores it, or finds it if some rank compiled nothing."""
    first, found = vllm_compat.is_first_rank(), None
    with on_every_rank():
        path = report_path(vllm_config)
        states = [*map(layer_state.of, engine.layers.values())]
        choices = (state.choice for state in states)
        if engine.batch_invariant:  # no pass runs
            kept = {Decline("batch-invariant"): len(states)}
            report.add(report.RangeReport((1, engine.bucket), len(states), declined=kept))
        made = report.take(
            engine.options.provider, engine.bucket, len(engine.layers), model=engine.model,
            versions=vllm_compat.versions(), others=engine.other_layers,
            attention=decode_choice.described(choices, engine.options),
            epilogue=layer_state.epilogues(states), chosen=engine.options.layers,
        )  # fmt: skip
    everyones = vllm_compat.gather(made)
    with on_every_rank():
        if first and None in everyones:
            found = report.find(path)
    stored = vllm_compat.gather(found)[0]
    if not any(everyones):
        return stored, stored is not None
    with on_every_rank():
        known = [each for each in (each or stored for each in everyones) if each]
        stages = vllm_config.parallel_config.pipeline_parallel_size
        merged = report.merge(known, stages if len(known) == len(everyones) else len(known))
        if first:
            report.store(path, merged)
    return merged, False


def report_path(vllm_config: Any) -> Path:
    """Path of the report of an engine with this config, beside vLLM's compile cache. Its name
    covers what vLLM's cache key covers but the model's sources, so that an engine that takes
    graphs from the cache finds their report."""
    factors = (vllm_config.compute_hash(), vllm_compat.compile_environment())
    compiled = hashlib.sha256(repr(factors).encode()).hexdigest()[:10]
    name = f"{compiled}-{graphs_hash()}-{vllm_config.parallel_config.data_parallel_index}.json"
    return report.folder(vllm_compat.cache_root()) / name
