"""What this GPU computes in, and the rates it was measured to reach."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

import torch

from mla_fusion.attention.aiter.selection import FP8_OF
from mla_fusion.attention.plan.device import architecture

if TYPE_CHECKING:
    from collections.abc import Callable


class Work(Protocol):
    """A shape that counts its own work."""

    def bytes(self) -> int:
        """Fewest bytes."""

    def flops(self) -> int:
        """Floating-point operations."""


@functools.cache
def fp8_type() -> torch.dtype:
    """The fp8 type that this GPU computes in: e4m3fnuz on gfx942, e4m3fn on all others."""
    return FP8_OF.get(architecture(torch.device("cuda")), torch.float8_e4m3fn)


@dataclasses.dataclass
class Ceilings:
    """What this GPU was measured to do: GB/s of a copy (read plus write) and bf16 TFLOP/s."""

    gbps: float
    tflops: float

    def floor_us(self, work: Work) -> float:
        """Nothing that does `work` is faster than this, in microseconds."""
        return max(work.bytes() / self.gbps / 1e3, work.flops() / self.tflops / 1e6)


def measure_ceilings() -> Ceilings:
    """Copy bandwidth and bf16 matrix rate of this GPU, on random data."""

    def seconds(step: Callable[[], object], repeat: int = 10) -> float:
        for _ in range(3):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeat

    source = torch.randint(0, 256, (2**31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = seconds(lambda: a @ b)
    return Ceilings(gbps=2 * source.numel() / copy / 1e9, tflops=2 * 8192**3 / product / 1e12)
