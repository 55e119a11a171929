"""Each formula of operations.py against numpy, on every lane; and a mutant of each formula."""

import dataclasses

import numpy as np
import pytest

from tests.amd import build, formulas
from tests.amd.alone import Wave
from tests.amd.operations import FORMULAS
from tests.amd.scalar_formulas import SCALAR

WORDS = np.array(
    [0, 1, 2, 7, 31, 32, 33, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF, 0x8000],
    np.uint32,
)
FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 0.75, 3.0, 1e-40, -1e-45, 3e38, -3e38, np.inf, -np.inf, np.nan, 447.9,
     2.5, 65504.0, 1e-7, 4.5e9, -7.25],
    np.float32,
)  # fmt: skip
DTYPES = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64,
          "u16": np.uint16, "i16": np.int16}  # fmt: skip
# What the numpy side lacks: special cases of a division, tables of bytes, and fp8, which
# test_instructions.py has.
APART = {name for name in FORMULAS["vector"] if "div_" in name or "fp8" in name} | {"v_perm_b32"}
ROUNDS = range(3)


def lanes(kind, rng):
    """64 values of a type, of which a third are special, as words [1 or 2, 64]."""
    if kind == "mask":
        return rng.integers(0, 2, 64).astype(bool)
    if kind == "f32":
        plain = rng.standard_normal(64).astype(np.float32) * np.float32(2.0) ** rng.integers(
            -9, 9, 64
        )
        return np.where(rng.random(64) < 0.4, rng.choice(FLOATS, 64), plain.astype(np.float32))
    words = [
        np.where(rng.random(64) < 0.4, rng.choice(WORDS, 64), rng.integers(0, 2**32, 64))
        for _ in range(2)
    ]
    full = words[0].astype(np.uint64) | words[1].astype(np.uint64) << np.uint64(32)
    return (
        full.astype(np.uint64)
        .astype(np.dtype(DTYPES[kind]).str.replace("i", "u"))
        .view(DTYPES[kind])
    )


def put(wave, index, kind, values):
    """Values into vector registers from `index` on."""
    if kind == "f32":
        wave.v[index] = values.view(np.uint32)
        return
    raw = values.astype(np.int64).view(np.uint64)
    if kind.endswith("64"):
        raw = values.view(np.uint64)
    wave.v[index] = (raw & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    wave.v[index + 1] = (raw >> np.uint64(32)).astype(np.uint32)


def register(index, kind):
    return f"v[{index}:{index + 1}]" if kind.endswith("64") else f"v{index}"


def as_mask(values):
    return sum(int(bit) << lane for lane, bit in enumerate(values))


def run_vector(name, formula, rng):
    """Results of the machine and of numpy, as pairs of arrays."""
    wave, texts, given = Wave(), [], []
    active = int(rng.integers(0, 2**63)) * 2 + 1
    wave.set_pair(126, active)
    old = rng.integers(0, 2**32, 64).astype(np.uint32)
    for number, kind in enumerate(formula.sources):
        values = lanes(kind.lstrip("="), rng)
        given.append(values)
        if kind == "mask":
            wave.set_pair(40, as_mask(values))
            texts.append("s[40:41]")
        elif kind.startswith("="):
            put(wave, 20, "f32", values)
            old = values.view(np.uint32)
        else:
            accumulates = name.startswith("v_accvgpr") and "write" not in name
            put(wave, (512 if accumulates else 0) + 10 + 2 * number, kind, values)
            texts.append(f"a{10 + 2 * number}" if accumulates else register(10 + 2 * number, kind))
    results = []
    for number, kind in enumerate(formula.results):
        mask = "s[30:31]" if number == 0 else "s[32:33]"
        results.append(mask if kind == "mask" else register(20, kind))
    to = 20
    if name in ("v_accvgpr_write_b32", "v_accvgpr_mov_b32"):
        results, to = ["a20"], 532
    if not any(kind.startswith("=") for kind in formula.sources):
        wave.v[to] = old
    mnemonic, _, modifier = name.partition(" ")
    extra = " bitop3:0x6c" if "bitop3" in name else ""
    line = f"{mnemonic} {', '.join(results + texts)}{extra}{' ' + modifier if modifier else ''}"
    assert not wave.run(line)
    expected = formulas.VECTOR[name](*given)
    expected = expected if isinstance(expected, tuple) else (expected,)
    on = np.array([active >> lane & 1 for lane in range(64)], bool)
    for number, (kind, want) in enumerate(zip(formula.results, expected, strict=False)):
        if kind == "mask":
            got = wave.pair(30 if number == 0 else 32)
            yield line, np.array([got]), np.array([as_mask(want & on)])
        elif kind == "f32":
            want = np.where(on, np.asarray(want).astype(np.float32), old.view(np.float32))
            yield line, wave.v[to].view(np.float32).copy(), want
        else:
            raw = np.asarray(want)
            raw = raw if raw.dtype == np.uint64 else raw.astype(np.int64).view(np.uint64)
            yield line, wave.v[to].copy(), np.where(on, raw.astype(np.uint32), old)
            if kind.endswith("64"):
                high = (raw >> np.uint64(32)).astype(np.uint32)
                yield line, wave.v[to + 1][on], high[on]


def run_packed(name, formula, rng):
    """Packed fp32 with sources chosen and negated by modifiers."""
    wave, count = Wave(), len(formula.sources)
    halves = [[lanes("f32", rng) for _ in range(2)] for _ in range(count)]
    for number, pair in enumerate(halves):
        for half in (0, 1):
            put(wave, 10 + 2 * number + half, "f32", pair[half])
    names = ("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    chosen = {each: [int(bit) for bit in rng.integers(0, 2, count)] for each in names}
    texts = ", ".join(f"v[{10 + 2 * k}:{11 + 2 * k}]" for k in range(count))
    words = " ".join(f"{each}:[{','.join(map(str, bits))}]" for each, bits in chosen.items())
    line = f"{name} v[20:21], {texts} {words}"
    assert not wave.run(line)
    for half, (select, sign) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi"))):
        given = [
            pair[at] * np.float32(-1 if minus else 1)
            for pair, at, minus in zip(halves, chosen[select], chosen[sign], strict=True)
        ]
        yield line, wave.v[20 + half].view(np.float32).copy(), formulas.PACKED[name](*given)


def scalar_value(kind, rng):
    """An integer of a type; often a special one."""
    bits = int(kind[1:])
    value = int(rng.choice(WORDS)) if rng.random() < 0.6 else int(rng.integers(0, 2**32))
    value = (value | int(rng.choice(WORDS)) << 32) % 2**bits
    return value - 2**bits if kind[0] == "i" and value >> (bits - 1) else value


def run_scalar(name, formula, rng):
    """Result and SCC of the machine and of Python's integers, as pairs."""
    wave, texts, given = Wave(), [], []
    scc = int(rng.integers(0, 2))
    wave.s[128] = scc
    for number, kind in enumerate(formula.sources):
        value = scalar_value(kind.lstrip("="), rng)
        given.append(value)
        index = 50 if kind.startswith("=") else 40 + 2 * number
        wave.set_pair(index, value % 2**64)
        if kind.endswith("16") and name != "s_sext_i32_i16":
            texts.append(str(value))
        elif not kind.startswith("="):
            texts.append(f"s[{index}:{index + 1}]" if kind.endswith("64") else f"s{index}")
    wide = formula.results[0].endswith("64")
    if formula.results[0] != "scc":
        texts.insert(0, "s[50:51]" if wide else "s50")
    line = f"{name} {', '.join(texts)}"
    assert not wave.run(line)
    found = SCALAR[name](*given, scc)
    if formula.results[0] == "scc":
        yield line, int(wave.s[128]), int(found)
        return
    value, after = found if isinstance(found, tuple) else (found, scc)
    yield line, wave.pair(50) if wide else int(wave.s[50]), value % 2 ** (64 if wide else 32)
    yield line, int(wave.s[128]), int(after)


TABLES = {"vector": run_vector, "packed": run_packed, "scalar": run_scalar}
# test_instructions.py has those that write EXEC.
APART |= {name for name in FORMULAS["scalar"] if "saveexec" in name}
EVERY = [(kind, name) for kind in TABLES for name in FORMULAS[kind] if name not in APART]


def check(kind, name):
    for seed in ROUNDS:
        rng = np.random.default_rng(seed)
        for line, got, want in TABLES[kind](name, FORMULAS[kind][name], rng):
            np.testing.assert_array_equal(got, want, line)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", TABLES)
def test_formulas(kind):
    for each, name in EVERY:
        if each == kind:
            check(kind, name)


def changed(line):
    """The line of a table with its first formula changed: an operator, a function, an operand."""
    formula = line.formulas[0]
    swaps = [
        (" + ", " - "), (" - ", " + "), (" * ", " + "), (" & ", " | "), (" | ", " & "),
        (" ^ ", " & "), ("<<", ">>"), (">>", "<<"), ("==", "!="), ("!=", "=="), (" < ", " >= "),
        (" > ", " <= "), (" <= ", " > "), (" >= ", " < "), ("!isnan(a)", "isnan(a)"),
        ("isnan(a)", "isnan(b)"), ("larger(", "smaller("), ("smaller(", "larger("),
        ("most(", "least("), ("least(", "most("), ("fmaf(a, b, c)", "a * b"),
        ("mixed(i, 2, c)", "1.0f"), ("median(a, b, c)", "larger(a, b)"),
        ("f32_to_", "1 ^ f32_to_"), ("to_", "1 ^ to_"),
        ("reversed(a)", "a"), ("c ? b : a", "c ? a : b"), ("scc ? a : b", "scc ? b : a"),
        ("signed_field(", "field("), ("field(a, b, c)", "a >> (b & 31)"), ("from_f16(", "(f32)("),
        ("exp2(", "exp("), ("log2(", "log("), ("1.0 / ", "-1.0 / "),
        ("by_table(a, b", "by_table(b, a"),
        ("truncf", "floorf"), ("floorf", "truncf"), ("nearbyintf", "floorf"), ("ldexpf(a, b)", "a"),
        ("half_of(a, i->op_sel)", "a"), ("(f32)a", "(f32)(a ^ 1)"), ("(f32)(a", "(f32)(1 ^ a"),
        ("~", ""), ("popcountll(a)", "popcount(a)"), ("ctzll", "popcountll"),
    ]  # fmt: skip
    other = f"({formula}) * 2" if line.results[0] == "f32" else f"({formula}) ^ 2"
    other = next((formula.replace(old, new, 1) for old, new in swaps if old in formula), other)
    return dataclasses.replace(line, formulas=(other, *line.formulas[1:]))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_mutant_of_each_formula_is_seen(monkeypatch):
    """A machine in which every first formula is another one: every check has to fail."""
    mutants = {
        kind: {name: line if name in APART else changed(line) for name, line in table.items()}
        for kind, table in FORMULAS.items()
    }
    monkeypatch.setattr(build, "FORMULAS", mutants)
    changed_library = build.library.__wrapped__()
    monkeypatch.setattr(build, "library", lambda: changed_library)
    unseen = []
    for kind, name in EVERY:
        try:
            check(kind, name)
        except AssertionError:
            continue
        unseen.append(f"{name}: {mutants[kind][name].formulas[0]}")
    assert not unseen, unseen
