"""Launches by the names of a kernel's parameters, and launches that are repeated.

Triton binds and looks up the 20 to 30 arguments of every launch, which takes the host longer than
many kernels take the GPU. A decode step without a full CUDA graph makes the same launches each
time: vLLM's buffers, and those between captured pieces, have fixed addresses.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from mla_fusion.kernels.capture import capturing

MOST_KEPT = 256  # of a layer, of which each step without a full graph uses two


class Launch(NamedTuple):
    """The launch of a kernel. grid: CTAs in each dimension. arguments: by the names of the kernel's
    parameters, constants too; other names are left out. options: Triton's."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def positional(self) -> list[Any]:
        """The arguments in the order of the kernel's parameters."""
        return [self.arguments[name] for name in self.kernel.arg_names]

    def start(self, kept: list[Callable[..., Any]] | None = None) -> None:
        """Launch the kernel on the current stream; nothing is waited for. A call that launches it
        again, with the same addresses, goes into `kept`, if given."""
        # By position: Triton copies keywords three times, 4 us for 30 of them.
        given = self.positional
        compiled = self.kernel[self.grid](*given, **self.options)
        if kept is not None and compiled is not None:  # None: Triton's interpreter
            grid = (*self.grid, 1, 1)[:3]
            kept.append(functools.partial(compiled[grid], *map(_without_memory, given)))


def places(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """All that a launch is made from, of each of these tensors: a part of a key of `Kept`."""
    return tuple(
        [t if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
    )


class _Address(NamedTuple):
    """Stands for a tensor whose memory it does not keep alive."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _without_memory(value: Any) -> Any:
    """An argument of a launch as addresses: a tensor's, or that in a descriptor of Gluon's."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(base := getattr(value, "base", None), torch.Tensor):
        value = copy.copy(value)
        value.base = _Address(base.data_ptr())
    return value


class Kept:
    """The launches of the ops of a layer, by all that they were made from.

    A key has the `places` of all tensors of a call: query, cache, weights, scales, output, table.
    vLLM may replace any of them from one step to the next, or when it reloads weights. The new one
    has another place, and so a launch of its own, or the launch is the same to the last argument.
    So no kept launch is stale, and none keeps memory. The buffers of a plan are in no key: a plan
    and the `Kept` of its layers are made together. A launch goes to the current stream of the
    current device.
    """

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Sequence[Callable[..., Any]]] = {}

    def repeat(self, key: Hashable) -> bool:
        """Make the launches of this key again; False if there are none."""
        if (launches := self._by_key.get(key)) is None:
            return False
        import triton

        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        for launch in launches:
            launch(stream=stream)
        return True

    def keep(self, key: Hashable, launches: Sequence[Callable[..., Any]]) -> None:
        """Keep launches that were made, if there are any. Those that a graph captures are its."""
        if launches and not capturing():
            if len(self._by_key) == MOST_KEPT:
                self._by_key.clear()  # addresses that do not return
            self._by_key[key] = launches
