"""Check of products and norms beside the all-reduce that vLLM chooses for two GPUs, one of them
late: no launch may write what the other rank still reads, nor read what is not yet summed."""

import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessException

from mla_fusion import gpu
from mla_fusion.measure.outcome import CannotRun, Outcome
from mla_fusion.projections.plans import MAX_TOKENS, Plan
from mla_fusion.projections.triton import launch, normalize

LAYERS, REPLAYS, BANK = 12, 10_000, 8  # of a graph; of it; inputs in turns, so old ones show
HIDDEN, K, ROWS = 2048, 1024, 1536  # of q; K is what the next layer reads of it
PLANS = {1: Plan("vector", 8, 4), MAX_TOKENS: Plan("matrix", 16, 8)}  # by tokens
START = 120.0  # seconds for vLLM's ranks to start, in which FlashInfer's all-reduce may compile
LATE = 100_000  # cycles at most that a rank sleeps before a replay


def check_all(thorough: bool) -> Iterator[Outcome]:
    """Both ranks, in a process each; CannotRun where they do not start."""
    if (here := gpu.of("cuda")).capability < (9, 0):
        raise CannotRun(f"the norms are for NVIDIA GPUs from sm_90 on, not for {here.arch}")
    if torch.cuda.device_count() < 2:
        raise CannotRun("it needs two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = multiprocessing.get_context("spawn").SimpleQueue()
    ranks = multiprocessing.spawn(work, (port, told), nprocs=2, join=False)
    started, ended, end = False, False, time.monotonic() + START
    while not ended:
        if not started and time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise CannotRun(f"two ranks of vLLM do not start in {START:.0f} s")
        try:
            ended = ranks.join(1)
        except ProcessException as error:
            if started:
                raise
            why = str(error).strip().splitlines()[-1]
            raise CannotRun(f"two ranks of vLLM do not start: {why}") from error
        while not told.empty():
            started = True
            if found := told.get():
                yield Outcome(*found)


def work(rank: int, port: int, told: Any) -> None:
    """One rank: puts None once it has started, then the arguments of each `Outcome`."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.cuda.set_device(rank)
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(2, rank, address, rank)
        parallel_state.initialize_model_parallel(2)
        group = parallel_state.get_tp_group()
        group.all_reduce(torch.zeros(1, HIDDEN, device="cuda", dtype=torch.bfloat16))
        told.put(None)
        for tokens in PLANS:
            wrong = replayed(rank, group, tokens)
            told.put((f"{REPLAYS} replays of {tokens} tokens, rank {rank}", wrong, 0))


def replayed(rank: int, group: Any, tokens: int) -> int:
    """Wrong replays of a graph whose layers are o_proj, all-reduce, in every second one a norm, and
    the products of q and kv_a. Right are the bits of the same launches one by one. One rank sleeps
    in front of every replay, and in front of each o_proj."""
    alike, own = torch.Generator("cuda").manual_seed(9), torch.Generator("cuda").manual_seed(rank)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}

    def weights(rows: int, k: int, of: torch.Generator) -> list[torch.Tensor]:
        return [torch.randn(rows, k, generator=of, **options) / k**0.5 for _ in range(LAYERS)]

    outs, qs, kvs = weights(HIDDEN, K, own), weights(ROWS, HIDDEN, own), weights(576, HIDDEN, alike)
    bank = torch.randn(BANK, tokens, K, generator=own, **options)
    sums = torch.randn(BANK, tokens, HIDDEN, generator=alike, **options)
    x, added, gain = bank[0].clone(), sums[0].clone(), torch.ones(HIDDEN, **options)

    def step(between: Callable[[], None] | None = None) -> torch.Tensor:
        def then(results: list[torch.Tensor]) -> list[torch.Tensor]:
            if between:
                between()
            return results

        at, kept = x, added
        made: list[torch.Tensor] = []
        for layer, (out, q, kv) in enumerate(zip(outs, qs, kvs, strict=True)):
            if not between and layer % 2 == rank:
                torch.cuda._sleep(LATE // 3)
            [h] = then(launch(PLANS[tokens], at, [out]))
            [h] = then([group.all_reduce(h)])
            if layer % 2 == 0:
                h, kept = then(normalize([h], [gain], [1e-6], [kept], 1.0, True))
            pair = then(launch(PLANS[tokens], h, [q, kv]))
            at, made = pair[0][:, :K], made + pair
        return torch.cat([each.float() for each in (*made, kept)], 1)

    def settle() -> None:
        torch.cuda.synchronize()
        group.barrier()

    def fill(number: int) -> None:
        x.copy_(bank[number % BANK])
        added.copy_(sums[number % BANK])

    expected = []
    for number in range(BANK):
        fill(number)
        settle()
        expected.append(step(settle))
    step()
    settle()
    graph = torch.cuda.CUDAGraph()
    with group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
        result = step()
    settle()
    wrong, chance = torch.zeros((), dtype=torch.int64, device="cuda"), random.Random(tokens)
    for number in range(REPLAYS):
        late, cycles = chance.randrange(2), chance.randrange(LATE)
        fill(number)
        if late == rank:
            torch.cuda._sleep(cycles)
        graph.replay()
        wrong += (result != expected[number % BANK]).any()
    settle()
    return int(wrong)
