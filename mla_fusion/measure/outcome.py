"""The outcome of each case of a kernel's check, and the cases of a decode."""

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from mla_fusion.measure.distances import distance, worst
from mla_fusion.measure.timing import capture_calls


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
    """Number of bytes that differ; a NaN equals a NaN of the same bits."""
    return int((got.view(torch.uint8) != want.view(torch.uint8)).sum())


def compared(
    case: str, results: Sequence[torch.Tensor], again: Sequence[torch.Tensor],
    exact: Iterable[torch.Tensor], limits: Iterable[torch.Tensor],
) -> Outcome:  # fmt: skip
    """Results of a call, and of the same call again, beside the exact ones. error: the largest
    distance of an element over its limit; NaN and infinity must be where the exact ones are."""
    notes, off = [], []
    for got, want, limit in zip(results, exact, limits, strict=True):
        other = ~want.isfinite()
        if not torch.allclose(got[other].double(), want[other], equal_nan=True):
            notes.append("another NaN or infinity than float64's")
        off.append(float(((got.double() - want).abs() / limit).masked_fill(other, 0).max()))
    if any(map(different_bytes, results, again)):
        notes.append("two launches differ")
    return Outcome(case, worst(off), 1.0, "; ".join(notes))


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest distance of two LSE. Without keys both are -inf, and minus each other NaN."""
    off = (got.double() - want).abs()
    return float(off.masked_fill(got.double() == want, 0.0).max())


class Bench(Protocol):
    """Fixed tensors of a decode, and its cases. bound: of a result's relative distance."""

    device: str
    bound: float
    lse_bound: float

    def fill(self, rng: random.Random, ragged: bool) -> None:
        """The contents of a step, with NaN where nothing is read; the first are not ragged."""

    def clear(self) -> None: ...  # NaN in what a launch writes
    def step(self, _: int = 0) -> None: ...  # plan and decode
    def launch(self) -> None: ...  # decode by the plan of this step
    def results(self) -> list[torch.Tensor]: ...  # what a launch writes

    def compared(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Results and LSE of some rows beside what they should be: got, want, got, want."""

    def notes(self) -> list[str]:
        """Further faults of a result, a sentence each."""
        return []

    def judged(self, name: str) -> Outcome:
        """A case whose results are there."""
        compared = [*self.compared()]
        off = worst([apart(*lse) for _, _, *lse in compared])
        lse = f"LSE off by {off:.1e}, bound {self.lse_bound:.0e}"
        wrong = [*([] if off <= self.lse_bound else [lse]), *self.notes()]
        error = worst([distance(*out) for *out, _, _ in compared])
        return Outcome(name, error, self.bound, "; ".join(wrong))

    def cases(self, name: str, repeats: int, replays: int) -> Iterator[Outcome]:
        """A step, repeated bit by bit; then others, on a GPU as replays of one captured graph."""
        rng = random.Random(0)
        self.fill(rng, ragged=False)
        self.step()
        first = [tensor.clone() for tensor in self.results()]
        outcome = self.judged(name)
        for _ in range(repeats):
            self.clear()
            self.launch()
            if any(map(different_bytes, self.results(), first)):
                wrong = outcome.wrong or "two launches differ"
                outcome = dataclasses.replace(outcome, wrong=wrong)
        yield outcome
        replay = self.step if self.device == "cpu" else capture_calls(self.step, 1).replay
        for number in range(replays):
            self.fill(rng, ragged=True)
            replay()
            yield self.judged(f"{name}, replay {number}")
