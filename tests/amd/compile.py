"""A kernel of the library as a launch on AMD would compile it: its program and its arguments."""

import dataclasses
import functools
import math

import torch

from tests.amd import assembly
from tests.kernels.compiled import LDS, compile_kernel

SIMDS = 4  # of a CU


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel compiled for a target; parameters: those that are not constants, (name, type)."""

    target: str
    program: assembly.Program
    parameters: tuple[tuple[str, str], ...]
    warps: int
    lds: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, the values of its parameters, its grid, and the values of its constants."""

    kernel: Kernel
    values: dict[str, object]
    grid: tuple[int, int, int]
    constants: dict[str, object] = dataclasses.field(default_factory=dict)


_parsed = functools.cache(assembly.parse)


def launch(target, kernel, arguments, options, grid):
    """What `kernel[grid](*arguments, **options)` would launch on `target`."""
    compiled = compile_kernel(target, kernel, arguments, options)
    source = compiled.src
    parameters = tuple((n, t) for n, t in source.signature.items() if t != "constexpr")
    parsed = _parsed(compiled.asm["amdgcn"])
    metadata = compiled.metadata
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    return Launch(
        Kernel(target, parsed, parameters, metadata.num_warps, metadata.shared),
        {name: values[name] for name, _ in parameters},
        tuple((*grid, 1, 1)[:3]),
        {name: value for name, value in values.items() if name not in dict(parameters)},
    )


def waves(kernel):
    """The waves a SIMD that fit, as whole workgroups on a CU: 512 registers a lane in units of 8,
    at most 8 waves, and the LDS of the target."""
    allocated = math.ceil(kernel.program.directives["next_free_vgpr"] / 8) * 8
    groups = SIMDS * min(8, 512 // allocated) // kernel.warps
    if kernel.lds:
        groups = min(groups, LDS[kernel.target] // kernel.lds)
    return groups * kernel.warps / SIMDS


def tensors(given):
    """The tensors among the parameters of a launch, by name."""
    return {name: x for name, x in given.values.items() if isinstance(x, torch.Tensor)}
