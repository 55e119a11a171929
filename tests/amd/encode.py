"""Instructions of the text as the structures of machine/state.h."""

import functools
import re
import struct

from tests.amd import build
from tests.amd.operations import BRANCHES, FORMULAS, NUMBERS, SPECIAL

SCC, ACCUMULATORS = 128, 512
_SCALARS = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126,
            "exec_hi": 127, "scc": SCC, "src_scc": SCC}  # fmt: skip
_NOTHING, _SCALAR, _VECTOR, _CONSTANT = range(4)
_INVERSE_TWO_PI = 0x3E22F983
_SELECTIONS = {"DWORD": 0, "BYTE_0": 1, "BYTE_1": 2, "BYTE_2": 3, "BYTE_3": 4, "WORD_0": 5,
               "WORD_1": 6}  # fmt: skip
# DPP controls, in the order of the enumeration in machine/lanes.h.
_DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror",
        "row_bcast:15", "row_bcast:31", "row_newbcast")  # fmt: skip
_VECTORS_OF_BITS = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
# Modifiers that say nothing here: the operand shows "offen", and no scope matters to workgroups
# that run one after the other.
_SILENT = {"offen", "nt", "sc0", "sc1"}


class UnknownInstruction(NotImplementedError):
    """The text has something that the machine does not execute."""


Operand = build.structure("Operand")
Instruction = build.structure("Instruction", Operand=Operand)


@functools.cache
def program(parsed):
    """An array of `Instruction` from an `assembly.Program`; it is shared: do not change it."""
    encoded = (Instruction * len(parsed.instructions))()
    for index, each in enumerate(parsed.instructions):
        encoded[index] = encode(each, parsed.labels)
    return encoded


def encode(given, labels):
    """One instruction; raises `UnknownInstruction` for one that the tables do not have."""
    name = given.name
    if "clamp" in given.modifiers:
        name += " clamp"
    at = f"line {given.line}, `{given.text}`: the executor"
    if name not in NUMBERS:
        raise UnknownInstruction(
            f"{at} does not know {name}: add its formula to tests/amd/machine/formulas.txt, or a "
            "function in tests/amd/machine/ and its row to tests/amd/operations.py"
        )
    result = Instruction(operation=NUMBERS[name], line=given.line)
    modifiers = {key: value for key, value in given.modifiers.items() if key != "clamp"}
    try:
        _operands(result, name, given, labels, modifiers)
        _modifiers(result, name, modifiers)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise UnknownInstruction(
            f"{at} knows {name}, but not this form: extend tests/amd/encode.py "
            f"({type(error).__name__}: {error})"
        ) from error
    if modifiers:
        raise UnknownInstruction(
            f"{at} knows {name}, but not the modifiers {modifiers}: extend tests/amd/encode.py and "
            "the reading of operands in tests/amd/machine/lanes.h"
        )
    return result


def _operands(result, name, given, labels, modifiers):
    texts = list(given.operands)
    if name in BRANCHES:
        result.immediate = labels[texts.pop()]
    elif name == "s_waitcnt":
        result.immediate = _counts(modifiers)
    elif name in ("s_nop", "s_sleep", "s_setprio"):
        texts.clear()
    elif name == "s_setreg_imm32_b32":
        offset, size = re.fullmatch(r"hwreg\(HW_REG_MODE, (\d+), (\d+)\)", texts[0]).groups()
        result.offset[:] = int(offset), int(size)
        result.immediate = int(texts[1], 0)
        texts.clear()
    elif name in SPECIAL:
        special = SPECIAL[name]
        result.size, result.format = special.size, special.format
        for place in special.operands.split():
            _place(result, place, texts.pop(0))
        if name.startswith("ds_"):
            _lds_offsets(result, special, modifiers)
        else:
            result.immediate = special.immediate
            result.offset[0] = int(modifiers.pop("offset", "0"), 0)
    else:
        table = next(table for table in FORMULAS.values() if name in table)
        _fill_formula(result, table[name], texts)
    if texts:
        raise ValueError(f"operands {texts} are left")


def _fill_formula(result, formula, texts):
    """Results and sources in the order of the text."""
    places = iter(("result", "second"))
    for kind in formula.results:
        if kind not in ("scc", "exec"):
            _place(result, next(places), texts.pop(0))
    number = 0
    for kind in formula.sources:
        if kind == "one":
            if texts.pop(0) != "1.0":
                raise ValueError("a scale other than 1.0")
            continue
        old = kind.startswith("=")
        result.source[number] = result.result if old else operand(texts.pop(0))
        number += 1


def _place(result, place, text):
    if place.isdigit():
        result.source[int(place)] = operand(text)
    else:
        setattr(result, place, operand(text))


def operand(text):
    """A register, a range of them, or a constant, with its sign and selection."""
    found = Operand()
    if inner := re.fullmatch(r"sext\((.*)\)", text):
        found.extend, text = 1, inner[1]
    if inner := re.fullmatch(r"-(?=[vsa|]|vcc)(.*)|neg\((.*)\)", text):
        found.negate, text = 1, inner[1] or inner[2]
    if inner := re.fullmatch(r"\|(.*)\||abs\((.*)\)", text):
        found.absolute, text = 1, inner[1] or inner[2]
    if register := re.fullmatch(r"([sva])(?:(\d+)|\[(\d+):(\d+)\])", text):
        index = int(register[2] or register[3])
        found.count = 1 if register[2] else int(register[4]) - index + 1
        found.kind = _SCALAR if register[1] == "s" else _VECTOR
        found.index = index + (ACCUMULATORS if register[1] == "a" else 0)
    elif text in _SCALARS:
        found.kind, found.index = _SCALAR, _SCALARS[text]
        found.count = 2 if text in ("vcc", "exec") else 1
    elif text != "off":
        found.kind, found.value = _CONSTANT, _constant(text)
    return found


def _constant(text):
    """An integer, or the bits of an fp32 number, in 64 bits."""
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        if text == "0.15915494":
            return _INVERSE_TWO_PI
        return struct.unpack("<I", struct.pack("<f", float(text)))[0]
    return int(text, 0) & (2**64 - 1)


def _counts(modifiers):
    """vmcnt and lgkmcnt of s_waitcnt; one that is absent waits for nothing."""
    counts = {"vmcnt": 255, "lgkmcnt": 255, "expcnt": 0}
    for name in list(modifiers):
        if found := re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", name):
            counts[found[1]] = int(found[2])
            del modifiers[name]
    return counts["vmcnt"] | counts["lgkmcnt"] << 8


def _lds_offsets(result, special, modifiers):
    """One offset in bytes, or two in units of the access."""
    if special.function == "lds_swap":
        result.immediate = int(re.fullmatch(r"swizzle\(SWAP,(\d+)\)", modifiers.pop("offset"))[1])
    elif special.immediate:
        for k in (0, 1):
            result.offset[k] = special.immediate * int(modifiers.pop(f"offset{k}", "0"), 0)
    else:
        result.offset[0] = int(modifiers.pop("offset", "0"), 0)


def _modifiers(result, name, modifiers):
    """SDWA, DPP, packed arithmetic and truth tables; what is understood is removed."""
    for silent in _SILENT & set(modifiers):
        del modifiers[silent]
    result.op_sel_hi = 0 if name.startswith("v_fma_mix") else 7
    for field in _VECTORS_OF_BITS:
        if field in modifiers:
            bits = modifiers.pop(field).strip("[]").split(",")
            setattr(result, field, sum(int(bit) << k for k, bit in enumerate(bits)))
    for k in (0, 1):
        if part := modifiers.pop(f"src{k}_sel", ""):
            result.source[k].select = _SELECTIONS[part]
    if part := modifiers.pop("dst_sel", ""):
        result.result_select = _SELECTIONS[part]
    if rest := modifiers.pop("dst_unused", ""):
        result.result_keep = {"UNUSED_PAD": 0, "UNUSED_PRESERVE": 1}[rest]
    if table := modifiers.pop("bitop3", ""):
        result.immediate = int(table, 0)
    for number, control in enumerate(_DPP, 1):
        key, _, value = control.partition(":")
        if key in modifiers and value in ("", modifiers[key]):
            argument = modifiers.pop(key)
            result.dpp = number
            if key == "quad_perm":
                lanes = argument.strip("[]").split(",")
                result.dpp_argument = sum(int(lane) << 2 * k for k, lane in enumerate(lanes))
            elif argument and not value:
                result.dpp_argument = int(argument)
    if result.dpp:
        result.row_mask = int(modifiers.pop("row_mask"), 0)
        result.bank_mask = int(modifiers.pop("bank_mask"), 0)
        # LLVM writes bound_ctrl:0 and :1 for the same bit.
        result.bound = "bound_ctrl" in modifiers
        modifiers.pop("bound_ctrl", None)
