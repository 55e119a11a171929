"""What a wave of a kernel for gfx942 or gfx950 costs: cycles of each unit, counted in its assembly.

Sources of the tables:

| what | source |
|---|---|
| passes of a matrix instruction, 4 cycles each | "AMD Instinct MI300" and "CDNA4" ISA, section 7, dense matrix instructions; `SISchedule.td` of LLVM, SIDPGFX942FullSpeedModel and SIDPGFX950FullSpeedModel |
| a vector instruction of 64 lanes on 16 takes 4 cycles, a transcendental or a 32-bit multiplication 16 | ROCm Compute Profiler, "Pipeline descriptions"; `SISchedule.td`, WriteTrans32 and WriteQuarterRate32 |
| LDS moves 128 bytes a cycle and CU, the vector cache 64 | ROCm Compute Profiler, "Local data share", "Vector L1 cache" |
| 512 vector registers a lane and SIMD, in units of 8, at most 8 waves | both ISA documents, section 3 |
| CUs, clock, memory | data sheets of MI300X and MI355X |

Assumed, as no document has them: from a load to its value 1 us where all CUs load, 0.3 us for a
scalar load, whose words others have read before, and 128 cycles from LDS.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from tests.amd.assembly import Instruction, Program
    from tests.amd.compile import Kernel

    # An instruction's index, and what is known of flags there.
    Place: TypeAlias = tuple[int, frozenset[tuple[str, bool]]]

LANES, SIMDS, REGISTERS, UNIT, MOST_WAVES = 64, 4, 512, 8, 8
LDS_BYTES, CACHE_BYTES = 128, 64  # a cycle and CU
MEMORY_SECONDS, SCALAR_SECONDS, LDS_CYCLES = 1e-6, 3e-7, 128
# Passes of `v_mfma_f32_{side}x{side}x{depth}_{kind}` by (side, depth).
PASSES = {
    "f32": {(16, 4): 8, (32, 2): 16},
    "bf16": {(16, 16): 4, (16, 32): 4, (32, 8): 8, (32, 16): 8},
    "f16": {(16, 16): 4, (16, 32): 4, (32, 8): 8, (32, 16): 8},
    "fp8_fp8": {(16, 32): 4, (32, 16): 8},
}
_MATRIX = re.compile(r"v_mfma_f32_(\d+)x\1x(\d+)_(\w+)")
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)(_iflag)?_f32|v_(mul_(lo|hi)|mad_[ui]64)_")
_WIDTH = re.compile(r"(?:load|store)_(?:dwordx(\d+)|(dword)|[us]?(byte|short))")
_LDS_WIDTH = re.compile(r"ds_(?:read|write)(2?)(?:st64)?_[bui](\d+)")
_NO_RESULT = ("s_nop", "s_waitcnt", "s_barrier", "s_setprio", "s_sleep", "s_setreg")
_VECTORS = re.compile(r"([va])(?:(\d+)$|\[(\d+):(\d+)\])")


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


@dataclasses.dataclass
class Cost:
    """Of one wave. matrix, vector: cycles of its SIMD. lds, moved: bytes through LDS and the vector
    cache. products: multiplications of its matrix instructions. latency: cycles that it takes
    alone. Instructions: how many of the matrix, vector, LDS and global memory kind, and barriers.
    """

    matrix: float = 0
    vector: float = 0
    lds: float = 0
    moved: float = 0
    products: float = 0
    latency: float = 0
    instructions: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, given: Instruction, times: float) -> None:
        """Count an instruction that is executed `times` times."""
        kind, amount = classified(given)
        self.instructions[kind] = self.instructions.get(kind, 0) + times
        if kind in ("matrix", "vector", "lds"):
            setattr(self, kind, getattr(self, kind) + times * amount)
        elif kind == "global":
            self.moved += times * amount
        if kind == "matrix":
            side, depth, _ = _matrix(given)
            self.products += times * side * side * depth


def _matrix(given: Instruction) -> tuple[int, int, int]:
    """Side, depth and passes of a matrix instruction."""
    found = _MATRIX.fullmatch(given.name)
    side, depth = (int(found[1]), int(found[2])) if found else (0, 0)
    passes = PASSES.get(found[3], {}).get((side, depth)) if found else None
    if passes is None:
        raise ValueError(
            f"line {given.line}: {given.name} has no known number of passes; add it to PASSES in "
            "tools/amd_cost.py from the ISA document"
        )
    return side, depth, passes


def classified(given: Instruction) -> tuple[str, float]:
    """The unit of an instruction, and what it costs there: cycles, or bytes of memory."""
    name = given.name
    if name.startswith("v_mfma"):
        return "matrix", 4 * _matrix(given)[2]
    if name.startswith("v_"):
        return "vector", 16 if _SLOW.match(name) else 4
    if name.startswith("ds_"):
        return "lds", LANES * (_lds_width(name) if _LDS_WIDTH.match(name) else 4)
    if name.startswith(("global_", "buffer_")) and (found := _WIDTH.search(name)):
        words, word, part = found.groups()
        return "global", LANES * (4 * int(words) if words else 4 if word else len(part) - 3)
    return {"s_barrier": "barrier"}.get(name, "other"), 0


def _lds_width(name: str) -> float:
    pair, bits = _LDS_WIDTH.match(name).groups()  # type: ignore[union-attr]
    return int(bits) / 8 * (2 if pair else 1)


def followers(program: Program) -> list[list[int]]:
    """Which instructions may follow each."""
    code = program.instructions
    found = []
    for index, each in enumerate(code):
        ways = [program.labels[each.operands[0]]] if "branch" in each.name else []
        if each.name not in ("s_branch", "s_endpgm"):
            ways.append(index + 1)
        found.append([way for way in ways if way < len(code)])
    return found


def loops(program: Program) -> list[tuple[int, int]]:
    """(first, last) instruction of each natural loop, one for all jumps back to one header; LLVM
    puts some blocks of a loop in front of its header."""
    after = followers(program)
    before: list[list[int]] = [[] for _ in after]
    for index, ways in enumerate(after):
        for way in ways:
            before[way].append(index)
    # Bit j of dominators[i]: every way from the entry to i goes through j.
    everything = (1 << len(after)) - 1
    dominators = [1] + [everything] * (len(after) - 1)
    changed = True
    while changed:
        changed = False
        for index in range(1, len(after)):
            common = everything
            for way in before[index]:
                common &= dominators[way]
            common |= 1 << index
            changed |= common != dominators[index]
            dominators[index] = common
    bodies: dict[int, set[int]] = {}
    for index, ways in enumerate(after):
        for header in ways:
            if dominators[index] >> header & 1:
                body, left = bodies.setdefault(header, {header}), [index]
                while left:
                    at = left.pop()
                    if at not in body:
                        body.add(at)
                        left += before[at]
    found = [(min(body), max(body)) for body in bodies.values()]
    return sorted(found, key=lambda loop: (loop[0], -loop[1]))


def kinds(program: Program) -> list[list[bool]]:
    """Which instructions programs execute that take different ways: for each store that is not on
    a way of an earlier one, those on a way from the entry to the end through it."""
    code = program.instructions
    after = _ways(program)
    before: dict[Place, list[Place]] = {}
    for place, nexts in after.items():
        for each in nexts:
            before.setdefault(each, []).append(place)
    found: list[list[bool]] = []
    for index, each in enumerate(code):
        is_store = re.match("(global|buffer)_(store|atomic)", each.name)
        if is_store and not any(kind[index] for kind in found):
            starts = [place for place in after if place[0] == index]
            reached = _reached(after, starts) | _reached(before, starts)
            found.append([at in reached for at in range(len(code))])
    return found


def _reached(ways: dict[Place, list[Place]], starts: list[Place]) -> set[int]:
    left, seen = list(starts), set(starts)
    while left:
        for place in ways.get(left.pop(), ()):
            if place not in seen:
                seen.add(place)
                left.append(place)
    return {index for index, _ in seen}


def _ways(program: Program) -> dict[Place, list[Place]]:
    """What follows an instruction, with what is known of the flags that LLVM leaves in scalar
    registers on one way to tell it from another where both have joined."""
    code, ways = program.instructions, {}
    left: list[Place] = [(0, frozenset())]
    while left:
        place = left.pop()
        if place in ways:
            continue
        index, flags = place
        each = code[index]
        known = dict(flags)
        nexts = [] if each.name in ("s_branch", "s_endpgm") else [index + 1]
        if "branch" in each.name:
            target = program.labels[each.operands[0]]
            condition = re.fullmatch("s_cbranch_(scc|vcc)(n?z|[01])", each.name)
            value = known.get(condition[1]) if condition else None
            jumps = None if value is None else value == (condition[2] in ("nz", "1"))  # type: ignore[index]
            nexts = [target] if jumps else nexts if jumps is False else [target, *nexts]
        else:
            _learn(each, known)
        ways[place] = [(at, frozenset(known.items())) for at in nexts if at < len(code)]
        left += ways[place]
    return ways


def _learn(given: Instruction, known: dict[str, bool]) -> None:
    """Note what an instruction leaves in a flag: whether a pair of registers is zero (False) or all
    ones, or the lanes that such a one selects; whether a register is 0 or 1; and SCC."""
    name, words = given.name, given.operands
    if not words or not name.startswith(("s_", "v_cmp", "v_readfirst")):
        return
    if name.startswith(_NO_RESULT):
        return
    result, scc = None, None
    if name == "s_mov_b64" and words[1] in ("0", "-1"):
        result = words[1] == "-1"
    elif name in ("s_and_b64", "s_andn2_b64") and "exec" in words[1:]:
        flag = known.get(next((word for word in words[1:] if word != "exec"), ""))
        result = flag if flag is None or name == "s_and_b64" else not flag
        scc = result
    elif name == "s_cselect_b32" and words[1:] == ("1", "0"):
        result = known.get("scc")
    elif name in ("s_cmp_lg_u32", "s_cmp_eq_u32") and words[1] == "1":
        flag = known.get(words[0])
        scc = None if flag is None else flag == (name == "s_cmp_eq_u32")
    changed = {"scc": scc}
    if name.startswith(("s_mov", "s_cselect", "s_load", "v_")):
        changed.pop("scc")
    if not name.startswith("s_cmp"):
        for each in [each for each in known if _overlap(each, words[0])]:
            del known[each]
        changed[words[0]] = result
    for each, value in changed.items():
        known.pop(each, None)
        if value is not None:
            known[each] = value


def _overlap(one: str, other: str) -> bool:
    spans = [re.fullmatch(r"s(?:(\d+)|\[(\d+):(\d+)\])", word) for word in (one, other)]
    if not all(spans):
        return one == other
    (a, b), (c, d) = ((int(s[1] or s[2]), int(s[1] or s[3])) for s in spans)  # type: ignore[index]
    return a <= d and c <= b


def count(
    program: Program, gpu: Gpu, trips: Sequence[float] = (), only: Sequence[bool] | None = None
) -> Cost:
    """The cost of one wave.

    trips: how often a loop runs for each run of the loop around it, from the outermost in. A loop
    that is nested deeper than that runs once; both sides of a branch count. only: which
    instructions count.
    """
    nest = loops(program)
    code = program.instructions
    total, times = Cost(), [1.0] * len(code)
    depth = [0] * len(code)
    for first, last in nest:
        for index in range(first, last + 1):
            if depth[index] < len(trips):
                times[index] *= trips[depth[index]]
            depth[index] += 1
    for index, each in enumerate(code):
        if only is None or only[index]:
            total.add(each, times[index])
    wave = Wave(gpu)
    for index, weight in _trace(times, nest, len(code)):
        if only is None or only[index]:
            wave.step(code[index], weight)
    total.latency = wave.elapsed
    return total


def _trace(
    times: list[float], nest: list[tuple[int, int]], end: int
) -> Iterator[tuple[int, float]]:
    """Instructions in order, a loop twice: its first run, and one that stands for all others."""
    # A loop jumps past its end only out of it, and the innermost comes last.
    starts = dict(nest)

    def walk(first: int, last: int, scale: float, inside: int) -> Iterator[tuple[int, float]]:
        at = first
        while at <= last:
            if at in starts and at != inside and starts[at] <= last:
                runs = times[starts[at]] / (times[inside] if inside >= 0 else 1)
                yield from walk(at, starts[at], scale * min(1, runs), at)
                if runs > 1:
                    yield from walk(at, starts[at], scale * (runs - 1), at)
                at = starts[at] + 1
            else:
                yield at, scale
                at += 1

    yield from walk(0, end - 1, 1.0, -1)


class Wave:
    """One wave alone on its SIMD, which issues in order and waits for what it reads."""

    def __init__(self, gpu: Gpu) -> None:
        self.now, self.elapsed = 0.0, 0.0
        self.clock = gpu.clock
        self.ready: dict[tuple[str, int], float] = {}
        self.matrix_free = 0.0
        self.queues: dict[str, list[float]] = {"vmcnt": [], "lgkmcnt": []}

    def step(self, given: Instruction, weight: float) -> None:
        """Issue an instruction; the time it adds counts `weight` times."""
        before = self.now
        self._issue(given)
        self.elapsed += weight * (self.now - before)

    def _issue(self, given: Instruction) -> None:
        kind, amount = classified(given)
        if given.name == "s_waitcnt":
            self._wait(given)
            return
        touched = [each for operand in given.operands for each in _registers(operand)]
        for each in touched:
            self.now = max(self.now, self.ready.get(each, 0.0))
        results = _registers(given.operands[0]) if given.operands else []
        if kind == "matrix":
            self.now = max(self.now, self.matrix_free)
            self.matrix_free = self.now + amount
            # A product may add to the sums of the one before it as soon as that has ended.
            self.ready |= dict.fromkeys(results, self.matrix_free)
            self.now += 4
        elif kind == "global":
            self.queues["vmcnt"].append(self.now + MEMORY_SECONDS * self.clock)
            self.now += max(4.0, amount / CACHE_BYTES)
        elif kind == "lds":
            self.now += max(4.0, amount / LDS_BYTES)
            self.queues["lgkmcnt"].append(self.now + LDS_CYCLES)
        else:
            if given.name.startswith("s_load"):
                self.queues["lgkmcnt"].append(self.now + SCALAR_SECONDS * self.clock)
            self.now += amount or 4

    def _wait(self, given: Instruction) -> None:
        for name, queue in self.queues.items():
            for word in (*given.operands, *given.modifiers):
                if found := re.fullmatch(rf"{name}\((\d+)\)", word):
                    done = queue[: len(queue) - int(found[1])]
                    self.now = max([self.now, *done])
                    del queue[: len(done)]


def _registers(operand: str) -> list[tuple[str, int]]:
    found = _VECTORS.match(operand)
    if found is None:
        return []
    first = int(found[2] or found[3])
    return [(found[1], n) for n in range(first, int(found[4] or first) + 1)]


def waves(kernel: Kernel, gpu: Gpu) -> tuple[int, float]:
    """Workgroups that fit a CU, and the waves a SIMD that they are."""
    allocated = math.ceil(kernel.program.directives["next_free_vgpr"] / UNIT) * UNIT
    of_simd = min(MOST_WAVES, REGISTERS // allocated)
    groups = SIMDS * of_simd // kernel.warps
    if kernel.lds:
        groups = min(groups, gpu.lds // kernel.lds)
    return groups, groups * kernel.warps / SIMDS
