"""Instructions of gfx942 and gfx950 that the machine executes: by a formula, or by a function in C.

A new instruction is a line of machine/formulas.txt; or a row of `SPECIAL` and a function in
machine/instructions.h. A launch that executes it is its test.
"""

import dataclasses
from pathlib import Path

_SIGNS = {"eq": "==", "ne": "!=", "lg": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
# Comparisons of fp32 that are no sign of C.
_UNORDERED = {
    "lg": "a < b || a > b", "nlg": "!(a < b || a > b)",
    "o": "!isnan(a) && !isnan(b)", "u": "isnan(a) || isnan(b)",
}  # fmt: skip
_LOGIC = {
    "and": "a & b", "or": "a | b", "xor": "a ^ b", "andn2": "a & ~b", "orn2": "a | ~b",
    "nand": "~(a & b)", "nor": "~(a | b)", "xnor": "~(a ^ b)",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Formula:
    """A line of a table: types of results and sources, a formula of each result."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    formulas: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Special:
    """A function of machine/ and what it is given.

    operands: what those of the text are, in order: result, second, 0 to 3 (a source), "" for one
    that says nothing. size, format: of `Instruction` in machine/state.h. immediate: a constant.
    deferred: it is carried out by the function `..._action` when a wait covers it.
    """

    function: str
    operands: str = ""
    size: int = 0
    format: int = 0
    immediate: int = 0
    deferred: bool = False


def _comparisons():
    """Lines for comparisons of vectors, which give a mask."""
    for name, sign in _SIGNS.items():
        if name not in ("ne", "lg"):
            yield f"v_cmp_{name}_f32: mask <- f32 f32: a {sign} b"
            opposite = "neq" if name == "eq" else f"n{name}"
            yield f"v_cmp_{opposite}_f32: mask <- f32 f32: !(a {sign} b)"
        for kind in ("u32", "i32", "u64", "i64", "u16", "i16"):
            if name != "lg":
                yield f"v_cmp_{name}_{kind}: mask <- {kind} {kind}: a {sign} b"
    for name, formula in _UNORDERED.items():
        yield f"v_cmp_{name}_f32: mask <- f32 f32: {formula}"


def _scalars():
    """Lines for comparisons, logic and shifts of scalars."""
    for name, sign in _SIGNS.items():
        for kind, short in (("u32", "u16"), ("i32", "i16")):
            if name != "ne":
                yield f"s_cmp_{name}_{kind}: scc <- {kind} {kind}: a {sign} b"
                yield f"s_cmpk_{name}_{kind}: scc <- {kind} {short}: a {sign} b"
        if name in ("eq", "lg"):
            yield f"s_cmp_{name}_u64: scc <- u64 u64: a {sign} b"
    for bits in (32, 64):
        of = f"b{bits}: u{bits} scc <- u{bits}"
        for name, formula in _LOGIC.items():
            yield f"s_{name}_{of} u{bits}: {formula}; d != 0"
        for name, sign in (("lshl", "<<"), ("lshr", ">>")):
            yield f"s_{name}_{of} u32: a {sign} (b & {bits - 1}); d != 0"
    for n in (1, 2, 3, 4):
        yield f"s_lshl{n}_add_u32: u32 scc <- u32 u32: (a << {n}) + b; (((u64)a << {n}) + b) >> 32"


def _tables():
    """Lines of machine/formulas.txt by section, with those of the families above."""
    found = {}
    for line in Path(__file__).with_name("machine").joinpath("formulas.txt").open():
        if line.startswith("["):
            section = found[line.strip("[]\n")] = []
        elif line.strip() and not line.startswith("#"):
            section.append(line.strip())
    found["vector"] += _comparisons()
    found["scalar"] += _scalars()
    return found


def _formulas(lines):
    found = {}
    for line in lines:
        name, types, formula = line.split(": ", 2)
        results, sources = types.split(" <- ")
        parts = tuple(part.strip() for part in formula.split(";"))
        found[name] = Formula(tuple(results.split()), tuple(sources.split()), parts)
    return found


def _memory():
    """Loads and stores of all widths and formats."""
    whole, signed, low, high = range(4)
    widths = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    loads = {name: (size, whole) for name, size in widths.items()}
    stores = dict(loads) | {"byte": (1, whole), "short": (2, whole)}
    stores |= {"byte_d16_hi": (1, high), "short_d16_hi": (2, high)}
    for name, size in (("byte", 1), ("short", 2)):
        loads |= {"u" + name: (size, whole), "s" + name: (size, signed)}
    loads |= {"ubyte_d16": (1, low), "ubyte_d16_hi": (1, high)}
    loads |= {"short_d16": (2, low), "short_d16_hi": (2, high)}
    for name, how in loads.items():
        yield f"global_load_{name}", Special("global_load", "result 0 1", *how, deferred=True)
        yield f"buffer_load_{name}", Special("buffer_load", "result 0 1 2", *how, deferred=True)
    for name, how in stores.items():
        yield f"global_store_{name}", Special("global_store", "0 2 1", *how, deferred=True)
        yield f"buffer_store_{name}", Special("buffer_store", "3 0 1 2", *how, deferred=True)
    for count in (1, 2, 4, 8, 16):
        name = "s_load_dword" + (f"x{count}" if count > 1 else "")
        yield name, Special("load_scalars", "result 0 1", 4 * count)


def _lds():
    """Reads and writes of LDS; the pairs have offsets in units of their width, or of 64 of it."""
    whole, signed, low, high = range(4)
    sizes = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}
    reads = {name: (size, whole) for name, size in sizes.items()}
    writes = dict(reads) | {"b8": (1, whole), "b16": (2, whole)}
    writes |= {"b8_d16_hi": (1, high), "b16_d16_hi": (2, high)}
    for bits in (8, 16):
        reads |= {f"u{bits}": (bits // 8, whole), f"i{bits}": (bits // 8, signed)}
        reads |= {f"u{bits}_d16": (bits // 8, low), f"u{bits}_d16_hi": (bits // 8, high)}
    for name, how in reads.items():
        yield f"ds_read_{name}", Special("lds_read", "result 0", *how, deferred=True)
    for name, how in writes.items():
        yield f"ds_write_{name}", Special("lds_write", "0 1", *how, deferred=True)
    for stride in ("", "st64"):
        for name, size in (("b32", 4), ("b64", 8)):
            unit = size * (64 if stride else 1)
            pair = {"size": size, "immediate": unit, "deferred": True}
            yield f"ds_read2{stride}_{name}", Special("lds_read2", "result 0", **pair)
            yield f"ds_write2{stride}_{name}", Special("lds_write2", "0 1 2", **pair)
    for bits in (8, 16):
        how = Special("lds_read_transposed", "result 0", 8, bits // 8, deferred=True)
        yield f"ds_read_b64_tr_b{bits}", how


def _matrices():
    elements = {"bf16": 0, "f16": 1, "f32": 2, "fp8_fp8": 3}
    halves = ((16, 16), (16, 32), (32, 8), (32, 16))
    shapes = {"bf16": halves, "f16": halves, "f32": ((16, 4), (32, 2))}
    shapes["fp8_fp8"] = ((16, 32), (32, 16))
    for kind, sides in shapes.items():
        for side, depth in sides:
            name = f"v_mfma_f32_{side}x{side}x{depth}_{kind}"
            yield name, Special("matrix", "result 0 1 2", side, elements[kind], depth)


SPECIAL = {
    **dict(_memory()),
    **dict(_lds()),
    **dict(_matrices()),
    "ds_bpermute_b32": Special("lds_permute", "result 0 1", deferred=True),
    "ds_swizzle_b32": Special("lds_swap", "result 0", deferred=True),
    "v_readfirstlane_b32": Special("read_first_lane", "result 0"),
    "v_readlane_b32": Special("read_lane", "result 0 1"),
    "v_writelane_b32": Special("write_lane", "result 0 1"),
    "v_permlane16_swap_b32": Special("swap_rows", "result 0", 16),
    "v_permlane32_swap_b32": Special("swap_rows", "result 0", 32),
    "v_pk_mov_b32": Special("move_pair", "result 0 1"),
    "s_setreg_imm32_b32": Special("set_mode"),
    "s_waitcnt": Special("wait"),
    "s_barrier": Special("barrier"),
    "s_endpgm": Special("end"),
    "s_nop": Special("nothing"),
    "s_sleep": Special("nothing"),
    "s_setprio": Special("nothing"),
}
_TABLES = _tables()
BRANCHES = dict(line.split(": ") for line in _TABLES.pop("branch"))
FORMULAS = {name: _formulas(lines) for name, lines in _TABLES.items()}
# The number of an instruction's kind, by which the machine finds its function.
NUMBERS = {
    name: number
    for number, name in enumerate(
        [*FORMULAS["vector"], *FORMULAS["packed"], *FORMULAS["scalar"], *BRANCHES, *SPECIAL]
    )
}
