"""Compiles kernels side by side."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mla_fusion import gpu


def side_by_side(works: Iterable[Callable[[], Any]], device: torch.device) -> None:
    """Call each of `works`, which launch kernels that may not be compiled yet on `device`, in a
    thread of its own: Triton's compiler works outside the interpreter's lock. One after the other
    where that is not safe: Triton's interpreter on a CPU, and AMD's loader of kernels.

    Raises: the first error of any."""
    if gpu.of(device).vendor != "NVIDIA":
        for work in works:
            work()
        return

    inference = torch.is_inference_mode_enabled()

    def run(work: Callable[[], Any]) -> None:
        # A thread begins with GPU 0, and outside inference mode.
        with torch.cuda.device(device), torch.inference_mode(inference):
            work()

    with ThreadPoolExecutor() as pool:
        for started in [pool.submit(run, work) for work in works]:
            started.result()
