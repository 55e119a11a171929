"""The machine in C: machine/*.h and a function for each formula, compiled once."""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.amd.operations import BRANCHES, FORMULAS, NUMBERS, SPECIAL

FOLDER = Path(__file__).with_name("machine")
HEADERS = ("state", "floats", "lanes", "memory", "instructions", "matrix")
BUILD = Path(__file__).parents[2] / "build" / "amd"
# No contraction: an instruction rounds as often as it says.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-w")
_C_TYPES = {"u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32,
            "u64": ctypes.c_uint64, "i32": ctypes.c_int32, "int": ctypes.c_int}  # fmt: skip
_WIDE = ("u64", "i64")
_NAMES = "abc"


def _name(operation):
    return "op_" + operation.replace(" ", "_")


def _value(kind, expression):
    """A source of type `kind` from the bits of its registers."""
    return f"as_f32({expression})" if kind == "f32" else f"({_c_type(kind)}){expression}"


def _c_type(kind):
    return "u32" if kind == "mask" else kind


def _bits(kind, expression):
    """The bits of a result of type `kind`."""
    bits = 64 if kind in _WIDE else 32
    return f"as_u32({expression})" if kind == "f32" else f"(u{bits})({expression})"


def _sources(formula):
    kinds = (kind.lstrip("=") for kind in formula.sources if kind != "one")
    return list(zip(_NAMES, kinds, strict=False))


def _vector(name, formula):
    """A function that computes a formula in each lane."""
    body = ["u64 active = pair(w, EXEC);"]
    sources = _sources(formula)
    for number, (letter, kind) in enumerate(sources):
        if kind == "mask":
            body.append(f"u64 of_{letter} = scalar_operand(w, &i->source[{number}], 2);")
        elif kind in _WIDE:
            body.append(f"u64 of_{letter}[LANES]; read64(w, i, {number}, of_{letter});")
        else:
            body.append(f"u32 of_{letter}[LANES]; read32(w, i, {number}, of_{letter}, &active);")
    kinds = formula.results
    body += [f"u{64 if kind in _WIDE else 32} to_{k}[LANES];" for k, kind in enumerate(kinds)]
    body.append("for (int l = 0; l < LANES; l++) {")
    if "rescale" in formula.formulas[-1]:
        body.append("int rescale;")
    for letter, kind in sources:
        given = f"on(of_{letter}, l)" if kind == "mask" else f"of_{letter}[l]"
        body.append(f"const {_c_type(kind)} {letter} = {_value(kind, given)};")
    body.append(f"const {_c_type(kinds[0])} d = {formula.formulas[0]};")
    body.append(f"to_0[l] = {_bits(kinds[0], 'd')};")
    if len(kinds) > 1:
        body.append(f"to_1[l] = {formula.formulas[1]};")
    body.append("}")
    for number, kind in enumerate(kinds):
        place = ("result", "second")[number]
        if kind == "mask":
            body.append(f"write_mask(w, &i->{place}, to_{number}, active);")
        else:
            body.append(f"write{64 if kind in _WIDE else 32}(w, i, to_{number}, active);")
    return _function(name, body)


def _packed(name, formula):
    """A function that computes a formula of fp32 twice, for the two halves of register pairs."""
    body = [
        "u32 to[2][LANES]; u64 active = pair(w, EXEC);",
        "for (int half = 0; half < 2; half++) {",
    ]
    sources = _sources(formula)
    for number, (letter, _) in enumerate(sources):
        body.append(f"u32 of_{letter}[LANES]; read_packed(w, i, {number}, half, of_{letter});")
    body.append("for (int l = 0; l < LANES; l++) {")
    body += [f"const f32 {letter} = as_f32(of_{letter}[l]);" for letter, _ in sources]
    body.append(f"to[half][l] = as_u32({formula.formulas[0]}); }} }}")
    body += [f"write_word(w, i->result.index + {half}, to[{half}], active);" for half in (0, 1)]
    return _function(name, body)


def _scalar(name, formula):
    """A function that computes a formula of scalar registers."""
    body = ["const u32 scc = w->s[SCC]; const u64 exec = pair(w, EXEC);"]
    for number, (letter, kind) in enumerate(_sources(formula)):
        given = f"scalar_operand(w, &i->source[{number}], {2 if kind in _WIDE else 1})"
        body.append(f"const {kind} {letter} = ({kind}){given};")
    for kind, each in zip(formula.results, formula.formulas, strict=True):
        if kind == "scc":
            body.append(f"w->s[SCC] = ({each}) ? 1 : 0;")
        elif kind == "exec":
            body.append(f"const u64 e = {each}; set_pair(w, EXEC, e);")
        elif kind in _WIDE:
            body.append(f"const {kind} d = {each}; set_pair(w, i->result.index, d);")
        else:
            body.append(f"const {kind} d = {each}; w->s[i->result.index] = d;")
    return _function(name, body)


def _branch(name, condition):
    return _function(name, [
        "const u32 scc = w->s[SCC]; const u64 exec = pair(w, EXEC);",
        f"if ({condition}) w->pc = i->immediate;",
    ])  # fmt: skip


def _function(name, body):
    head = f"static void {_name(name)}(Machine *m, Wave *w, const Instruction *i)\n{{\n"
    return head + "\n".join(body) + "\n}\n"


def source():
    """The machine's C."""
    parts = [f'#include "{name}.h"' for name in HEADERS]
    tables = (_vector, FORMULAS["vector"]), (_packed, FORMULAS["packed"])
    tables += (_scalar, FORMULAS["scalar"]), (_branch, BRANCHES)
    parts += [write(*item) for write, table in tables for item in table.items()]
    functions = [SPECIAL[n].function if n in SPECIAL else _name(n) for n in NUMBERS]
    actions = [
        SPECIAL[n].function + "_action" if n in SPECIAL and SPECIAL[n].deferred else "0"
        for n in NUMBERS
    ]
    parts.append("typedef void Function(Machine *, Wave *, const Instruction *);")
    parts.append(f"static Function *const FUNCTIONS[] = {{ {', '.join(functions)} }};")
    parts.append(f"static Action *const ACTIONS[] = {{ {', '.join(actions)} }};")
    parts.append('#include "launch.h"')
    return "\n".join(parts)


def structure(name, **known):
    """A structure of machine/ for ctypes; `known`: others that it has, and sizes by name."""
    text = "".join(path.read_text() for path in FOLDER.glob("*.h"))
    text = re.sub(r"/\*.*?\*/|\bconst\b", "", text, flags=re.DOTALL)
    body = re.search(rf"typedef struct {{([^}}]*)}} {name};", text)[1]
    fields = []
    for kind, declared in re.findall(r"(\w+)\s([^;]+);", body):
        for pointer, field, size in re.findall(r"(\*?)(\w+)(?:\[(\w+)\])?", declared):
            of = ctypes.c_void_p if pointer else known.get(kind) or _C_TYPES[kind]
            size = known.get(size) or int(size or 0)
            fields.append((field, of * size if size else of))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def library():
    """The compiled machine; it is kept in build/amd for as long as its sources are the same."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "tests/amd executes AMD machine code with a C program, and neither gcc nor clang is on "
            "the path: install one (Debian: apt-get install gcc); torch.compile needs it too"
        )
    text = source()
    headers = [path.read_text() for path in sorted(FOLDER.glob("*.h"))]
    about = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    processor = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x[:5] == "flags"][:1]
    every = "\0".join([text, *headers, *FLAGS, about.stdout, *processor])
    built = BUILD / f"{hashlib.sha256(every.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        # Another process may build it too: each writes its own file, and renaming is atomic.
        mine = built.with_suffix(f".{os.getpid()}")
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-I", FOLDER, "-x", "c", "-", "-o", mine]
        done = subprocess.run([*command, "-lm"], input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{compiler} does not compile the machine:\n{done.stderr}")
        mine.rename(built)
    return ctypes.CDLL(str(built))
