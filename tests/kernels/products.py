"""Asynchronous matrix products in Hopper's machine code, and what touches their registers early.

A product reads and writes registers until the warps have waited for it (`WARPGROUP.DEPBAR`). That
nothing else does so meanwhile, spilled words included, is the compiler's matter. So is what a warp
has loaded when it gives shared memory back: loads end when their scoreboard is waited for.
"""

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import triton

NO_SCOREBOARD = 7
# What has no result in its first operand.
STORES = ("ST", "RED", "SYNCS.ARRIVE", "SYNCS.EXCH", "BAR", "UT", "MEMBAR", "WARPGROUP")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its name, operands, and the instructions that may follow, by number.

    scoreboard: that its result ends. waits: a bit for each scoreboard that it waits for.
    """

    name: str
    operands: str
    follows: tuple[int, ...]
    predicate: str = ""
    scoreboard: int = NO_SCOREBOARD
    waits: int = 0

    def __str__(self):
        return f"{self.predicate} {self.name} {self.operands}".strip()


def disassemble(cubin):
    """The instructions of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-hex", "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read(text[text.index(".section\t.text.") :])


def read(text):
    """The instructions in the text of nvdisasm -hex. Bits 105 and on of the 128 are for waits."""
    found, labels = [], {}
    line = r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;.*\n.*/\* 0x([0-9a-f]{16}) \*/"
    for label, plain, control in re.findall(line, text, re.MULTILINE):
        if label:
            labels[label] = len(found)
        else:
            predicate, name, operands = re.match(r"(@!?U?P\w+ +)?(\S+)\s*(.*)", plain).groups("")
            found.append((predicate.strip(), name, operands.strip(), int(control, 16) >> 41))
    code = []
    for number, (predicate, name, operands, control) in enumerate(found):
        follows = [labels[each] for each in re.findall(r"\.L_x_\d+", operands) if name[:2] == "BR"]
        if predicate or name not in ("BRA", "BRX", "EXIT"):
            follows.append(number + 1)
        inside = tuple(each for each in follows if each < len(found))
        waits, scoreboard = control >> 11 & 63, control >> 5 & 7
        code.append(Instruction(name, operands, inside, predicate, scoreboard, waits))
    return code


def size(name, is_result):
    """Registers of an operand, by an instruction's name."""
    if wide := re.match(r"(?:LDSM|STSM)\S*\.(\d)$", name):
        return int(wide[1])
    if ".128" in name:
        return 4
    pair = ".64" in name or (name.startswith("CS2R") and ".32" not in name)
    return 2 if (pair and not name.startswith("SYNCS")) or (is_result and ".WIDE" in name) else 1


def touched(instruction):
    """Registers that an instruction other than a product reads, and those that it writes."""
    reads, writes, name = set(), set(), instruction.name
    for place, operand in enumerate(instruction.operands.split(",")):
        result = place == 0 and not name.startswith(STORES)
        address = "[" in operand
        for number, pair in re.findall(r"(?<!\w)R(\d+)(\.64)?", operand):
            count = 2 if pair or ".WIDE" in name else 1
            if not address and (result or name.startswith("ST")):
                count = size(name, result)
            registers = set(range(int(number), int(number) + count))
            (writes if result and not address else reads).update(registers)
    return reads, writes


def product(instruction):
    """Registers of a product's sums and of its left operand, and whether it ends a group."""
    sums, left = instruction.operands.split(",")[:2]
    columns, first = int(re.search(r"64x(\d+)x", instruction.name)[1]), int(sums[1:])
    values = re.match(r"\s*R(\d+)", left)
    begin = int(values[1]) if values else 0
    return (
        frozenset(range(first, first + columns // 2)),
        frozenset(range(begin, begin + 4) if values else ()),
        "gsb0" in instruction.operands,
    )


def registers(state, instruction):
    """What is wrong with an instruction in a state, and the state behind it.

    state: registers written since `WARPGROUP.ARRIVE`, None before any for the next products; sums
    and left operands of each group of products that is under way.
    """
    written, groups, group = state
    name, wrong = instruction.name, []
    flying = (*groups, group) if group else groups
    sums, left = (frozenset().union(*(each[i] for each in flying)) for i in (0, 1))
    if re.match(r"[HQ]GMMA", name):
        more, values, ends = product(instruction)
        if written is None or written & (more | values):
            wrong.append("registers change behind WARPGROUP.ARRIVE, or there is none")
        if values & sums or more & left:
            wrong.append("the sums of one are the left operand of another")
        group = (group[0] | more, group[1] | values) if group else (more, values)
        if ends:
            written, groups, group = None, (*groups, group), None
    elif name == "WARPGROUP.ARRIVE":
        written = frozenset()
    elif name.startswith("WARPGROUP.DEPBAR"):
        left_over = int(instruction.operands.split(",")[1], 16)
        groups = groups[max(0, len(groups) - left_over) :]
    else:
        reads, writes = touched(instruction)
        if reads & sums or writes & (sums | left):
            wrong.append("it touches registers of products under way")
        written = None if written is None else written | (writes & frozenset(range(256)))
    return wrong, (written, groups, group)


def loads(loading, instruction):
    """Whether an instruction arrives at an mbarrier under loads of matrices, and the loads' state.

    Loads from shared memory end in order: one without a scoreboard has that of the next.
    """
    name, scoreboard = instruction.name, instruction.scoreboard
    loading = frozenset(each for each in loading if not instruction.waits >> each & 1)
    wrong = ["matrices are being loaded"] if name.startswith("SYNCS.ARRIVE") and loading else []
    if name.startswith("LDS") and NO_SCOREBOARD in loading:
        loading = loading - {NO_SCOREBOARD} | {scoreboard}
    if name.startswith("LDSM"):
        loading |= {scoreboard}
    return wrong, loading


def walk(code, state, step):
    """What `step` finds wrong with the instructions on any path from a state at the first."""
    todo, seen, found = [(0, state)], set(), set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        number, state = place
        wrong, state = step(state, code[number])
        found |= {f"{number}: {code[number]}: {each}" for each in wrong}
        todo += [(each, state) for each in code[number].follows]
    return sorted(found)


def touched_early(code):
    """Instructions that touch registers of products under way, and why."""
    return walk(code, (None, (), None), registers)


def given_back_early(code):
    """Arrivals at an mbarrier while matrices from shared memory are still being loaded."""
    return walk(code, frozenset(), loads)
