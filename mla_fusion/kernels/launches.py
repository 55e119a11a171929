"""Launches by the names of a kernel's parameters, and launches that are repeated.

Triton binds and looks up the 20 to 30 arguments of every launch, which takes the host longer than
many kernels take the GPU. A decode step without a full CUDA graph makes the same launches each
time: vLLM's buffers, and those between captured pieces, have fixed addresses. For a graph that vLLM
captures, all layers make the same launches, each with addresses of its own.
"""

import copy
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from mla_fusion.kernels.capture import capturing

MOST_KEPT = 256  # of a layer, of which each step without a full graph uses two
MOST_ALIKE = 4096  # of layers with one plan, which make two or four for each size of a batch
ALIGNED = 16  # bytes: alignment that Triton, TMA descriptors and the cards of kernels look at


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

    def start(self, kept: list[functools.partial[Any]] | None = None) -> None:
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


class _Address(int):
    """An argument that is a tensor's address: it does not keep the memory alive."""

    def data_ptr(self) -> int:
        return self


def _without_memory(value: Any) -> Any:
    """The argument, with an address in the place of a tensor, also inside a Gluon descriptor."""
    if isinstance(value, torch.Tensor):
        return _Address(value.data_ptr())
    if isinstance(base := getattr(value, "base", None), torch.Tensor):
        value = copy.copy(value)
        value.base = _Address(base.data_ptr())
    return value


def _address(value: Any) -> int:
    """The address that an argument is or holds; 0 for any other."""
    held = getattr(value, "base", value)
    return held if isinstance(held, _Address) else 0


def _moved(value: Any, to: dict[int, int]) -> Any:
    """The argument with the new address of each tensor. to: old address -> new address."""
    if isinstance(value, _Address):
        return int(to.get(value, value))
    if isinstance(base := getattr(value, "base", None), _Address):
        value = copy.copy(value)
        value.base = _Address(to.get(base, base))
    return value


class Kept:
    """The launches of the ops of a layer, by all that they were made from.

    A key has the `places` of all tensors of a call: query, cache, weights, scales, output, table.
    vLLM may replace any of them from one step to the next, or when it reloads weights. The new one
    has another place, and so a launch of its own, or the launch is the same to the last argument.
    So no kept launch is stale, and none keeps memory. The buffers of a plan are in no key: a plan
    and the `Kept` of its layers are made together. A launch goes to the current stream of the
    current device.

    `alike` is shared by the layers of one plan. A call whose tensors differ from an earlier layer's
    by nothing but addresses makes that layer's launches with its own. So a launch must have the
    tensors of a call as they are: the address of a part of one would remain the earlier layer's,
    and `keep` refuses it.
    """

    def __init__(self, alike: dict[Hashable, Any] | None = None) -> None:
        self._by_key: dict[Hashable, Sequence[functools.partial[Any]]] = {}
        self._alike = {} if alike is None else alike

    def repeat(self, key: Hashable, at: tuple[Any, ...]) -> bool:
        """Make the launches of this key and these `places` again; False if there are none."""
        if (launches := self._by_key.get((key, at))) is None:
            kind, addresses = _kind(key, at)
            if kind not in self._alike:
                return False
            before, made = self._alike[kind]
            to = dict(zip(before, addresses, strict=True))
            launches = self._store((key, at), made, to)
        import triton

        active = triton.runtime.driver.active
        stream = active.get_current_stream(active.get_current_device())
        for launch in launches:
            launch(stream=stream)
        return True

    def keep(
        self, key: Hashable, at: tuple[Any, ...], launches: Sequence[functools.partial[Any]]
    ) -> None:
        """Keep launches that were made, if there are any. Raises RuntimeError for one that has an
        address within a tensor of the call, in place of its own."""
        if launches:
            kind, addresses = _kind(key, at)
            held = {_address(each) for launch in launches for each in launch.args}
            for address, (start, dtype, shape, stride) in itertools.product(
                held.difference(addresses), filter(None, at)
            ):
                last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
                if start < address <= start + last * dtype.itemsize:
                    raise RuntimeError(
                        f"a launch has an address {address - start} bytes within a tensor of "
                        f"{[*shape]}, which no other layer could replace: give it that tensor"
                    )
            if len(self._alike) == MOST_ALIKE:
                self._alike.clear()  # sizes that do not return
            self._alike[kind] = addresses, launches
            self._store((key, at), launches, {})

    def _store(
        self, key: Hashable, launches: Sequence[functools.partial[Any]], to: dict[int, int]
    ) -> list[functools.partial[Any]]:
        """Calls of these launches at `to`, kept unless a graph captures them: they are its."""
        calls = [functools.partial(x.func, *[_moved(y, to) for y in x.args]) for x in launches]
        if not capturing():
            if len(self._by_key) == MOST_KEPT:
                self._by_key.clear()  # addresses that do not return
            self._by_key[key] = calls
        return calls


def _kind(key: Hashable, at: tuple[Any, ...]) -> tuple[Hashable, list[int]]:
    """`key` with these `places` but for addresses, and the addresses. The kind says which tensors
    share an address: an argument with that address could be any of them."""
    addresses = [0 if place is None else place[0] for place in at]
    kinds = [place and (place[0] % ALIGNED, *place[1:]) for place in at]
    return (key, *kinds, *map(addresses.index, addresses)), addresses
