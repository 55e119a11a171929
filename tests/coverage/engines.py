"""Run vLLM engines one after the other in this process and write down what fused in each.

    python -m tests.coverage.engines JOBS.json RESULTS.json

A process starts in ten seconds and its second engine in less than the first, so what can share one
does. Every engine gets a compile cache of its own: from a warm one no pass would run.

Keys of a job: name; model (a config.json) or folder (with weights); draft (a config.json); engine
(arguments of EngineArgs); flag; prompts (how many times to generate); config_only (whether to
stop before the engine); imitate (functions of imitations.py, in force for the whole process).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SEQUENCES = 4  # and, without drafts, the decode bucket
LAYER_CLASS = "MLAAttention"
# (step at which it arrives, tokens): alone and mixed with decodes, inside the bucket and above;
# two begin alike, for prefix caching, and two repeat themselves, for drafts from the prompt.
ARRIVALS = [
    (0, [1, 2, 3, 2, 3, 2, 3]),
    (0, list(range(9, 60))),
    (3, [*range(9, 50), 3]),
    (5, [7, 8, 7, 8, 7]),
]
NEW_TOKENS = 12


def main(jobs: list[dict[str, Any]], results: Path) -> None:
    """Run `jobs`; `results` is rewritten after each of them."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # else two ranks want two NUMA nodes
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="mla_fusion",
    )
    from tests.coverage import imitations

    for name in sorted({name for job in jobs for name in job.get("imitate", ())}):
        getattr(imitations, name)()
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mla-fusion-coverage-") as work:
        for index, job in enumerate(jobs):
            began = time.monotonic()
            folder = Path(work) / str(index)
            os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
            done[job["name"]] = result = _outcome(job, folder)
            results.write_text(json.dumps(done, indent=1))
            _keep_kernels()
            said = result.get("error") or result["classes"]
            print(f"coverage: {job['name']}: {said}, {time.monotonic() - began:.0f} s", flush=True)


def _keep_kernels() -> None:
    """vLLM's CPU kernels are registered with the first engine of a process.

    It searches all that is loaded for them again with the next, and trips over numba, which
    drafts from the prompt load.
    """
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def _outcome(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    import mla_fusion
    from tests.models import register_configs

    mla_fusion.register()
    register_configs()
    lines: list[str] = []
    records: list[tuple[str, Any]] = []
    try:
        with _watch(lines, records):
            generated, layers = _run(job, folder)
    except Exception as error:  # noqa: BLE001  (what failed is a row of the table)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:400], "log": lines}
    finally:
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()
    return {
        "classes": _classes(records),
        "reports": _reports(folder),
        "layers": layers,
        **generated,
        "log": [line for line in lines if line.startswith(("decode range", "fuse_aiter"))],
        "warnings": [line for line in lines if "switched off" in line],
    }


@contextmanager
def _watch(lines: list[str], records: list[tuple[str, Any]]) -> Iterator[None]:
    """Keep this library's log lines, and each graph's record beside the class it belongs to."""
    import torch
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    from mla_fusion import report

    original = report.add

    def add(record: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, TorchCompileWithNoGuardsWrapper) and isinstance(
                owner, torch.nn.Module
            ):
                records.append((f"{type(owner).__module__}:{type(owner).__name__}", record))
                break
            frame = frame.f_back
        original(record)

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("vllm.mla_fusion")
    report.add = add
    logger.addFilter(keep)  # vLLM configures logging while it starts, and that drops handlers
    try:
        yield
    finally:
        report.add = original
        logger.removeFilter(keep)


def _classes(records: list[tuple[str, Any]]) -> dict[str, Any]:
    """Per compiled class: its MLA layers in the decode range, how many fused, and why not."""
    out: dict[str, Any] = {}
    for name, record in records:
        if not record.layers or record.start != 1:
            continue
        entry = out.setdefault(name, {"layers": 0, "fused": 0, "declined": {}})
        entry["layers"] += record.layers
        entry["fused"] += record.fused
        for decline in record.declined.values():
            entry["declined"][decline.code] = entry["declined"].get(decline.code, 0) + 1
    return out


def _reports(folder: Path) -> list[dict[str, Any]]:
    """The decode range of the report of each rank, as `_classes` counts."""
    from mla_fusion import report

    out = []
    for path in sorted((folder / "vllm").glob("torch_compile_cache/mla_fusion/*.json")):
        made = report.load(path)
        ranges = [r for r in made.ranges if r.range[1] <= made.bucket]
        declined = {d.code: layers for r in ranges for d, layers in r.declined.items()}
        layers, fused = sum(r.layers for r in ranges), sum(r.fused for r in ranges)
        out.append({"layers": layers, "fused": fused, "declined": declined})
    return out


def _run(job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], int]:
    """(what `_generate` returns, MLA layers of the engine)."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from mla_fusion import config
    from tests.models import write

    arguments: dict[str, Any] = dict(job.get("engine", {}))
    # By name: where the CPU has AMX, vLLM would take another, which packs W_UK.
    backend = {"attention_backend": "CPU_MLA"}
    if "speculative_config" in arguments:
        arguments["speculative_config"] = {**arguments["speculative_config"], **backend}
    if "draft" in job:
        arguments["speculative_config"]["model"] = write(folder / "draft", job["draft"])
    compilation = arguments.pop("compilation_config", {})
    compilation = {**compilation, "pass_config": {config.FLAG: job.get("flag", True)}}
    args = EngineArgs(
        **{
            "model": job.get("folder") or write(folder / "model", job["model"]),
            "load_format": "auto" if "folder" in job else "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "seed": 0,
            "max_model_len": 256,
            "max_num_seqs": SEQUENCES,
            "disable_log_stats": True,
            **backend,
            "compilation_config": compilation,
            "additional_config": {config.OPTIONS_KEY: {"provider": "reference"}},
            **arguments,
        }
    )
    if job.get("config_only"):
        args.create_engine_config()
        return {}, 0
    engine = LLMEngine.from_engine_args(args)
    try:
        layers = engine.vllm_config.compilation_config.static_forward_context.values()
        count = sum(type(layer).__name__ == LAYER_CLASS for layer in layers)
        return (_generate(engine, job["prompts"]) if job.get("prompts") else {}), count
    finally:
        engine.engine_core.shutdown()


def _generate(engine: Any, times: int) -> dict[str, Any]:
    """Tokens of each prompt, and what the engine did to make them.

    cached: prompt tokens from the prefix cache; split: prompts that took several steps; drafts: the
    most drafts of a request that one step verified; burst: the most tokens of a request that one
    step gave; passes: for each rank, the forward passes that ran fused and that did not; kv: what
    the connector of connector.py saved and loaded.
    """
    from vllm import SamplingParams

    from tests.coverage import connector

    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    connector.store = connector.Store()
    split, drafts = _watch_steps(engine.engine_core.engine_core.scheduler)
    tokens: dict[int, list[int]] = {}
    step, cached, burst = 0, 0, 0
    for round_ in range(times):
        waiting, began = dict(enumerate(ARRIVALS, round_ * len(ARRIVALS))), step
        while waiting or engine.has_unfinished_requests():
            for index in [i for i, (after, _) in waiting.items() if began + after <= step]:
                prompt = {"prompt_token_ids": waiting.pop(index)[1]}
                engine.add_request(str(index), prompt, params)
            for output in engine.step():
                index, made = int(output.request_id), list(output.outputs[0].token_ids)
                burst = max(burst, len(made) - len(tokens.get(index, [])))
                tokens[index] = made
                if output.finished:
                    cached += output.num_cached_tokens or 0
            step += 1
    ranks = [[*counts.values()] for counts in engine.collective_rpc("mla_fusion_steps")]
    return {
        "tokens": [tokens[index] for index in sorted(tokens)],
        "steps": step,
        "cached": cached,
        "split": len(split),
        "drafts": max(drafts, default=0),
        "burst": burst,
        "passes": [group for rank in ranks for group in rank],
        "kv": connector.store.summary(),
    }


def _watch_steps(scheduler: Any) -> tuple[set[str], list[int]]:
    """As steps come: requests of which one left a part of the prompt; numbers of drafts in them."""
    split: set[str] = set()
    drafts: list[int] = []
    schedule = scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        drafts.extend(map(len, output.scheduled_spec_decode_tokens.values()))
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            if request.num_computed_tokens < request.num_prompt_tokens:
                split.add(name)
        return output

    scheduler.schedule = watched
    return split, drafts


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to save, and taking vLLM down in order takes seconds
