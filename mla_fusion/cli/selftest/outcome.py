"""What a check of a kernel yields: one outcome a case."""

from __future__ import annotations

import dataclasses

import torch


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
        """Whether the case passed."""
        return self.error <= self.bound and not self.wrong


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; also where they are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def worst(errors: list[float]) -> float:
    """The largest; NaN if one is, which max() may lose."""
    return float(torch.tensor([0.0, *errors], dtype=torch.double).max())
