"""What a check of a kernel yields, one outcome a case; and the cases of a decode."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Protocol

import torch

from mla_fusion.cli.bench.kit import capture_calls


class CannotRun(Exception):
    """A kernel does not run on this GPU; the message says why."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case: right if `error` is at most `bound` and nothing else is `wrong`; NaN is wrong."""

    case: str
    error: float
    bound: float
    wrong: str = ""

    @property
    def right(self) -> bool:
        return self.error <= self.bound and not self.wrong


def different_bytes(got: torch.Tensor, want: torch.Tensor) -> int:
    """How many bytes differ; NaN equals a NaN of the same bits."""
    return int((got.view(torch.uint8) != want.view(torch.uint8)).sum())


def worst(errors: list[float]) -> float:
    """The largest; NaN if one is, which max() may lose."""
    return float(torch.tensor([0.0, *errors], dtype=torch.double).max())


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of two LSE. Without keys both are -inf, and minus each other NaN."""
    off = (got.double() - want).abs()
    return float(off.masked_fill(got.double() == want, 0.0).max())


def moved(lse_errors: list[float], limit: float) -> list[str]:
    """What is wrong with LSE that are so far off."""
    off = worst(lse_errors)
    return [] if off <= limit else [f"LSE off by {off:.1e}, bound {limit:.0e}"]


class Bench(Protocol):
    """Fixed tensors, which `fill` gives the contents of a step, with NaN where nothing is read."""

    def fill(self, rng: random.Random, ragged: bool) -> None: ...  # the first are not ragged
    def clear(self) -> None: ...  # NaN in what a launch writes
    def step(self, _: int = 0) -> None: ...  # plan and decode
    def launch(self) -> None: ...  # decode by the plan of this step
    def results(self) -> list[torch.Tensor]: ...  # what a launch writes

    def judge(self) -> tuple[float, float, str]:
        """Largest relative distance of a result, its bound, and what else is wrong."""


def decoded(
    name: str, bench: Bench, rng: random.Random, repeats: int, replays: int, gpu: bool
) -> Iterator[Outcome]:
    """A step eagerly, repeated bit by bit, and on a GPU in a graph replayed with other contents."""
    bench.fill(rng, ragged=False)
    bench.step()
    first = [tensor.clone() for tensor in bench.results()]
    error, bound, wrong = bench.judge()
    for _ in range(repeats):
        bench.clear()
        bench.launch()
        if any(map(different_bytes, bench.results(), first)):
            wrong = wrong or "two launches differ"
    yield Outcome(name, error, bound, wrong)
    graph = capture_calls(bench.step, 1) if gpu else None
    for number in range(replays):
        bench.fill(rng, ragged=True)
        if graph is None:
            bench.step()
        else:
            graph.replay()
        yield Outcome(f"{name}, replay {number}", *bench.judge())
