"""A static roofline of the kernels compiled for MI300X and MI355X. No GPU is needed.

    python tools/amd_roofline.py [KERNEL ...] [--target gfx942]

KERNEL is region, decode (with its reduction) or epilogue. What the library launches is compiled,
its instructions are counted (`amd_cost.py`), and a line says how long each resource takes at least:

| bound by | is |
|---|---|
| matrix, vector | cycles of the SIMDs with matrix or vector instructions |
| LDS, cache | bytes through LDS, and through the vector cache: each access counts |
| memory | bytes that have to come from memory or go there, once each |
| occupancy | a wave alone with its waits, for as many rounds as workgroups need |

The largest is the prediction: the others are taken to hide behind it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amd_cost import (
    CACHE_BYTES,
    GPUS,
    LDS_BYTES,
    SIMDS,
    Cost,
    Gpu,
    count,
    kinds,
    waves,
)

from mla_fusion.attention import triton as attention
from mla_fusion.attention import triton_choice
from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.validate import Inputs
from mla_fusion.kernels import triton as regions
from tests.amd import epilogue as epilogue_cases
from tests.amd import region as region_cases
from tests.amd.compile import Launch
from tests.amd.provider import launched
from tests.attention.decodes import BF16, plan_for, refresh
from tests.attention.epilogue_cases import make
from tests.kernels.compiled import FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

L, R, P = 512, 64, 128
BOUNDS = ("matrix", "vector", "LDS", "cache", "memory", "occupancy")
DECODES = ((16, "fp8", 64, 8192), (16, "bf16", 64, 8192), (128, "fp8", 64, 8192),
           (128, "bf16", 64, 8192), (16, "fp8", 4, 4096))  # fmt: skip
REGIONS = ((1, 16), (16, 16), (64, 16), (64, 128), (256, 128))  # tokens and heads


@dataclasses.dataclass(frozen=True)
class Group:
    """Workgroups of one kind: how many, and what a wave of them costs."""

    number: float
    cost: Cost


@dataclasses.dataclass(frozen=True)
class Line:
    """A kernel at a shape. seconds: of each of `BOUNDS`. tail: how much longer the fullest CU works
    than the mean. repeats: matrix products done for each that is needed; 0 if none is."""

    kernel: str
    shape: str
    gpu: Gpu
    registers: int
    waves: float
    instructions: dict[str, float]
    seconds: dict[str, float]
    tail: float
    repeats: float

    @property
    def winner(self) -> str:
        """The bound that takes longest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def share(self, bound: str) -> float:
        """How much of the predicted time a bound is."""
        return self.seconds[bound] / self.seconds[self.winner]

    def __str__(self) -> str:
        times = " ".join(f"{self.seconds[name] * 1e6:8.1f}" for name in BOUNDS)
        return (
            f"{self.gpu.name:8}{self.kernel:10} {self.shape:24}{self.registers:5} {self.waves:5.1f}"
            f" {times}  {self.winner:10}{self.share('memory'):5.0%} {self.tail:5.0%}"
            f" {self.repeats:5.2f}"
        )


HEAD = (
    f"{'':8}{'kernel':10} {'shape':24}{'regs':>5} {'waves':>5} "
    + " ".join(f"{name:>8}" for name in BOUNDS)
    + f"  {'wins':10}{'mem':>5} {'tail':>5} {'reps':>5}"
)


def line(
    name: str, shape: str, given: Launch, groups: Sequence[Group], memory: float, products: float
) -> Line:
    """The roofline of a launch. memory: bytes; products: multiplications that it needs."""
    kernel, gpu = given.kernel, GPUS[given.kernel.target]
    fit, of_simd = waves(kernel, gpu)
    number = sum(group.number for group in groups)

    def total(field: str) -> float:
        return sum(group.number * kernel.warps * getattr(group.cost, field) for group in groups)

    most = math.ceil(number / gpu.units)
    tail = most * gpu.units / number - 1
    cycles = {
        "matrix": total("matrix") / SIMDS,
        "vector": total("vector") / SIMDS,
        "LDS": total("lds") / LDS_BYTES,
        "cache": total("moved") / CACHE_BYTES,
    }
    # As many as fit run side by side, and those of the fullest CU one round after the other.
    seconds = {key: value / gpu.units * (1 + tail) / gpu.clock for key, value in cycles.items()}
    seconds["memory"] = memory / gpu.bandwidth
    longest = max(group.cost.latency for group in groups)
    seconds["occupancy"] = math.ceil(most / fit) * longest / gpu.clock
    shown = groups[0].cost.instructions
    done = total("products")
    return Line(
        name, shape, gpu, kernel.program.directives["next_free_vgpr"], of_simd, shown, seconds,
        tail, done / products if products else 0.0,
    )  # fmt: skip


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def region(target: str, tokens: int, heads: int, **plan: Any) -> Line:
    """The fused region with an fp8 query and cache."""
    call = region_cases.build(region_cases.case(target, tokens, heads, padded=()))
    with launched(target) as launches:
        regions.fused_mla_decode_prep(call.inputs, **plan)
    (given,), inputs = launches, call.inputs
    program, gpu = given.kernel.program, GPUS[target]
    options = given.constants
    rest = -(-tokens // options["CACHE_TOKENS"]) + -(-tokens * heads // options["ROPE_ROWS"])
    costs = [count(program, gpu, only=kind) for kind in kinds(program)]
    # A program of the product reads W_UK, more than any other reads.
    costs.sort(key=lambda cost: (cost.products, cost.moved))
    groups = [Group(given.grid[0] - rest, costs[-1])]
    groups.append(Group(rest, max(costs[:-1] or costs, key=lambda cost: cost.latency)))
    memory = _bytes(inputs.q, inputs.w_uk_t, inputs.kv_c, inputs.k_pe, inputs.q_out)
    memory += tokens * (L + R)
    needed = tokens * heads * L * P if costs[-1].products else 0
    return line("region", f"T={tokens} H={heads} fp8", given, groups, memory, needed)


def decode_inputs(target: str, heads: int, kind: str, sequences: int, length: int) -> Inputs:
    """A decode of `sequences` times `length` tokens: a plan, and tensors without memory."""
    types = {"fp8": FP8[target], "bf16": BF16, "cache": FP8[target]}
    query = BF16 if kind == "cache" else types[kind]

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    properties = SimpleNamespace(multi_processor_count=GPUS[target].units)
    with (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.version, "hip", "7.0"),
        mock.patch.object(triton_choice, "architecture", lambda device: target),
    ):
        settings = attention.plan_settings(heads, 1, types[kind], L + R, "cuda")
    plan = plan_for(
        max_batch=sequences, num_heads=heads, q_dtype=query, kv_dtype=types[kind], v_head_dim=L,
        **settings,
    )  # fmt: skip
    refresh(plan, [1] * sequences, [length] * sequences)
    one = torch.ones(1)
    return Inputs(
        meta(sequences, heads, L + R, dtype=query),
        meta(sequences * length // 64, 64, L + R, dtype=types[kind]),
        plan,
        meta(sequences, length // 64, dtype=torch.int32),
        0.1,
        one,
        one,
        meta(sequences, heads, L, dtype=BF16),
        meta(sequences, heads, dtype=torch.float32),
    )


def decode(target: str, *shape: Any) -> Iterator[Line]:
    """The decode kernel, and the reduction behind it."""
    heads, kind, sequences, length = shape
    inputs = decode_inputs(target, *shape)
    with launched(target) as launches:
        attention.launch(inputs)
    first, second = launches
    plan, gpu, name = inputs.plan, GPUS[target], f"{sequences}x{length} H={heads} {kind}"
    tile, rows = first.constants["BLOCK_N"], first.constants["ROWS"]
    begin, end = plan.work_info_set[:, 4], plan.work_info_set[:, 5]
    indptr = plan.work_indptr.tolist()
    tiles = [int(-(-(end[i] - begin[i]) // tile)) for i in range(indptr[-1])]
    of_worker = [tiles[a:b] for a, b in itertools.pairwise(indptr) if b > a]
    most = max(of_worker, key=sum)
    # Every worker costs what the mean one does; the largest takes longest.
    mean = sum(map(sum, of_worker)) / len(of_worker)
    cost = count(first.kernel.program, gpu, (len(most), sum(most) / len(most)))
    scale = mean / sum(most)
    for field in ("matrix", "vector", "lds", "moved", "products"):
        setattr(cost, field, getattr(cost, field) * scale)
    pieces = int(plan.reduce_indptr[sequences * plan.fold])
    partials = pieces * plan.heads_per_work * (L + 1) * 4
    memory = _bytes(inputs.kv_cache, inputs.q, inputs.out) + partials
    groups = [Group(len(of_worker) * first.grid[1], cost)]
    needed = sequences * length * rows * first.grid[1] * plan.fold * (2 * L + R)
    yield line("decode", name, first, groups, memory, needed)
    each = pieces / (sequences * plan.fold)
    trips = (max(1.0, each / second.constants["PIECES"]),)
    merged = [Group(math.prod(second.grid), count(second.kernel.program, gpu, trips))]
    yield line("reduction", name, second, merged, partials + _bytes(inputs.out), 0)


def epilogue(target: str, sequences: int, heads: int, pieces: int) -> Line:
    """The epilogue in one launch: merge and product with W_UV."""
    shape = epilogues.choose(sequences, heads, L, P)
    assert shape is not None, "the library launches this one in parts"
    given = epilogue_cases.case(
        shape, rows=(1,) * sequences, pieces=(pieces,) * sequences, heads=heads
    )
    _, inputs = make(given)
    with launched(target) as launches:
        epilogues.launch(inputs, shape)
    first = launches[0]
    trips = (math.ceil(pieces / shape.pieces),)
    groups = [Group(math.prod(first.grid), count(first.kernel.program, GPUS[target], trips))]
    assert inputs.epilogue is not None
    memory = _bytes(inputs.epilogue.w_uv, inputs.epilogue.out)
    memory += sequences * heads * pieces * (L + 1) * 4
    name = f"{sequences} rows H={heads} {pieces} pieces"
    return line("epilogue", name, first, groups, memory, sequences * heads * L * P)


KERNELS: dict[str, Callable[[str], Iterator[Line]]] = {
    "region": lambda target: (region(target, *shape) for shape in REGIONS),
    "decode": lambda target: (each for shape in DECODES for each in decode(target, *shape)),
    "epilogue": lambda target: (epilogue(target, *shape) for shape in ((1, 16, 16), (4, 16, 4))),
}


def main() -> None:
    """Print a line for each kernel, shape and GPU."""
    parser = argparse.ArgumentParser(description="Static roofline of the kernels for AMD GPUs.")
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--target", choices=[*GPUS], action="append")
    given = parser.parse_args()
    if unknown := set(given.kernels) - {*KERNELS}:
        parser.error(f"unknown kernel {', '.join(unknown)}: choose from {', '.join(KERNELS)}")
    print(HEAD + "\n" + "-" * len(HEAD))
    for name in given.kernels or KERNELS:
        for target in given.target or GPUS:
            for each in KERNELS[name](target):
                print(each)


if __name__ == "__main__":
    main()
