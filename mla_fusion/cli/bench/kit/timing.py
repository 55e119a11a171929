"""CUDA graphs of many calls, timed in turns.

Candidates take turns round by round, so that clock changes and neighbours meet all of them alike.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def capture_calls(call: Callable[[int], object], count: int) -> torch.cuda.CUDAGraph:
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
    graphs: dict[str, torch.cuda.CUDAGraph], layers: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per layer of every graph, one sample per round."""
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in graphs}
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
    return {
        name: [begin.elapsed_time(end) * 1e3 / layers for begin, end in pairs]
        for name, pairs in samples.items()
    }


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """p20, median and p80."""
    if len(samples) == 1:  # an error before Python 3.13
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]
