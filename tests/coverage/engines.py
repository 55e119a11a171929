"""vLLM engines one after the other in one process, and what fused in each.

A process takes ten seconds to start and its second engine takes less than the first, so engines
share one where they can. Each engine has its own compile cache: from a warm one no pass would run.
"""

import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from mla_fusion.cli import child

SEQUENCES = 4  # and, without drafts, the decode bucket
# (step at which it arrives, tokens): prefill with and without decodes, inside the bucket and above.
# Two share a prefix, for prefix caching, and two repeat themselves, for drafts from the prompt.
ARRIVALS = [
    (0, [1, 2, 3, 2, 3, 2, 3]),
    (0, list(range(9, 60))),
    (3, [*range(9, 50), 3]),
    (5, [7, 8, 7, 8, 7]),
]
NEW_TOKENS = 12


def run_all(job, progress):
    """The result of each engine of `job.options["engines"]`, by its name, with the functions of
    imitations.py that `imitate` names in force.

    Keys of an engine: name; model (a config.json) or folder (with weights); draft (a config.json);
    engine (arguments of EngineArgs); flag; prompts (how many times to generate).
    """
    from vllm.platforms.cpu import CpuPlatform

    from tests.coverage import imitations

    for name in job.options["imitate"]:
        getattr(imitations, name)()
    done: dict[str, Any] = {}
    for index, engine in enumerate(job.options["engines"]):
        began = time.monotonic()
        folder = Path(job.cache, str(index))
        os.environ["VLLM_CACHE_ROOT"] = str(folder / "vllm")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        child.share_facts(folder / "vllm", Path(job.cache))
        done[engine["name"]] = result = _outcome(engine, folder)
        # vLLM's CPU kernels are registered with the first engine of a process. With the next one
        # it searches all loaded modules again, and fails on numba, which drafts from the prompt
        # load.
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
        said = result.get("error") or result["classes"]
        spent = time.monotonic() - began
        print(f"coverage: {engine['name']}: {said}, {spent:.0f} s", file=progress)
    return done


def _outcome(asked, folder):
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory

    from mla_fusion import report

    lines = child.kept_messages(logging.INFO)
    classes: dict[str, list[Any]] = {}
    try:
        with _watched(classes):
            engine = child.build(**_arguments(asked, folder))
            try:
                generated = _generate(engine, asked["prompts"]) if "prompts" in asked else {}
            finally:
                engine.engine_core.shutdown()
    except Exception as error:  # noqa: BLE001  (what failed is a row of the table)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:400], "log": lines}
    finally:
        cleanup_dist_env_and_memory()
        torch._dynamo.reset()
    ranks = sorted((folder / "vllm").glob("torch_compile_cache/mla_fusion/*.json"))
    return {
        "classes": {name: _counts(graphs) for name, graphs in classes.items()},
        "products": {name: _products(graphs) for name, graphs in classes.items()},
        "reports": [_counts(report.load(path).decode_ranges()) for path in ranks],
        **generated,
        "log": [line for line in lines if line.startswith(report.FLAG_LINE)],
    }


def _watched(classes):
    """Keep the records of the decode range's graphs by the class they belong to, meanwhile."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    from mla_fusion import report

    original = report.add

    def add(record):
        owners = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
        for owner in owners:
            if isinstance(owner, TorchCompileWithNoGuardsWrapper):
                if record.layers and record.range[0] == 1:
                    name = f"{type(owner).__module__}:{type(owner).__name__}"
                    classes.setdefault(name, []).append(record)
                break
        original(record)

    return mock.patch.object(report, "add", add)


def _sum(ranges):
    from mla_fusion import report

    total = report.RangeReport((1, 1))
    for each in ranges:
        total.add(each)
    return total


def _products(ranges):
    """How many products pass 7 took, as "ours", and those that it left, by the decline's code."""
    total = _sum(ranges)
    before, after = (ops.get("aten::mm", 0) for ops in total.passes["7"])
    left = {decline.code: count for decline, count in total.plain_products.items()}
    return {"ours": before - after, **left}


def _counts(ranges):
    """MLA layers, how many fused, and the declines by their code."""
    total = _sum(ranges)
    declined = {decline.code: layers for decline, layers in total.declined.items()}
    return {"layers": total.layers, "fused": total.fused, "declined": declined}


def _arguments(asked, folder):
    """Arguments of `child.build`."""
    from mla_fusion import config
    from tests.models import write

    arguments = dict(asked["engine"])
    if "speculative_config" in arguments:
        drafts = {"attention_backend": "CPU_MLA"}  # as `child.small_engine` for the target
        if "draft" in asked:
            drafts["model"] = write(folder / "draft", asked["draft"])
        arguments["speculative_config"] = {**arguments["speculative_config"], **drafts}
    flag = {"pass_config": {config.FLAG: asked.get("flag", True)}}
    return {
        "model": asked.get("folder") or write(folder / "model", asked["model"]),
        "load_format": "auto" if "folder" in asked else "dummy",
        "max_num_seqs": SEQUENCES,
        "additional_config": {config.OPTIONS_KEY: {"provider": "reference"}},
        **arguments,
        "compilation_config": arguments.get("compilation_config", {}) | flag,
    }


def _generate(engine, times):
    """Tokens of each prompt, and counts of what the engine did for them.

    cached: prompt tokens from the prefix cache; split: prompts that took several steps; drafts: the
    most drafts of a request that one step verified; burst: the most tokens of a request that one
    step gave; passes: for each rank, the forward passes that ran fused and unfused; kv: the summary
    of the connector in connector.py.
    """
    from tests.coverage import connector

    connector.store = connector.Store()
    split, drafts = _watch_steps(engine.engine_core.engine_core.scheduler)
    tokens: list[list[int]] = []
    cached, burst = 0, 0
    for _ in range(times):
        made: dict[int, list[int]] = {}
        for outputs in child.steps(engine, ARRIVALS, NEW_TOKENS):
            for output in outputs:
                index, now = int(output.request_id), list(output.outputs[0].token_ids)
                burst = max(burst, len(now) - len(made.get(index, [])))
                made[index] = now
                if output.finished:
                    cached += output.num_cached_tokens or 0
        tokens += [made[index] for index in sorted(made)]
    counts = engine.collective_rpc("mla_fusion_steps")
    return {
        "tokens": tokens,
        "cached": cached,
        "split": len(split),
        "drafts": max(drafts, default=0),
        "burst": burst,
        "passes": [group for rank in counts for group in rank.values()],
        "kv": connector.store.summary(),
    }


def _watch_steps(scheduler):
    """(requests whose prompt took several steps, drafts of each request in each step)."""
    split: set[str] = set()
    drafts: list[int] = []
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        drafts.extend(map(len, output.scheduled_spec_decode_tokens.values()))
        for name in output.num_scheduled_tokens:
            request = scheduler.requests[name]
            if request.num_computed_tokens < request.num_prompt_tokens:
                split.add(name)
        return output

    scheduler.schedule = watched
    return split, drafts
