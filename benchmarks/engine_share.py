"""One copy of the weights for several engines on one GPU, by CUDA IPC.

Of the engines that name the same file, the first to load keeps its weights and writes their handles
into it; the others map those and free their own. Every engine loads by itself first, so what vLLM
derives from the weights is its own, and the weights it gives up must be equal to the bit. The
engines live until the last one ends.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch.multiprocessing.reductions import reduce_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALLEST = 1 << 20  # bytes of a weight that is worth sharing


def share(model: torch.nn.Module, file: BinaryIO) -> None:
    """Write the handles of all large weights into an empty file, or take those of a written one.

    Raises:
        RuntimeError: a weight differs from the one it would be replaced by.
    """
    file.seek(0)
    if not (written := file.read()):
        torch.cuda.synchronize()
        pickle.dump({name: reduce_tensor(weight.data) for name, weight in large(model)}, file)
        return
    handles = pickle.loads(written)
    for name, weight in large(model):
        rebuild, arguments = handles[name]
        first = rebuild(*arguments)
        if not equal(weight.data, first):
            raise RuntimeError(
                f"weight {name} differs between two arms, so they cannot share it: vLLM processed "
                "it in two ways. Run these arms with --arms one at a time beside `default`"
            )
        weight.data = first
    torch.cuda.empty_cache()


def large(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights worth sharing, by name."""
    return ((n, w) for n, w in model.named_parameters() if w.nbytes >= SMALLEST)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all bits are equal; torch compares no fp8."""
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)
