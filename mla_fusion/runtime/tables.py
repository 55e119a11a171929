"""Cosines and sines in the type of the query, as a native rotation uses them.

The MLA layers of an engine keep them, so they are freed with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mla_fusion.config import vllm_compat
from mla_fusion.kernels.capture import refuse_during_capture
from mla_fusion.ops import Rope

ATTRIBUTE = "mla_fusion_tables"


class _Rounded(NamedTuple):
    """A table and what it was rounded from, which is kept so that no other takes its address."""

    source: torch.Tensor
    version: int
    table: torch.Tensor


def _kept(layer: Any) -> dict[Any, _Rounded]:
    """The tables of the engine whose layer it is; it is in a forward pass."""
    if not hasattr(layer, ATTRIBUTE):
        layers = vllm_compat.mla_layers(vllm_compat.current_layers()).values()
        having = (getattr(each, ATTRIBUTE) for each in layers if hasattr(each, ATTRIBUTE))
        setattr(layer, ATTRIBUTE, next(having, {}))
    kept: dict[Any, _Rounded] = getattr(layer, ATTRIBUTE)
    return kept


def in_type(layer: Any, source: torch.Tensor, rope: str, dtype: torch.dtype) -> torch.Tensor:
    """`source` as the spelling uses it: rounded once, and again in place after a write to it."""
    if rope != Rope.NATIVE or source.dtype == dtype:
        return source
    kept = _kept(layer)
    key = source.data_ptr(), source.shape, source.stride(), dtype
    found = kept.get(key)
    if found is None or _version(found.source) != found.version:
        refuse_during_capture("the cosines and sines in the type of the query")
        table = source.to(dtype) if found is None else found.table.copy_(source)
        # The tensor that was seen first: an alias may have a version of its own.
        source = source if found is None else found.source
        found = kept[key] = _Rounded(source, _version(source), table)
    return found.table


def _version(x: torch.Tensor) -> int:
    """How often it was written in place; an inference tensor does not count that."""
    return 0 if x.is_inference() else x._version
