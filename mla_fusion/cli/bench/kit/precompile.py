"""Compiles kernels in several processes before a benchmark needs them one after the other.

Triton compiles a variant of a kernel for seconds, and keeps it on disk for all processes.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def compile_ahead(launch: Callable[[T], str], given: Sequence[T]) -> None:
    """Call `launch` with each of `given`, in as many processes as there are cores, and print what
    it returns: the name of what it compiled. What fails is compiled by the benchmark itself.
    """
    if len(given) < 2:
        return
    start = time.monotonic()
    workers = min(len(given), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(launch, each) for each in given]):
            problem = done.exception()
            failed = f"not compiled ahead: {type(problem).__name__} {problem}"[:300]
            text = failed if problem else f"{done.result()} compiled"
            print(f"{text}, {time.monotonic() - start:.0f} s", flush=True)
