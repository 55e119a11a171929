"""Which launch computes the fused region: a plan per (tokens, heads, device), from measurements.

`dispatch_table.py` holds what `benchmarks/tune_dispatch.py` measured. Where nothing was measured
(another GPU, another shape) a default made from the shape alone is used. Nothing is tried out at
run time, so a captured graph and its warm-up always agree.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from mla_fusion.kernels import dispatch_table


@dataclasses.dataclass(frozen=True)
class Plan:
    """One configuration of `triton_kernels.prep_kernel`.

    mode: "one" launch, or "split": torch.bmm and a launch for the rest.
    block_m, block_n: tokens and latents of a product tile; block_m 1 sums products instead of
        using matrix instructions.
    m_tiles: token tiles one product program walks over with its tile of W_UK.
    rope_rows, cache_tokens: rows of [tokens * heads] and tokens of one rest program.
    rest_last: the rest programs come after the product programs in the grid.
    pdl: programmatic dependent launch (NVIDIA, compute capability 9 and later).
    """

    mode: str = "one"
    block_m: int = 16
    block_n: int = 64
    m_tiles: int = 1
    rope_rows: int = 16
    cache_tokens: int = 1
    rest_last: bool = False
    num_warps: int = 4
    num_stages: int = 2
    pdl: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("one", "split"):
            raise ValueError(f"mode must be 'one' or 'split', got {self.mode!r}")


def default_plan(tokens: int, heads: int) -> Plan:
    """A plan from the shape alone: tiles as tall as the batch, wide enough to fill a GPU."""
    if tokens == 1:
        return Plan(block_m=1, block_n=32, num_warps=2)
    block_m = min(64, max(16, 1 << (tokens - 1).bit_length()))
    wide = heads * math.ceil(tokens / block_m) >= 128
    return Plan(
        block_m=block_m,
        block_n=128 if wide else 64,
        rope_rows=64 if wide else 16,
        cache_tokens=min(8, max(1, block_m // 8)),
        rest_last=wide,
    )


def fit(plan: Plan, depth: int, itemsize: int) -> Plan:
    """`plan` with tiles small enough for a reduction `depth` and type it was not measured at.

    Plans are made for 128 elements of 16 bits: wider or deeper tiles shrink by the same factor,
    which keeps the operands within the same shared memory (LDS).
    """
    factor = max(1, depth * itemsize // 256)
    if factor == 1 or plan.mode == "split":
        return plan
    return dataclasses.replace(
        plan,
        block_m=plan.block_m if plan.block_m == 1 else max(16, plan.block_m // factor),
        block_n=max(16, plan.block_n // factor),
    )


@functools.lru_cache(maxsize=8)
def device_table(device: torch.device) -> str | None:
    """Name of the table measured on this device, else on its architecture, else None."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if name in dispatch_table.TABLE:
        return name
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    for name, entry in dispatch_table.TABLE.items():
        if entry["arch"] == arch:
            return name
    return None


@functools.lru_cache(maxsize=4096)
def choose(tokens: int, heads: int, fp8_query: bool, table: str | None) -> Plan:
    """The plan for a batch of `tokens` and `heads`, from `table` (see `device_table`).

    A head count that was not measured uses the nearest measured one by ratio; more tokens than
    measured use the last row.
    """
    if table is None:
        return default_plan(tokens, heads)
    rows = dispatch_table.TABLE[table]["fp8_query" if fp8_query else "activation_query"]
    nearest = min(rows, key=lambda measured: abs(math.log(measured / heads)))
    fields = next((row[1] for row in rows[nearest] if tokens <= row[0]), rows[nearest][-1][1])
    return Plan(**fields)


def representatives(
    max_tokens: int, heads: int, fp8_query: bool, table: str | None
) -> dict[Plan, int]:
    """Every plan that a bucket of 1 to `max_tokens` tokens can use, with a token count for it."""
    plans: dict[Plan, int] = {}
    for tokens in range(1, max_tokens + 1):
        plans.setdefault(choose(tokens, heads, fp8_query, table), tokens)
    return plans
