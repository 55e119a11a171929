"""One vLLM engine of `benchmarks/engine.py`: the work of a process of `mla_fusion.cli.child`.

vLLM imports this module in every worker, for `Worker`; `Loader` then takes the place of its loader
of dummy weights.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_model
import torch
from engine_jobs import reported
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group, get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mla_fusion.cli import child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

# How names of this library's kernels begin; the sparse decodes, mla_sparse, count as decodes.
KERNELS = ("mla_prep", "mla_plan", "mla_decode", "mla_reduce", "mla_product")
STEPS = 20  # of one measurement
MORE = 10  # steps in front, and at most that an engine in a process of its own is ahead
HELD = 400  # tokens of a request that is measured: more than its steps


def main(work: child.Job, progress: TextIO) -> dict[str, Any]:
    """Run one engine and return what it did; "complete" sends what it has, and takes turns."""
    job = work.options
    llm = engine(job, Path(work.workdir))
    if job["what"] == "start":
        return started(llm)
    result: dict[str, Any] = dict(llm.collective_rpc("engine_facts")[0])
    # The first rank stores the report of all.
    if job["arm"] in engine_model.OPTIONS and job["dp_rank"] == 0:
        result.update(reported(Path(work.cache), job["tp"] * job["dp"]))
    result.update(generate(llm, job))
    if engine_model.is_sparse(job["model"]):
        result["launches"] = {batch: launches(llm, batch) for batch in (1, job["seqs"])}
    if job["what"] == "complete":
        print(json.dumps(result), file=progress)
        take_turns(llm, job, progress)
    if job["arm"] == "portable" and job["what"] == "tokens":
        # Five sequences, so that a full graph, of four or eight, is padded; one, for the epilogue.
        batches = (5,) if job["drafts"] else (1, 5)
        result["launches"] = {batch: launches(llm, batch) for batch in batches}
    return result


def engine(job: dict[str, Any], folder: Path) -> Any:
    """The vLLM engine of a job, in this process; its model's config is written into `folder`."""
    from mla_fusion import plugin

    plugin.register()
    import vllm

    if engine_model.is_sparse(job["model"]):
        import engine_indexer

        engine_indexer.install(job["arm"])
    return vllm.LLM(**engine_model.arguments(job, folder), skip_tokenizer_init=True)


def started(llm: Any) -> dict[str, float]:
    """Of a new engine: the time at which it is ready, and that of its first token, in seconds since
    the epoch; the seconds of vLLM's torch.compile."""
    compilation = llm.llm_engine.vllm_config.compilation_config
    ready = time.time()
    prefill(llm, 16, 0, 1)
    return {"ready": ready, "token": time.time(), "compile": compilation.compilation_time}


def take_turns(llm: Any, job: dict[str, Any], progress: TextIO) -> None:
    """Answer each line of the input with a line of JSON, until "go".

    "hold BATCH CONTEXT PROMPT PREFIX": prefill requests of CONTEXT tokens, in place of those
    before. "time": microseconds of a decode step, by the clock and on the GPU: of its CUDA graph,
    and on one GPU with drafts of all of it. With a PROMPT each step, all of it, also prefills a new
    request of PROMPT tokens behind PREFIX ones that are in the cache; beside decodes it may hold
    one of their steps, since vLLM schedules ahead."""
    graphs, alone = False, job["tp"] * job["dp"] == 1
    with contextlib.ExitStack() as held:
        for line in iter(sys.stdin.readline, "go\n"):
            asked, *sizes = line.split()
            answer = {}
            with running(llm, job):
                if asked == "hold":
                    held.close()
                    batch, context, prompt, prefix = map(int, sizes)
                    whole = prompt or (alone and job["drafts"])
                    graphs = "FULL" in job["cudagraph_mode"] and not whole
                    if batch:
                        tokens = HELD * (1 + job["drafts"])
                        step = held.enter_context(requests(llm, prompts(batch, context), tokens))
                    if prompt:
                        step = functools.partial(prefill, llm, prompt, prefix)
                    step(10)
                else:
                    step(MORE)
                    answer["wall"] = clocked(step, STEPS)
                    if not graphs:
                        answer["gpu"] = eager_time(step)
            if asked != "hold" and graphs:
                answer |= full_graph_times(llm, step, job)
            print(json.dumps(answer), file=progress)


@contextlib.contextmanager
def running(llm: Any, job: dict[str, Any]) -> Iterator[None]:
    """Let the engine step: when it is asked, and with tensor parallelism by itself, in a process of
    its own, as a server's does; then it pauses behind this context, with all outputs read."""
    core = llm.llm_engine.engine_core
    if job["tp"] > 1:
        core.call_utility("resume_scheduler")
    yield
    if job["tp"] > 1:
        core.call_utility("pause_scheduler", "keep", False)
        while not core.outputs_queue.empty():
            core.get_output()


def generate(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of random prompts; of a phase, one arrives every `job["pause"]` steps."""
    rng = random.Random(7 + job["dp_rank"])
    # Data-parallel engines begin together; then the second one steps for a while with one request.
    late = 20 * job["dp_rank"]
    outputs, count = [], 0
    for lengths in job["phases"]:
        arriving = [
            (bool(i) * late + i * job["pause"], [rng.randrange(10, 4000) for _ in range(length)])
            for i, length in enumerate(lengths)
        ]
        completions, steps = child.complete(llm.llm_engine, arriving, job["tokens"], logprobs=5)
        outputs, count = outputs + completions, count + steps
    return {
        "steps": count,
        "tokens": [list(output.token_ids) for output in outputs],
        "top": [
            [[[t, lp.logprob] for t, lp in top.items()] for top in output.logprobs]
            for output in outputs
        ],
    }


def launches(llm: Any, batch: int) -> dict[str, float]:
    """Launches of `KERNELS` in one step with `batch` requests, every one decoding."""
    with requests(llm, [[10 + i] * 20 for i in range(batch)], 200) as step:
        step(12)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step(5)
            torch.cuda.synchronize()
    ran = [(e.key.replace("mla_sparse", "mla_decode"), e.count) for e in profile.key_averages()]
    return {name: sum(count for key, count in ran if key.startswith(name)) / 5 for name in KERNELS}


@contextlib.contextmanager
def requests(llm: Any, prompts: list[list[int]], tokens: int) -> Iterator[Callable[[int], None]]:
    """Add a request of `tokens` tokens for each prompt; abort them at the end.

    Yields a function that runs so many steps, once every request decodes, without outputs for
    users: a server makes them in another process."""
    import vllm

    core = llm.llm_engine
    greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = vllm.SamplingParams(max_tokens=tokens, **greedy)
    names = [f"{len(prompts)}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(count: int) -> None:
        for _ in range(count):
            core.engine_core.get_output()

    produced = 0
    while produced < len(prompts):
        produced = sum(bool(o.outputs[0].token_ids) for o in core.step())
    yield step
    core.abort_request(names)
    while core.has_unfinished_requests():
        core.step()


def prefill(llm: Any, prompt: int, prefix: int, count: int) -> None:
    """Run so many steps, each of which prefills a new request: `prompt` random tokens behind the
    same `prefix` ones."""
    import vllm

    core, once = llm.llm_engine, vllm.SamplingParams(max_tokens=1, detokenize=False)
    for number in range(count):
        tail = random.choices(range(10, 4000), k=prompt)
        name = f"prefill-{number}"
        core.add_request(name, {"prompt_token_ids": [*prompts(1, prefix)[0], *tail]}, once)
        while not any(output.request_id == name for output in core.step()):
            pass


def prompts(batch: int, context: int) -> list[list[int]]:
    """Prompts of `context` tokens, no two equal."""
    return [[(7 * i + j) % 4000 + 10 for j in range(context)] for i in range(batch)]


def clocked(step: Callable[[int], None], count: int) -> float:
    """Microseconds of a step by the clock, mean of `count`."""
    # Where workers have the GPUs, CUDA would start here, while the engine steps on.
    settle = torch.cuda.synchronize if torch.cuda.is_initialized() else time.perf_counter
    settle()
    began = time.perf_counter()
    step(count)
    settle()
    return (time.perf_counter() - began) / count * 1e6


def eager_time(step: Callable[[int], None]) -> float:
    """Microseconds on the GPU of a step without a CUDA graph, median of 10. A prefill's has the
    host's reading of the token too, behind the last kernel."""
    # Twice as long as a step takes by the clock, at 2 GHz: by then it is enqueued.
    pairs, busy = [], int(2 * clocked(step, 2) * 2000)
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(busy)
        begin.record()
        step(1)
        end.record()
        torch.cuda.synchronize()
        pairs.append((begin, end))
    return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)


def full_graph_times(
    llm: Any, step: Callable[[int], None], job: dict[str, Any]
) -> dict[str, float]:
    """Microseconds on the GPU of a step's CUDA graphs, median of the steps: one of a forward pass,
    and one of a draft, else nothing; "gpu" of the first rank, "gpu1" of the next. With collectives
    a rank waits for the others in it. Raises RuntimeError if a forward pass is not one graph."""
    graphs, more = 1 + bool(job["drafts"]), MORE * (job["tp"] > 1)
    llm.collective_rpc("time_replays")
    try:
        with running(llm, job):
            step(STEPS)
    finally:
        times = llm.collective_rpc("replay_times")
    wanted = range(STEPS * graphs, (STEPS + more) * graphs + 1, graphs)
    if any(len(each) not in wanted for each in times):
        if graphs > 1:
            return {}  # runner V1 drafts in pieces
        raise RuntimeError(
            f"{STEPS} decode steps replayed {[len(each) for each in times]} CUDA graphs on their "
            "ranks, and the GPU time of a forward pass is that of one full graph"
        )
    sums = ([sum(each[i : i + graphs]) for i in range(0, len(each), graphs)] for each in times)
    return {f"gpu{rank or ''}": statistics.median(each) for rank, each in enumerate(sums)}


@functools.cache
def rotate_for_the_next_position() -> None:
    """The error that a comparison must find; once in a process, for the drafter is loaded too."""
    from mla_fusion.kernels import triton as provider

    right = provider.launch_arguments

    def wrong(plan: Any, inputs: Any) -> Any:
        # padded rows do not use their positions
        return right(plan, inputs._replace(positions=inputs.positions + 1))

    provider.launch_arguments = wrong


class Worker:
    """Methods that every worker answers by `collective_rpc`."""

    def engine_facts(self: Any) -> dict[str, str]:
        """The model runner, V1 or V2, the backend of the attention, and that of the all-reduce."""
        from mla_fusion.config import vllm_compat

        layers = self.vllm_config.compilation_config.static_forward_context
        layer = next(iter(vllm_compat.mla_layers(layers).values()))
        second, group = ".gpu.model_runner" in type(self.model_runner).__module__, get_tp_group()
        # As vLLM tries them.
        kinds = {"fi_ar_comm": "FlashInfer", "ca_comm": "custom", "pynccl_comm": "NCCL"}
        made = ((kinds[n], getattr(group.device_communicator, n, None)) for n in kinds)
        return {
            "runner": "V2" if second else "V1",
            "attention": layer.get_attn_backend().get_name(),
            "all_reduce": next((name for name, each in made if each and not each.disabled), ""),
        }

    def time_replays(self: Any) -> None:
        """Put events around the replays of CUDA graphs, until `replay_times`. The profiler counts
        the time twice that a kernel waits for its predecessor."""
        replay = torch.cuda.CUDAGraph.replay
        self.replay, self.replays = replay, []

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The GPU is busy until all three are enqueued, so the time does not include the launch.
            torch.cuda._sleep(1_000_000)
            begin.record()
            replay(graph)
            end.record()
            self.replays.append((begin, end))

        torch.cuda.CUDAGraph.replay = timed

    def replay_times(self: Any) -> list[float]:
        """Microseconds of each replay since `time_replays`."""
        torch.cuda.CUDAGraph.replay = self.replay
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in self.replays]


@register_model_loader("dummy")
class Loader(BaseModelLoader):
    """The weights of `engine_model`.

    shared_weights: a file, or "". Engines that name the same one share their weights by it, one
        file a rank (`engine_model.share`).
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Make the weights up."""
        engine_model.initialize(model, get_tensor_model_parallel_rank())

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load, one engine at a time if they share: each needs room for all weights for a while."""
        options = self.load_config.model_loader_extra_config
        if options["arm"] == "planted" and get_world_group().is_last_rank:
            rotate_for_the_next_position()
        if not options["shared_weights"]:
            return super().load_model(*args, **kwargs)
        with open(f"{options['shared_weights']}-{get_tensor_model_parallel_rank()}", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            model = super().load_model(*args, **kwargs)
            engine_model.share(model, file)
        return model
