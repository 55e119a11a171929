"""Triton's amdgcn text as instructions, labels and the directives of its kernel descriptor."""

import dataclasses
import re

_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s*([a-z]+_\w+)\s*(.*)$")
_DIRECTIVE = re.compile(r"\s*(\.|$)")
_END = re.compile(r"\s*\.section|\.Lfunc_end")
# A modifier: name:value, name:[values], name(value) or a bare name.
_WORD = re.compile(r"\w+:\[[^\]]*\]|\w+:\w+\([^)]*\)|[^\s]+")
_SUFFIX = re.compile(r"_(e32|e64|sdwa|dpp)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction as it stands in the text; `line` is the number of its line there, from 1.
    name: without the suffix of its encoding.
    """

    line: int
    name: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A kernel: labels are indices into its instructions."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    directives: dict[str, int]
    arguments: tuple[tuple[int, int, str], ...]  # offset, size and kind, of the metadata


def parse(text):
    """The one kernel of an assembly text."""
    name = re.search(r"^\t\.globl\t(\w+)", text, re.MULTILINE)[1]
    instructions, labels, inside = [], {}, False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split(";")[0].rstrip()
        if line == name + ":":
            inside = True
        elif inside and _END.match(line):
            break
        elif inside and (label := _LABEL.match(line)):
            labels[label[1]] = len(instructions)
        elif inside and (found := _INSTRUCTION.match(line)):
            instructions.append(instruction(number, *found.groups()))
        elif inside and not _DIRECTIVE.match(line):
            raise ValueError(f"line {number} is no instruction, label or directive: {line!r}")
    directives = dict(re.findall(r"^\s*\.amdhsa_(\w+) (\d+)$", text, re.MULTILINE))
    arguments = re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", text)
    directives = {key: int(value) for key, value in directives.items()}
    arguments = tuple((int(offset), int(size), kind) for offset, size, kind in arguments)
    return Program(name, tuple(instructions), labels, directives, arguments)


def instruction(line, mnemonic, rest):
    """One instruction from its mnemonic and the rest of its line."""
    operands, modifiers = _split(rest)
    text = f"{mnemonic} {rest}".strip()
    return Instruction(line, _SUFFIX.sub("", mnemonic), tuple(operands), modifiers, text)


def _split(rest):
    """Operands, which commas separate, and modifiers, which follow the last one after spaces."""
    parts = [part.strip() for part in re.split(r",(?![^\[(]*[\])])", rest) if part.strip()]
    modifiers = {}
    if parts:
        words = _WORD.findall(parts[-1]) if "hwreg" not in parts[-1] else [parts[-1]]
        first = not re.match(r"[a-z]\w*:|lgkmcnt|vmcnt|expcnt|sc1", words[0])
        for word in words[first:]:
            key, _, value = word.partition(":")
            modifiers[key] = value
        parts[-1:] = words[:first]
    return parts, modifiers
