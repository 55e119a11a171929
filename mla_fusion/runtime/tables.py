"""Cosines and sines in the type of the query, as a native rotation uses them.

The MLA layers of an engine keep them, so they are freed with it. These and the halves of provider
`aiter` are all that this library derives from weights or buffers and keeps: W_UK, W_UV and scales
are read from the layer in every step. `refresh` follows a reload or a wake-up, after which a
replayed CUDA graph, which runs no Python, reads them at the same addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mla_fusion import config, kernels
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


def refresh(vllm_config: Any) -> None:
    """Derive again, in place, what an engine keeps; a write through `.data` has no version."""
    layers = vllm_compat.mla_layers(vllm_config.compilation_config.static_forward_context)
    having = [getattr(layer, ATTRIBUTE, {}) for layer in layers.values()]
    for kept in {id(each): each for each in having}.values():
        for found in kept.values():
            found.table.copy_(found.source)
    provider = kernels.get_provider(config.read_options(vllm_config.additional_config).provider)
    if hasattr(provider, "refresh"):  # after the tables: it may have been given those
        provider.refresh()


def _version(x: torch.Tensor) -> int:
    """How often it was written in place; an inference tensor does not count that."""
    return 0 if x.is_inference() else x._version
