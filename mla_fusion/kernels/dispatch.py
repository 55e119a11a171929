"""The launch plan of the fused region by tokens, heads, widths and GPU, as measured.

`gpus/` has a JSON file for each GPU, with the plans that `mla-fusion calibrate` measured to be
fastest; those that it measured on this machine go before, see `prefer`. Every plan is legal for all
widths: the kernel masks what a tile has beyond them, and `fit` shrinks tiles that are too deep.
Nothing is tried out at run time: graph and warm-up agree.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from mla_fusion.gpu import Gpu
from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.kernels.card import TRITON
from mla_fusion.kernels.card import Widths as Widths

FOLDER = Path(__file__).with_name("gpus")
BATCH_INVARIANT = 64  # tokens of the plan that serves every batch, if rows may not depend on it


@dataclasses.dataclass(frozen=True)
class Plan:
    """One configuration of `triton_kernels.mla_prep`.

    block_m, block_n: tokens and latents of a product tile; with block_m 1 no matrix instructions.
    m_tiles: token tiles of one product program, which loads its tile of W_UK once.
    rope_rows, cache_tokens: rows of [tokens * heads] and tokens of one rest program.
    rest_last: the rest programs come after the product programs in the grid."""

    block_m: int = 16
    block_n: int = 64
    m_tiles: int = 1
    rope_rows: int = 16
    cache_tokens: int = 1
    rest_last: bool = False
    num_warps: int = 4


class Row(NamedTuple):
    """The fastest plan of a GPU for batches of up to `tokens`. fp8: whether the query is."""

    gpu: str
    arch: str
    fp8: bool
    widths: Widths
    heads: int
    tokens: int
    plan: Plan


@functools.cache
def measured() -> list[Row]:
    """The rows of every file of `gpus/`."""
    files = sorted(FOLDER.glob("*.json"))
    return [row for path in files for row in parse(json.loads(path.read_bytes()))]


def parse(of: Any) -> list[Row]:
    """The rows of a file's content. Raises ValueError if it has another form."""
    try:
        sizes = 6 + len(dataclasses.fields(Plan))
        for row in of["plans"]:
            numbers = all(type(n) is bool or (type(n) is int and n > 0) for n in row[4:])
            if len(row) != sizes or not numbers:
                raise ValueError(f"no plan is {row}")
        return [
            Row(of["gpu"], of["arch"], query == "fp8", Widths(*sizes), heads, tokens, Plan(*plan))
            for query, *sizes, heads, tokens, plan in ((*row[:6], row[6:]) for row in of["plans"])
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from None


own: dict[str, list[Row]] = {}  # by GPU, of `prefer`


def prefer(name: str, rows: list[Row]) -> None:
    """Let these rows go before the shipped ones of a GPU for their own widths and heads, in this
    process."""
    own[name] = rows
    choose.cache_clear()
    _nearest.cache_clear()


def default_plan(tokens: int, heads: int, latent: int, arch: str = "") -> Plan:
    """A plan from the shape: tiles as tall as the batch, as many as fill a GPU of architecture
    `arch`."""
    if tokens == 1:
        return Plan(block_m=1, block_n=32, num_warps=2)
    block_m = min(64, max(16, next_power_of_two(tokens)))
    plan = Plan(block_m=block_m, cache_tokens=block_m // 8)
    if heads * latent * math.ceil(tokens / block_m) < 128 * 512:
        return plan
    plan = dataclasses.replace(plan, rope_rows=64, rest_last=True)
    if tokens <= TRITON.small_tiles.get(arch, 0):
        return dataclasses.replace(plan, cache_tokens=min(4, plan.cache_tokens))
    return dataclasses.replace(plan, block_n=128)


def fit(plan: Plan, depth: int, rotated: int, itemsize: int) -> Plan:
    """`plan` with smaller tiles where there are more than 128 elements of 16 bits to sum, or more
    than 64 rotated ones: by the excess factor, so that the operands fit the same shared memory
    (LDS), and a rotation the same registers. depth, rotated: P and R, padded to powers of two."""
    if rotated > 64:
        plan = dataclasses.replace(plan, rope_rows=max(1, plan.rope_rows * 64 // rotated))
    factor = max(1, depth * itemsize // 256)
    block_m = min(plan.block_m, max(16, plan.block_m // factor))  # 1 stays
    return dataclasses.replace(plan, block_m=block_m, block_n=max(16, plan.block_n // factor))


@functools.lru_cache(maxsize=64)
def _nearest(heads: int, fp8_query: bool, widths: Widths, here: Gpu) -> list[Row]:
    """The rows to choose from; empty if none was measured.

    Rows of `prefer` for these widths and heads go first. Else the rows of this GPU count, or of its
    architecture if it has none: those of the nearest widths, and of the nearest heads by ratio. The
    result is kept, because a warm-up asks for each number of tokens."""
    of = fp8_query, widths, heads
    if mine := [row for row in own.get(here.name, []) if (row.fp8, row.widths, row.heads) == of]:
        return mine

    def distance(row: Row) -> tuple[bool, float, float]:
        # Of widths plus 1, because R may be 0.
        ratios = ((a + 1) / (b + 1) for a, b in zip(widths, row.widths, strict=True))
        apart = sum(abs(math.log(ratio)) for ratio in ratios)
        return row.gpu != here.name, apart, abs(math.log(row.heads / heads))

    rows = [row for row in measured() if (row.arch, row.fp8) == (here.arch, fp8_query)]
    least = min(map(distance, rows), default=None)
    return [row for row in rows if distance(row) == least]


@functools.lru_cache(maxsize=4096)
def choose(tokens: int, heads: int, fp8_query: bool, widths: Widths, here: Gpu) -> Plan:
    """The plan for a batch of `tokens` and `heads`: by the nearest measurements, of which more
    tokens use the last row; without measurements by the shape."""
    if rows := _nearest(heads, fp8_query, widths, here):
        return min(rows, key=lambda row: (row.tokens < tokens, abs(row.tokens - tokens))).plan
    return default_plan(tokens, heads, widths.latent, here.arch)
