"""One vLLM engine of `benchmarks/engine.py`: the work of a process of `mla_fusion.cli.child`."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any

import engine_model
import torch

if TYPE_CHECKING:
    from typing import TextIO

    from mla_fusion.cli import child

# Kernels of this library: of the fused op; of a refresh, a decode and its reduction.
PREP = "prep_kernel"
KERNELS = (PREP, "plan_kernel", "decode_kernel", "reduce_kernel")


def main(work: child.Job, progress: TextIO) -> dict[str, Any]:
    """Run one engine and return what it did; "decode" waits for a line before it measures."""
    job = work.options
    began = time.time()
    llm = engine_model.engine(job)
    result: dict[str, Any] = {"start_s": round(time.time() - began, 1)}
    if job["arm"] in engine_model.OPTIONS:
        from mla_fusion import config, plugin, report

        vllm_config = llm.llm_engine.vllm_config
        result["on"] = config.is_on(vllm_config)
        newest = max(plugin.report_path(vllm_config).parent.glob("*.json"), key=os.path.getmtime)
        ranges = report.load(newest).ranges
        result["ranges"] = [[*r.range, r.layers, r.fused, r.declined] for r in ranges]
    if job["what"] == "decode":
        print("ready", file=progress)
        sys.stdin.readline()
        result.update(time_steps(llm, job))
    else:
        result.update(generate(llm, job))
    if job["what"] == "ends":
        result["captured"] = llm.llm_engine.vllm_config.compilation_config.cudagraph_capture_sizes
        result["launches"] = {batch: launches(llm, batch)[PREP] for batch in (1, job["seqs"])}
    if job["arm"] == "portable":
        # Three sequences, so that a full graph, of two or four, is padded.
        result["launches"] = launches(llm, 3)
    return result


def generate(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of random prompts; of a phase, one arrives every `job["pause"]` steps."""
    import vllm

    rng = random.Random(7)
    params = vllm.SamplingParams(
        max_tokens=job["tokens"], temperature=0, ignore_eos=True, detokenize=False, logprobs=5
    )
    core, step, added = llm.llm_engine, 0, 0
    done: dict[str, Any] = {}
    for lengths in job["phases"]:
        waiting, due = list(lengths), step
        while waiting or core.has_unfinished_requests():
            while waiting and step >= due:
                prompt = [rng.randrange(10, 4000) for _ in range(waiting.pop(0))]
                core.add_request(f"{added:04d}", {"prompt_token_ids": prompt}, params)
                added, due = added + 1, due + job["pause"]
            for output in core.step():
                if output.finished:
                    done[output.request_id[:4]] = output.outputs[0]
            step += 1
    outputs = [done[name] for name in sorted(done)]
    return {
        "steps": step,
        "tokens": [list(output.token_ids) for output in outputs],
        "top": [
            [[[t, lp.logprob] for t, lp in top.items()] for top in output.logprobs]
            for output in outputs
        ],
    }


def launches(llm: Any, batch: int) -> dict[str, float]:
    """Launches of `KERNELS` in one step with `batch` requests, every one decoding."""
    import vllm

    core = llm.llm_engine
    params = vllm.SamplingParams(max_tokens=200, temperature=0, ignore_eos=True, detokenize=False)
    for i in range(batch):
        core.add_request(f"p{batch}-{i}", {"prompt_token_ids": [10 + i] * 20}, params)
    for _ in range(12):
        core.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            core.step()
        torch.cuda.synchronize()
    core.abort_request([f"p{batch}-{i}" for i in range(batch)])
    while core.has_unfinished_requests():
        core.step()
    events = profile.key_averages()
    return {name: sum(e.count for e in events if e.key.startswith(name)) / 5 for name in KERNELS}


def time_steps(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Time of a decode step at each batch size: its CUDA graph on the GPU, the step by the clock,
    and its kernels by the profiler.
    """
    import vllm

    core, rows = llm.llm_engine, {}
    for batch in job["batches"]:
        params = vllm.SamplingParams(
            max_tokens=400, temperature=0, ignore_eos=True, detokenize=False
        )
        for i in range(batch):
            prompt = [(7 * i + j) % 4000 + 10 for j in range(job["context"])]
            core.add_request(f"{batch}-{i}", {"prompt_token_ids": prompt}, params)
        produced = 0
        while produced < batch:  # prefill until every request decodes
            produced = sum(bool(o.outputs[0].token_ids) for o in core.step())
        for _ in range(20):
            core.step()
        rounds = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                core.step()
            torch.cuda.synchronize()
            rounds.append((time.perf_counter() - began) / 20 * 1e6)
        graphs = graph_times(core, 100)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(10):
                core.step()
            torch.cuda.synchronize()
        rows[batch] = {
            "wall_us": [round(us, 1) for us in sorted(rounds)],
            "gpu_us": [round(us, 1) for us in sorted(graphs)],
            "kernels": [
                [e.key, e.self_device_time_total / 10, e.count / 10]
                for e in sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
                if e.self_device_time_total
            ],
        }
        core.abort_request([f"{batch}-{i}" for i in range(batch)])
        while core.has_unfinished_requests():
            core.step()
    return {"steps": rows}


def graph_times(core: Any, steps: int) -> list[float]:
    """Microseconds on the GPU of each CUDA graph that `steps` steps replay; a full graph is a whole
    forward pass.

    Events around the replay, not the profiler: kernels overlap, and the profiler counts the time
    that one waits for its predecessor twice.
    """
    replay, pairs = torch.cuda.CUDAGraph.replay, []

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The GPU is busy until all three are enqueued, so the time does not include the launch.
        torch.cuda._sleep(1_000_000)
        begin.record()
        replay(graph)
        end.record()
        pairs.append((begin, end))

    torch.cuda.CUDAGraph.replay = timed
    try:
        for _ in range(steps):
            core.step()
    finally:
        torch.cuda.CUDAGraph.replay = replay
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
