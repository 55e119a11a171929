"""What instructions of gfx942 and gfx950 compute: a formula in C for each.

A line is `name: results <- sources: formula`, or formulas, one for each result, with `;` between.
Types of operands, in the order of the text:

    u32 i32 f32 u64 i64 u16 i16    that many bits of each lane, or of a scalar register
    mask                           a bit of each lane (as a source 0 or 1)
    =T                             the old value of the result, which the text does not repeat
    one                            the constant 1.0, a scale; it has no name in the formula
    scc, exec                      results that the text does not name

Sources are `a`, `b`, `c`; the first result is `d` in the formulas after it. `i` is the instruction,
`w` the wave, `l` the lane, `scc` and `exec` what these were before. Functions are in machine/.

A new instruction is a line here; or a row of `SPECIAL` and a function in machine/instructions.h.
A launch that executes it is its test.
"""

import dataclasses

VECTOR = """
v_mov_b32: u32 <- u32: a
v_not_b32: u32 <- u32: ~a
v_bfrev_b32: u32 <- u32: reversed(a)
v_mov_b64: u64 <- u64: a
v_accvgpr_read_b32: u32 <- u32: a
v_accvgpr_write_b32: u32 <- u32: a
v_accvgpr_mov_b32: u32 <- u32: a

v_add_u32: u32 <- u32 u32: a + b
v_sub_u32: u32 <- u32 u32: a - b
v_subrev_u32: u32 <- u32 u32: b - a
v_add_u32 clamp: u32 <- u32 u32: a + b < a ? 0xffffffffu : a + b
v_sub_u32 clamp: u32 <- u32 u32: a > b ? a - b : 0
v_add_co_u32: u32 mask <- u32 u32: a + b; d < a
v_sub_co_u32: u32 mask <- u32 u32: a - b; a < b
v_addc_co_u32: u32 mask <- u32 u32 mask: a + b + c; ((u64)a + b + c) >> 32
v_subb_co_u32: u32 mask <- u32 u32 mask: a - b - c; (u64)b + c > a
v_add3_u32: u32 <- u32 u32 u32: a + b + c
v_lshl_add_u32: u32 <- u32 u32 u32: (a << (b & 31)) + c
v_add_lshl_u32: u32 <- u32 u32 u32: (a + b) << (c & 31)
v_xad_u32: u32 <- u32 u32 u32: (a ^ b) + c
v_sad_u32: u32 <- u32 u32 u32: (a > b ? a - b : b - a) + c
v_lshl_add_u64: u64 <- u64 u32 u64: (a << (b & 7)) + c

v_mul_lo_u32: u32 <- u32 u32: a * b
v_mul_hi_u32: u32 <- u32 u32: (u64)a * b >> 32
v_mul_hi_i32: u32 <- i32 i32: (i64)a * b >> 32
v_mul_u32_u24: u32 <- u32 u32: (a & 0xffffff) * (b & 0xffffff)
v_mul_i32_i24: u32 <- u32 u32: signed24(a) * signed24(b)
v_mad_u32_u24: u32 <- u32 u32 u32: (a & 0xffffff) * (b & 0xffffff) + c
v_mad_i32_i24: u32 <- u32 u32 u32: signed24(a) * signed24(b) + c
v_mad_u64_u32: u64 mask <- u32 u32 u64: (u64)a * b + c; d < c
v_mad_i64_i32: i64 mask <- i32 i32 i64: (i64)a * b + c; overflows((i64)a * b, c)

v_max_i32: i32 <- i32 i32: a > b ? a : b
v_min_i32: i32 <- i32 i32: a < b ? a : b
v_max_u32: u32 <- u32 u32: a > b ? a : b
v_min_u32: u32 <- u32 u32: a < b ? a : b

v_and_b32: u32 <- u32 u32: a & b
v_or_b32: u32 <- u32 u32: a | b
v_xor_b32: u32 <- u32 u32: a ^ b
v_and_or_b32: u32 <- u32 u32 u32: (a & b) | c
v_or3_b32: u32 <- u32 u32 u32: a | b | c
v_lshl_or_b32: u32 <- u32 u32 u32: (a << (b & 31)) | c
v_bitop3_b32: u32 <- u32 u32 u32: by_table(a, b, c, i->immediate)
v_bitop3_b16: u32 <- u32 u32 u32: by_table(a, b, c, i->immediate) & 0xffff
v_lshlrev_b32: u32 <- u32 u32: b << (a & 31)
v_lshrrev_b32: u32 <- u32 u32: b >> (a & 31)
v_ashrrev_i32: u32 <- u32 i32: b >> (a & 31)
v_lshlrev_b16: u32 <- u32 u32: b << (a & 15) & 0xffff
v_lshrrev_b16: u32 <- u32 u32: (b & 0xffff) >> (a & 15)
v_lshlrev_b64: u64 <- u32 u64: b << (a & 63)
v_lshrrev_b64: u64 <- u32 u64: b >> (a & 63)
v_ashrrev_i64: i64 <- u32 i64: b >> (a & 63)
v_bfe_u32: u32 <- u32 u32 u32: field(a, b, c)
v_bfe_i32: u32 <- u32 u32 u32: signed_field(a, b, c)
v_bfi_b32: u32 <- u32 u32 u32: (a & b) | (~a & c)
v_alignbit_b32: u32 <- u32 u32 u32: ((u64)a << 32 | b) >> (c & 31)
v_alignbyte_b32: u32 <- u32 u32 u32: ((u64)a << 32 | b) >> 8 * (c & 3)
v_perm_b32: u32 <- u32 u32 u32: permuted(a, b, c)
v_mbcnt_lo_u32_b32: u32 <- u32 u32: __builtin_popcount(a & lower_lanes(l)) + b
v_mbcnt_hi_u32_b32: u32 <- u32 u32: __builtin_popcount(a & upper_lanes(l)) + b
v_cndmask_b32: u32 <- u32 u32 mask: c ? b : a

v_add_f32: f32 <- f32 f32: a + b
v_sub_f32: f32 <- f32 f32: a - b
v_subrev_f32: f32 <- f32 f32: b - a
v_mul_f32: f32 <- f32 f32: a * b
v_fma_f32: f32 <- f32 f32 f32: fmaf(a, b, c)
v_fma_mix_f32: f32 <- u32 u32 u32: fmaf(mixed(i, 0, a), mixed(i, 1, b), mixed(i, 2, c))
v_fmac_f32: f32 <- f32 f32 =f32: fmaf(a, b, c)
v_max_f32: f32 <- f32 f32: larger(a, b)
v_min_f32: f32 <- f32 f32: smaller(a, b)
v_max3_f32: f32 <- f32 f32 f32: larger(larger(a, b), c)
v_min3_f32: f32 <- f32 f32 f32: smaller(smaller(a, b), c)
v_maximum3_f32: f32 <- f32 f32 f32: most(a, b, c)
v_minimum3_f32: f32 <- f32 f32 f32: least(a, b, c)
v_med3_f32: f32 <- f32 f32 f32: median(a, b, c)
v_ldexp_f32: f32 <- f32 i32: ldexpf(a, b)
v_trunc_f32: f32 <- f32: truncf(a)
v_floor_f32: f32 <- f32: floorf(a)
v_rndne_f32: f32 <- f32: nearbyintf(a)
v_rcp_f32: f32 <- f32: approximate(m, 1.0 / a)
v_rcp_iflag_f32: f32 <- f32: approximate(m, 1.0 / a)
v_exp_f32: f32 <- f32: approximate(m, exp2(a))
v_log_f32: f32 <- f32: approximate(m, log2(a))
v_div_scale_f32: f32 mask <- f32 f32 f32: division_scaled(a, b, c, &rescale); rescale
v_div_fmas_f32: f32 <- f32 f32 f32: division_step(a, b, c, on(pair(w, VCC), l))
v_div_fixup_f32: f32 <- f32 f32 f32: division_fixed(a, b, c)

v_cvt_f32_u32: f32 <- u32: (f32)a
v_cvt_f32_i32: f32 <- i32: (f32)a
v_cvt_f32_ubyte0: f32 <- u32: (f32)(a & 255)
v_cvt_u32_f32: u32 <- f32: f32_to_u32(a)
v_cvt_i32_f32: i32 <- f32: f32_to_i32(a)
v_cvt_f16_f32: u32 <- f32: to_f16(a)
v_cvt_f32_f16: f32 <- u32: from_f16(a & 0xffff)
v_cvt_pk_f16_f32: u32 <- f32 f32: to_f16(a) | to_f16(b) << 16
v_cvt_pk_bf16_f32: u32 <- f32 f32: to_bf16(a) | to_bf16(b) << 16
v_pack_b32_f16: u32 <- u32 u32: half_of(a, i->op_sel) | half_of(b, i->op_sel >> 1) << 16
v_cvt_f32_fp8: f32 <- u32: from_fp8(a, m->fnuz)
v_cvt_pk_fp8_f32: u32 <- f32 f32 =u32: fp8_into(m, w, c, a, b, i->op_sel >> 2)
v_cvt_scalef32_pk_fp8_f32: u32 <- f32 f32 one =u32: fp8_into(m, w, c, a, b, i->op_sel >> 3)
v_cvt_pk_f32_fp8: u64 <- u32: f32_pair(m, half_of(a, i->op_sel))
v_cvt_scalef32_pk_f32_fp8: u64 <- u32 one: f32_pair(m, half_of(a, i->op_sel))
v_cvt_scalef32_pk_bf16_fp8: u32 <- u32 one: bf16_pair(m, half_of(a, i->op_sel))
"""

# Half by half, with sources chosen by op_sel, op_sel_hi, neg_lo and neg_hi.
PACKED = """
v_pk_add_f32: f32 <- f32 f32: a + b
v_pk_mul_f32: f32 <- f32 f32: a * b
v_pk_fma_f32: f32 <- f32 f32 f32: fmaf(a, b, c)
"""

_SIGNS = {"eq": "==", "ne": "!=", "lg": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_COMPARISONS = {
    **{name: f"a {sign} b" for name, sign in _SIGNS.items() if name not in ("ne", "lg")},
    "lg": "a < b || a > b",
    "o": "!isnan(a) && !isnan(b)",
    "u": "isnan(a) || isnan(b)",
    "neq": "!(a == b)",
    "nlt": "!(a < b)",
    "nle": "!(a <= b)",
    "ngt": "!(a > b)",
    "nge": "!(a >= b)",
    "nlg": "!(a < b || a > b)",
}
VECTOR += "".join(f"v_cmp_{n}_f32: mask <- f32 f32: {e}\n" for n, e in _COMPARISONS.items())
VECTOR += "".join(
    f"v_cmp_{name}_{kind}: mask <- {kind} {kind}: a {sign} b\n"
    for kind in ("u32", "i32", "u64", "i64", "u16", "i16")
    for name, sign in _SIGNS.items()
    if name != "lg"
)

SCALAR = """
s_mov_b32: u32 <- u32: a
s_mov_b64: u64 <- u64: a
s_movk_i32: i32 <- i16: a
s_cmov_b32: u32 <- u32 =u32: scc ? a : b
s_cmovk_i32: i32 <- i16 =i32: scc ? a : b
s_cselect_b32: u32 <- u32 u32: scc ? a : b
s_cselect_b64: u64 <- u64 u64: scc ? a : b
s_sext_i32_i16: i32 <- i16: a
s_brev_b32: u32 <- u32: reversed(a)
s_pack_ll_b32_b16: u32 <- u32 u32: (a & 0xffff) | b << 16
s_pack_lh_b32_b16: u32 <- u32 u32: (a & 0xffff) | (b & 0xffff0000u)
s_pack_hh_b32_b16: u32 <- u32 u32: a >> 16 | (b & 0xffff0000u)
s_bitset0_b32: u32 <- u32 =u32: b & ~(1u << (a & 31))
s_bitset1_b32: u32 <- u32 =u32: b | 1u << (a & 31)
s_ff1_i32_b64: u32 <- u64: a ? __builtin_ctzll(a) : 0xffffffffu

s_add_u32: u32 scc <- u32 u32: a + b; d < a
s_sub_u32: u32 scc <- u32 u32: a - b; a < b
s_addc_u32: u32 scc <- u32 u32: a + b + scc; ((u64)a + b + scc) >> 32
s_subb_u32: u32 scc <- u32 u32: a - b - scc; (u64)b + scc > a
s_add_i32: i32 scc <- i32 i32: a + b; d != (i64)a + b
s_sub_i32: i32 scc <- i32 i32: a - b; d != (i64)a - b
s_addk_i32: i32 scc <- i16 =i32: a + b; d != (i64)a + b
s_mulk_i32: i32 <- i16 =i32: a * b
s_mul_i32: u32 <- u32 u32: a * b
s_mul_hi_u32: u32 <- u32 u32: (u64)a * b >> 32
s_mul_hi_i32: u32 <- i32 i32: (i64)a * b >> 32
s_abs_i32: u32 scc <- i32: a < 0 ? -(u32)a : a; d != 0
s_min_i32: i32 scc <- i32 i32: a < b ? a : b; a < b
s_max_i32: i32 scc <- i32 i32: a > b ? a : b; a > b
s_min_u32: u32 scc <- u32 u32: a < b ? a : b; a < b
s_max_u32: u32 scc <- u32 u32: a > b ? a : b; a > b

s_not_b32: u32 scc <- u32: ~a; d != 0
s_not_b64: u64 scc <- u64: ~a; d != 0
s_bcnt1_i32_b64: u32 scc <- u64: __builtin_popcountll(a); d != 0
s_bfe_u32: u32 scc <- u32 u32: a >> (b & 31) & ((1ull << (b >> 16 & 63)) - 1); d != 0
s_bfe_i32: u32 scc <- u32 u32: signed_field(a, b, b >> 16); d != 0
s_ashr_i32: i32 scc <- i32 u32: a >> (b & 31); d != 0
s_ashr_i64: i64 scc <- i64 u32: a >> (b & 63); d != 0
s_bitcmp0_b32: scc <- u32 u32: !(a >> (b & 31) & 1)
s_bitcmp1_b32: scc <- u32 u32: a >> (b & 31) & 1
s_and_saveexec_b64: u64 exec scc <- u64: exec; a & exec; e != 0
s_andn2_saveexec_b64: u64 exec scc <- u64: exec; a & ~exec; e != 0
s_or_saveexec_b64: u64 exec scc <- u64: exec; a | exec; e != 0
"""
_LOGIC = {
    "and": "a & b", "or": "a | b", "xor": "a ^ b", "andn2": "a & ~b", "orn2": "a | ~b",
    "nand": "~(a & b)", "nor": "~(a | b)", "xnor": "~(a ^ b)",
}  # fmt: skip
SCALAR += "".join(
    f"s_{name}_b{bits}: u{bits} scc <- u{bits} u{bits}: {formula}; d != 0\n"
    for bits in (32, 64)
    for name, formula in _LOGIC.items()
)
SCALAR += "".join(
    f"s_{name}_b{bits}: u{bits} scc <- u{bits} u32: a {sign} (b & {bits - 1}); d != 0\n"
    for bits in (32, 64)
    for name, sign in (("lshl", "<<"), ("lshr", ">>"))
)
SCALAR += "".join(
    f"s_lshl{n}_add_u32: u32 scc <- u32 u32: (a << {n}) + b; (((u64)a << {n}) + b) >> 32 != 0\n"
    for n in (1, 2, 3, 4)
)
SCALAR += "".join(
    f"s_cmp{k}_{name}_{kind}: scc <- {kind} {short if k else kind}: a {sign} b\n"
    for kind, short in (("u32", "u16"), ("i32", "i16"))
    for k in ("", "k")
    for name, sign in _SIGNS.items()
    if name != "ne"
)
SCALAR += "s_cmp_eq_u64: scc <- u64 u64: a == b\ns_cmp_lg_u64: scc <- u64 u64: a != b\n"

# Jumps to the label that is their operand.
BRANCH = """
s_branch: 1
s_cbranch_scc0: !scc
s_cbranch_scc1: scc
s_cbranch_vccz: !pair(w, VCC)
s_cbranch_vccnz: pair(w, VCC) != 0
s_cbranch_execz: !exec
s_cbranch_execnz: exec != 0
"""


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


def _formulas(table):
    found = {}
    for line in filter(None, table.splitlines()):
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
FORMULAS = {"vector": _formulas(VECTOR), "packed": _formulas(PACKED), "scalar": _formulas(SCALAR)}
BRANCHES = dict(line.split(": ") for line in filter(None, BRANCH.splitlines()))
# The number of an instruction's kind, by which the machine finds its function.
NUMBERS = {
    name: number
    for number, name in enumerate(
        [*FORMULAS["vector"], *FORMULAS["packed"], *FORMULAS["scalar"], *BRANCHES, *SPECIAL]
    )
}
