"""A roofline of the kernels for MI300X and MI355X, without a GPU: `python tools/amd_roofline.py`.

What the library launches is executed as in `tests/amd/`, which counts each instruction. The tables
of docs/amd.md say, in microseconds, how long each resource takes at least:

- matrix, vector: cycles of the SIMDs with such instructions;
- LDS, cache: bytes through LDS and through the vector cache, each access counted;
- memory: bytes that come from memory or go there, once each.

The roofline is the largest of them; it assumes perfect overlap. Nothing is assumed of a unit:

| what | source |
|---|---|
| passes of a matrix instruction, 4 cycles each | "AMD Instinct MI300" and "CDNA4" ISA, section 7, dense matrix instructions; `SISchedule.td` of LLVM, SIDPGFX942FullSpeedModel and SIDPGFX950FullSpeedModel |
| a vector instruction takes 4 cycles, a transcendental or a 32-bit multiplication 16 | ROCm Compute Profiler, "Pipeline descriptions"; `SISchedule.td`, WriteTrans32 and WriteQuarterRate32 |
| LDS moves 128 bytes a cycle and CU, the vector cache 64 | ROCm Compute Profiler, "Local data share", "Vector L1 cache" |
| 512 vector registers a lane and SIMD, in units of 8, at most 8 waves | both ISA documents, section 3 |
| CUs, clock, memory | data sheets of MI300X and MI355X |
"""  # noqa: E501

import dataclasses
import itertools
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mla_fusion.attention import triton as attention
from mla_fusion.kernels import dispatch
from mla_fusion.kernels import triton as regions
from tests.amd import decode as decodes
from tests.amd import execute
from tests.amd import region as region_cases
from tests.amd.provider import WRITABLE, launched

L, R, P = 512, 64, 128
LANES, SIMDS, REGISTERS, UNIT, MOST_WAVES = 64, 4, 512, 8, 8
LDS_BYTES, CACHE_BYTES = 128, 64  # a cycle and CU
# Passes of `v_mfma_f32_{side}x{side}x{depth}_{kind}` by (side, depth).
_HALF = {(16, 16): 4, (16, 32): 4, (32, 8): 8, (32, 16): 8}
PASSES = {
    "f32": {(16, 4): 8, (32, 2): 16},
    "bf16": _HALF,
    "f16": _HALF,
    "fp8_fp8": {(16, 32): 4, (32, 16): 8},
}
_MATRIX = re.compile(r"v_mfma_f32_(\d+)x\1x(\d+)_(\w+)")
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)(_iflag)?_f32|v_(mul_(lo|hi)|mad_[ui]64)_")
_WIDTH = re.compile(r"(?:load|store)_(?:dwordx(\d+)|(dword)|[us]?(byte|short))")
_LDS_WIDTH = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_[bui](\d+)")


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU: its CUs, cycles and bytes of memory a second, bytes of LDS of a CU."""

    name: str
    units: int
    clock: float
    bandwidth: float
    lds: int


GPUS = {
    "gfx942": Gpu("MI300X", 304, 2.1e9, 5.3e12, 64 * 1024),
    "gfx950": Gpu("MI355X", 256, 2.4e9, 8e12, 160 * 1024),
}


def count(instructions, counts):
    """What instructions cost that were executed so often: cycles of SIMDs with matrix and vector
    ones, bytes through LDS and cache, and products of the matrix instructions."""
    total = dict.fromkeys(("matrix", "vector", "LDS", "cache", "products"), 0.0)
    for given, times in zip(instructions, counts, strict=True):
        name = given.name
        if name.startswith("v_mfma"):
            side, depth, passes = _matrix(given)
            total["matrix"] += times * 4 * passes
            total["products"] += times * side * side * depth
        elif name.startswith("v_"):
            total["vector"] += times * (16 if _SLOW.match(name) else 4)
        elif name.startswith("ds_"):
            found = _LDS_WIDTH.match(name)
            total["LDS"] += times * LANES * (int(found[2]) // 8 << len(found[1]) if found else 4)
        elif name.startswith(("global_", "buffer_")) and (found := _WIDTH.search(name)):
            words, word, part = found.groups()
            width = 4 * int(words) if words else 4 if word else len(part) - 3
            total["cache"] += times * LANES * width
    return total


def _matrix(given):
    """Side, depth and passes of a matrix instruction."""
    found = _MATRIX.fullmatch(given.name)
    side, depth = (int(found[1]), int(found[2])) if found else (0, 0)
    passes = PASSES.get(found[3], {}).get((side, depth)) if found else None
    if passes is None:
        raise ValueError(
            f"line {given.line}: {given.name} has no known number of passes; add it to PASSES in "
            "tools/amd_roofline.py from the ISA document"
        )
    return side, depth, passes


def waves(kernel, gpu):
    """The waves a SIMD that fit, as whole workgroups on a CU."""
    allocated = math.ceil(kernel.program.directives["next_free_vgpr"] / UNIT) * UNIT
    groups = SIMDS * min(MOST_WAVES, REGISTERS // allocated) // kernel.warps
    if kernel.lds:
        groups = min(groups, gpu.lds // kernel.lds)
    return groups * kernel.warps / SIMDS


def executed(given, workgroups=None):
    """How often a launch, or its first workgroups alone, executes each instruction."""
    part = dataclasses.replace(given, grid=(workgroups, 1, 1) if workgroups else given.grid)
    outcome = execute.run(part, WRITABLE[given.kernel.program.name])
    assert not outcome.faults, outcome.first
    return outcome.counts


class Line:
    """A launch of which each instruction was executed `counts` times.

    memory: bytes; needed: products. seconds: of each bound. tail: how much longer the fullest CU
    works than the mean. repeats: matrix products done for each that is needed.
    """

    def __init__(self, shape, given, counts, memory, needed):
        kernel, gpu, number = given.kernel, GPUS[given.kernel.target], math.prod(given.grid)
        cost = count(kernel.program.instructions, counts)
        self.shape, self.waves = f"{gpu.name}, {shape}", waves(kernel, gpu)
        self.registers = kernel.program.directives["next_free_vgpr"]
        self.tail = math.ceil(number / gpu.units) * gpu.units / number - 1
        self.repeats = cost["products"] / needed
        rates = {"matrix": SIMDS, "vector": SIMDS, "LDS": LDS_BYTES, "cache": CACHE_BYTES}
        of_clock = (1 + self.tail) / gpu.units / gpu.clock
        self.seconds = {name: cost[name] / rate * of_clock for name, rate in rates.items()}
        self.seconds["memory"] = memory / gpu.bandwidth

    def share(self, bound):
        """How much of the roofline a bound is."""
        return self.seconds[bound] / max(self.seconds.values())

    def __str__(self):
        times = {name: f"{time * 1e6:.1f}" for name, time in self.seconds.items()}
        bold = [f"**{time}**" if self.share(name) == 1 else time for name, time in times.items()]
        cells = [self.shape, self.registers, f"{self.waves:g}", *bold, f"{self.tail:.0%}"]
        return f"| {' | '.join(map(str, cells))} | {self.repeats:.3g} |"


def _bytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def region(target, tokens, heads, other=False):
    """The fused region with an fp8 query and cache; `other`: with the plan of other GPUs."""
    given = region_cases.build(region_cases.case(target, tokens, heads, padded=()))
    with launched(target) as launches:
        plan = dispatch.default_plan(tokens, heads, L) if other else None
        regions.fused_mla_decode_prep(given, plan=plan)
    launch = launches[0]
    memory = _bytes(given.q, given.w_uk_t, given.kv_c, given.k_pe, given.q_out) + tokens * (L + R)
    plan = launch.constants["FORM"].plan
    name = f"{tokens} tokens, {heads} heads, tiles of {plan.block_m} x {plan.block_n}"
    return Line(name, launch, executed(launch), memory, tokens * heads * L * P)


def decode(target, heads, kind, portable=False):
    """The decode of 64 sequences of 8192 tokens; `portable`: by the kernel of other GPUs. A tile of
    keys costs every workgroup what it costs the first one."""
    sequences, length = 64, 8192
    given = decodes.made(target, heads, kind, sequences, length, units=GPUS[target].units)
    with decodes.kernel_of(portable), launched(target) as launches:
        attention.launch(given)
    launch, plan, blocks = launches[0], given.plan, launches[0].grid[1]
    work = plan.work_info_set[: int(plan.work_indptr[-1])]
    tiles = -((work[:, 4] - work[:, 5]) // launch.constants["BLOCK_N"])
    first = int(tiles[: plan.work_indptr[1]].sum())
    counts = executed(launch, 1) * (blocks * int(tiles.sum()) / first)
    splits = int(plan.reduce_indptr[sequences * plan.layout.fold])
    memory = splits * plan.layout.per_work * (L + 1) * 4 + _bytes(given.q, given.out)
    memory += sequences * length * (L + R) * given.kv_cache.element_size()
    needed = sequences * length * launch.constants["ROWS"] * blocks * plan.layout.fold * (2 * L + R)
    name = f"{heads} heads, {kind}{', the portable kernel' if portable else ''}"
    return Line(name, launch, counts, memory, needed)


HEAD = (
    "\n| {} | registers | waves a SIMD | matrix | vector | LDS | cache | memory | tail | repeats |"
    "\n|---|---|---|---|---|---|---|---|---|---|"
)

if __name__ == "__main__":
    print(HEAD.format("decode of 64 sequences of 8192 tokens"))
    for target, heads, kind in itertools.product(GPUS, (16, 128), ("fp8", "bf16")):
        print(decode(target, heads, kind))
    print(decode("gfx942", 16, "fp8", portable=True))
    print(HEAD.format("region, fp8"))
    for target, tokens in itertools.product(GPUS, (64, 256)):
        print(region(target, tokens, 128))
    print(region("gfx942", 64, 128, other=True))
