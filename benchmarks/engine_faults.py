"""Faults of the engines of the benchmarks: what a comparison must find, and how an engine ends."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from mla_fusion import kernels
from mla_fusion.kernels import triton as provider

if TYPE_CHECKING:
    from collections.abc import Callable


def wrong_positions(rank: int) -> None:
    """Rotate for the next position."""
    right = provider.launch_arguments

    def wrong(plan: Any, inputs: Any) -> Any:
        # padded rows do not use their positions
        return right(plan, inputs._replace(positions=inputs.positions + 1))

    provider.launch_arguments = wrong


def missing_provider(rank: int) -> None:
    """Let the provider be missing on the second rank, after the engine was configured."""

    def require() -> None:
        raise kernels.ProviderUnavailable("planted: no Triton here")

    if rank == 1:
        provider.require = require
        kernels.get_provider.cache_clear()


def death(rank: int) -> None:
    """Let the process of the second rank end while it prepares its kernels."""

    def warmup(*args: Any, **kwargs: Any) -> None:
        os._exit(3)

    if rank == 1:
        provider.warmup = warmup


# By arm; each gets the rank.
FAULTS: dict[str, Callable[[int], None]] = {
    "planted": wrong_positions,
    "missing": missing_provider,
    "dies": death,
}


@functools.cache
def plant(arm: str, rank: int) -> None:
    """Plant the fault of an arm, if it has one, once in a process: the drafter is loaded too."""
    if arm in FAULTS:
        FAULTS[arm](rank)
