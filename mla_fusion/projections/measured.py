"""Measurements of the kernels against cuBLAS. `projections=auto` decides by them.

`gpus/` has a JSON file for each GPU:

    gpu, torch, triton, commit, command
    shapes   {"sizes": columns N of each result, "k": K, "bits": of a weight's element, 16 if left
              out, "rows": [...]}

A row has `tokens`, the fastest `plan` (kernel, block_n, num_warps), and p20, p50 and p80 in us of
`ours` and of `torch`, its `mm` of each weight or vLLM's op for block fp8, behind a kernel that
starts no launch early, without its time. Weights were bf16: fp16 has as many bytes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_fusion import gpu
from mla_fusion.ops import Product
from mla_fusion.projections.plans import MAX_TOKENS, PLANS, Plan

FOLDER = Path(__file__).with_name("gpus")
GAIN = 1.05  # least time of cuBLAS over ours, where the shape itself was measured
ESTIMATED_GAIN = 1.10  # the same, where it goes by the nearest measured shape
NEAR = math.log(2)  # farthest such shape: N or K differs by this factor, as a logarithm


class Row(NamedTuple):
    """The fastest plan of a shape for some number of tokens, and median times in microseconds."""

    tokens: int
    plan: Plan
    ours: float
    cublas: float


_own: dict[str, dict[Product, list[Row]]] = {}  # by GPU, of `prefer`


def shapes(name: str) -> dict[Product, list[Row]]:
    """The rows of a GPU by shape, fewest tokens first; empty if nothing was measured on it."""
    return shipped().get(name, {}) | _own.get(name, {})


@functools.cache
def shipped() -> dict[str, dict[Product, list[Row]]]:
    """The rows of every file of `gpus/`, by GPU."""
    tables: list[Any] = [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]
    return {table["gpu"]: parse(table) for table in tables}


def shape_of(each: Mapping[str, Any]) -> Product:
    """The shape of one of a file's "shapes"."""
    return Product(each["k"], tuple(each["sizes"]), each.get("bits", 16))


def parse(table: Mapping[str, Any]) -> dict[Product, list[Row]]:
    """The rows of a file's content. Raises ValueError if it has another form."""
    try:
        found = {
            shape_of(each): [
                Row(row["tokens"], Plan(*row["plan"]), row["ours"][1], row["torch"][1])
                for row in each["rows"]
            ]
            for each in table["shapes"]
        }
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from None
    if unknown := {row.plan for rows in found.values() for row in rows} - {*PLANS}:
        raise ValueError(f"no plan is {unknown.pop()}")
    return found


def prefer(name: str, rows: dict[Product, list[Row]]) -> None:
    """Let the rows of these shapes go before the shipped ones of a GPU, in this process."""
    _own[name] = rows
    chosen.cache_clear()


def plan_for(device: torch.device, of: Product, tokens: int) -> Plan | None:
    """The plan of a kernel that was measured faster on this GPU than cuBLAS, for `tokens` rows of
    the input; None if none was.

    The row of the next larger measured number of tokens decides. A shape that was not measured goes
    by the nearest one with as many weights, if both the sum of N and K are within a factor of two:
    ours must be 5 % faster, then 10 %."""
    return chosen(gpu.of(device).name, of, tokens) if 0 < tokens <= MAX_TOKENS else None


@functools.lru_cache(maxsize=4096)
def chosen(name: str, shape: Product, tokens: int) -> Plan | None:
    """`plan_for` on a GPU of this name."""
    rows = shapes(name)
    nearest = shape if shape in rows else _nearest(rows, shape)
    if nearest is None:
        return None
    row = next((row for row in rows[nearest] if row.tokens >= tokens), None)
    gain = GAIN if nearest == shape else ESTIMATED_GAIN
    if row is None or row.cublas < gain * row.ours:
        return None
    return row.plan if row.plan.fits(shape.k, tokens, shape.bits) else None


def _nearest(rows: dict[Product, list[Row]], shape: Product) -> Product | None:
    """The measured shape with the least distance of the logarithms of N and K."""

    def apart(other: Product) -> tuple[float, float]:
        columns = math.log(sum(other.sizes) / sum(shape.sizes))
        return abs(columns), abs(math.log(other.k / shape.k))

    alike = [
        other for other in rows
        if (len(other.sizes), other.bits) == (len(shape.sizes), shape.bits)
        and max(apart(other)) <= NEAR
    ]  # fmt: skip
    return min(alike, key=lambda other: sum(apart(other)), default=None)
