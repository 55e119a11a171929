"""Tables that an engine derives from its cosines and sines: in the type of the query, as a native
rotation uses them, and in halves for provider `aiter`.

The states of its MLA layers keep them, so they are freed with it. W_UK, W_UV and scales are read
from the layer in every step. `refresh` follows a reload or a wake-up, after which a replayed CUDA
graph, which runs no Python, reads the tables at the same addresses.
"""

from typing import Any, NamedTuple

import torch

from mla_fusion.kernels.capture import refuse_during_capture
from mla_fusion.ops import Rope


class _Rounded(NamedTuple):
    """A table and what it was rounded from, which is kept so that no other takes its address."""

    source: torch.Tensor
    version: int
    table: torch.Tensor

    def refresh(self) -> None:
        self.table.copy_(self.source)


def in_type(
    tables: dict[Any, Any], source: torch.Tensor, rope: str, dtype: torch.dtype
) -> torch.Tensor:
    """`source` as the spelling uses it: rounded once, kept in `tables`, and rounded again in place
    after a write to it."""
    if rope != Rope.NATIVE or source.dtype == dtype:
        return source
    key = source.data_ptr(), source.shape, source.stride(), dtype
    found: _Rounded | None = tables.get(key)
    if found is None or _version(found.source) != found.version:
        refuse_during_capture("the cosines and sines in the type of the query")
        table = source.to(dtype) if found is None else found.table.copy_(source)
        # The tensor that was seen first: an alias may have a version of its own.
        source = source if found is None else found.source
        found = tables[key] = _Rounded(source, _version(source), table)
    return found.table


def refresh(tables: dict[Any, Any]) -> None:
    """Derive again, in place, all that an engine keeps; a write through `.data` has no version."""
    for found in tables.values():  # in the order made: halves after the table that they are of
        found.refresh()


def _version(x: torch.Tensor) -> int:
    """Number of writes in place; 0 for an inference tensor, which does not count them."""
    return 0 if x.is_inference() else x._version
