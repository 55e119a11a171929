"""Times candidates: CUDA graphs of many calls that take turns, so that a change of the clock or a
neighbour on the GPU meets all of them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch

from mla_fusion.kernels.ahead import compile_apart

T = TypeVar("T")
C = TypeVar("C")
Call = Callable[[int], object]
TIMES = ["p20_us", "p50_us", "p80_us"]
PROCESSES = 8  # that compile at a time
# A peer that is not here, or that this vLLM calls otherwise.
UNAVAILABLE = ImportError, RuntimeError, AttributeError, ValueError, TypeError
say_once = functools.cache(functools.partial(print, flush=True))


@dataclasses.dataclass
class Ceilings:
    """Measured rates of this GPU: GB/s of a copy (read plus write) and bf16 TFLOP/s."""

    gbps: float
    tflops: float

    def floor_us(self, moved: int, flops: int) -> float:
        """The least time of its bytes and its operations on this GPU, in microseconds."""
        return max(moved / self.gbps / 1e3, flops / self.tflops / 1e6)


def compile_all(launches: Sequence[Callable[[], object]]) -> None:
    """Compile what these launch of meta tensors, several at once, in processes of their own. What
    fails there is compiled when it is timed."""
    compile_some = functools.partial(compile_apart, device=torch.device("cuda"))
    with ThreadPoolExecutor(PROCESSES) as pool:
        for said in pool.map(compile_some, (launches[n::PROCESSES] for n in range(PROCESSES))):
            if said:
                print(said)


def capture_calls(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls, after a first one that is not captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph


def interleave(
    graphs: dict[T, torch.cuda.CUDAGraph], calls: int, rounds: int
) -> dict[T, dict[str, float]]:
    """`TIMES` of a call of every graph, in microseconds, of one sample per round."""
    samples: dict[T, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The first replay keeps the GPU busy while the CPU enqueues the second.
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            samples[name].append((begin, end))
        torch.cuda.synchronize()
    times = {}
    for name, pairs in samples.items():
        us = [begin.elapsed_time(end) * 1e3 / calls for begin, end in pairs]
        times[name] = dict(zip(TIMES, np.quantile(us, (0.2, 0.5, 0.8)).tolist(), strict=True))
    return times


def compare(
    names: Iterable[T], build: Callable[[T], tuple[Call, C]], calls: int, rounds: int
) -> list[tuple[T, C, dict[str, float]]]:
    """Each candidate that is here, what its check found, and its `TIMES`. build: its call, which
    keeps what a graph of `calls` of them reads, and what the check found."""
    graphs, checks, kept = {}, {}, []
    for name in names:
        try:
            call, checks[name] = build(name)
            graphs[name] = capture_calls(call, calls)
            kept.append(call)
        except UNAVAILABLE as problem:
            say_once(f"{name} left out: {type(problem).__name__} {str(problem)[:300]}")
    times = interleave(graphs, calls, rounds)
    return [(name, checks[name], times[name]) for name in graphs]


def rates(moved: int, flops: int, times: dict[str, float]) -> dict[str, float]:
    """The times of a shape, with the GB/s and TFLOP/s of its bytes and operations."""
    us = times["p50_us"]
    return {**times, "gbps": moved / us / 1e3, "tflops": flops / us / 1e6}


def measure_ceilings() -> Ceilings:
    """Copy bandwidth and bf16 matrix rate of this GPU, on random data."""
    from triton.testing import do_bench

    source = torch.randint(0, 256, (2**31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source)) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = do_bench(lambda: a @ b) / 1e3
    return Ceilings(gbps=2 * source.numel() / copy / 1e9, tflops=2 * 8192**3 / product / 1e12)
