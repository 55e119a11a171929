"""Compiles kernels in a process of its own, ahead of their first launch.

A thread would wait for the interpreter's lock, which torch.compile holds meanwhile: a decode kernel
took 4 s instead of 1.3. The process opens no context of the GPU, which would take memory of it. Its
result is what Triton's cache on disk has then."""

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_fusion import gpu


def compile_apart(launches: Sequence[Callable[[], Any]], device: torch.device) -> str:
    """Compile in a new process what these calls launch on `device`: they can be pickled, and have
    meta tensors. Returns what the process said if it failed, else nothing."""
    if not launches:
        return ""
    from triton.compiler import make_backend
    from triton.runtime import driver

    target = driver.active.get_current_target()
    job = pickle.dumps((gpu.of(device), target, make_backend(target).hash(), launches))
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=job, capture_output=True, env=os.environ | path)
    said = done.stderr.decode(errors="replace").strip()
    return f"status {done.returncode}: {said}" if done.returncode else ""


def on_meta(value: Any) -> Any:
    """A tensor's type, shape and strides; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


class Target:
    """Triton's driver of a GPU that no kernel runs on."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def main() -> None:
    """Compile the job of the standard input."""
    from triton.compiler import make_backend
    from triton.runtime import KernelInterface, driver

    here, target, compiler, launches = pickle.load(sys.stdin.buffer)
    gpu.of = lambda device: here  # in this process
    # Part of a binary's name in the cache. It has the version of ptxas, and Inductor of torch 2.11
    # sets another ptxas once the engine has asked for that.
    type(make_backend(target)).hash = lambda self: compiler
    driver.set_active(Target(target))
    KernelInterface.__getitem__ = lambda self, grid: functools.partial(self.warmup, grid=grid)
    for launch in launches:
        launch()


if __name__ == "__main__":
    main()
