"""The products of few tokens that this library computes for a model, by the shipped rows: an engine
on a CPU has none."""

from collections.abc import Mapping
from typing import Any

from mla_fusion.config import models
from mla_fusion.projections import measured, shapes


def ask(model: Mapping[str, Any], ranks: int) -> list[str]:
    """A line for each GPU on which some are. model: its whole config, of weights in bf16 or
    block fp8."""
    wide_router = models.facts(str(model.get("model_type"))).wide_router
    every, said = shapes.shapes_of(model, ranks, wide_router), []
    for name in measured.shipped():
        found = shapes.faster(name, every)
        ours = ", ".join(f"{shape} ({n})" for shape, n in found.items())
        if ours:
            op = ", in the place of FlashInfer's op" * any(shape.bits == 8 for shape in found)
            said.append(f"  products on an {name} (most tokens): {ours}{op}; all others are vLLM's")
    return said
