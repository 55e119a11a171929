"""What instructions compute, once more and in numpy: the oracle of test_formulas.py.

`VECTOR` and `PACKED` have the instructions of those tables in operations.py, with a function of
their sources: arrays of 64 lanes. Masks are booleans. A function of several results returns all.
"""

import numpy as np

U32, U64 = np.uint32, np.uint64


def wide(x):
    return x.astype(U64)


def signed(x):
    return x.astype(np.int64)


def bits(x):
    return np.asarray(x, np.float32).view(U32)


def float_of(x):
    return np.asarray(x, U32).view(np.float32)


def low24(x):
    return wide(x) & U64(0xFFFFFF)


def signed24(x):
    return ((wide(x) & U64(0xFFFFFF)).astype(np.int64) ^ 0x800000) - 0x800000


def field(x, offset, width):
    return wide(x) >> wide(offset & 31) & ((U64(1) << wide(width & 31)) - U64(1))


def signed_field(x, offset, width):
    width = wide(width & 31)
    top = np.where(width > 0, U64(1) << np.maximum(width, U64(1)) - U64(1), U64(0))
    return (field(x, offset, width.astype(U32)) ^ top) - top


def spread(x, lanes):
    """The bit of each lane in a 32-bit number."""
    return np.array([bin(int(n) & ((1 << max(0, min(32, k))) - 1)).count("1")
                     for n, k in zip(x, lanes, strict=True)], U64)  # fmt: skip


def table(a, b, c, truth):
    found = np.zeros_like(a)
    for k in range(32):
        at = (a >> U32(k) & 1) * 4 + (b >> U32(k) & 1) * 2 + (c >> U32(k) & 1)
        found |= (U32(truth) >> at & 1) << U32(k)
    return found


def median(*x):
    stacked = np.stack(x)
    quiet = np.fmin(np.fmin(x[0], x[1]), x[2])
    return np.where(np.isnan(stacked).any(0), quiet, np.median(stacked, axis=0))


def reversed_bits(x):
    return np.array([int(f"{int(n):032b}"[::-1], 2) for n in x], U32)


def bf16(x):
    """To nearest even, by an integer of 33 bits; NaN is quiet."""
    rounded = wide(bits(x)) + U64(0x7FFF) + (wide(bits(x)) >> U64(16) & U64(1)) >> U64(16)
    return np.where(np.isnan(x), wide(bits(x)) >> U64(16) | U64(0x40), rounded)


def f16(x):
    return np.asarray(x, np.float32).astype(np.float16).view(np.uint16).astype(U64)


def fma(a, b, c):
    """Exact products in longdouble; the sum is rounded twice, but for 64 bits before 24."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


VECTOR = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": reversed_bits,
    "v_mov_b64": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_add_u32 clamp": lambda a, b: np.minimum(wide(a) + wide(b), U64(2**32 - 1)),
    "v_sub_u32 clamp": lambda a, b: np.maximum(signed(a) - signed(b), 0),
    "v_add_co_u32": lambda a, b: (a + b, wide(a) + wide(b) > 2**32 - 1),
    "v_sub_co_u32": lambda a, b: (a - b, a < b),
    "v_addc_co_u32": lambda a, b, c: (a + b + c, wide(a) + wide(b) + wide(c) > 2**32 - 1),
    "v_subb_co_u32": lambda a, b, c: (a - b - c, signed(a) - signed(b) - c < 0),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c & 31),
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_sad_u32": lambda a, b, c: np.abs(signed(a) - signed(b)) + c,
    "v_lshl_add_u64": lambda a, b, c: (a << wide(b & 7)) + c,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: wide(a) * wide(b) >> U64(32),
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_mul_u32_u24": lambda a, b: low24(a) * low24(b),
    "v_mul_i32_i24": lambda a, b: signed24(a) * signed24(b),
    "v_mad_u32_u24": lambda a, b, c: low24(a) * low24(b) + c,
    "v_mad_i32_i24": lambda a, b, c: signed24(a) * signed24(b) + c,
    "v_mad_u64_u32": lambda a, b, c: (wide(a) * wide(b) + c, wide(a) * wide(b) > ~c),
    "v_mad_i64_i32": lambda a, b, c: signed(a) * signed(b) + c,
    "v_max_i32": np.maximum,
    "v_min_i32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_u32": np.minimum,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "v_bitop3_b32": lambda a, b, c: table(a, b, c, 0x6C),
    "v_bitop3_b16": lambda a, b, c: table(a, b, c, 0x6C) & 0xFFFF,
    "v_lshlrev_b32": lambda a, b: b << (a & 31),
    "v_lshrrev_b32": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b: b >> (a & 31).astype(np.int32),
    "v_lshlrev_b16": lambda a, b: b << (a & 15) & 0xFFFF,
    "v_lshrrev_b16": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_lshlrev_b64": lambda a, b: b << wide(a & 63),
    "v_lshrrev_b64": lambda a, b: b >> wide(a & 63),
    "v_ashrrev_i64": lambda a, b: b >> signed(a & 63),
    "v_bfe_u32": field,
    "v_bfe_i32": signed_field,
    "v_bfi_b32": lambda a, b, c: a & b | ~a & c,
    "v_alignbit_b32": lambda a, b, c: (wide(a) << U64(32) | wide(b)) >> wide(c & 31),
    "v_alignbyte_b32": lambda a, b, c: (wide(a) << U64(32) | wide(b)) >> wide(c & 3) * U64(8),
    "v_mbcnt_lo_u32_b32": lambda a, b: spread(a, np.arange(64)) + b,
    "v_mbcnt_hi_u32_b32": lambda a, b: spread(a, np.arange(64) - 32) + b,
    "v_cndmask_b32": lambda a, b, c: np.where(c, b, a),
    "v_add_f32": lambda a, b: a + b,
    "v_sub_f32": lambda a, b: a - b,
    "v_subrev_f32": lambda a, b: b - a,
    "v_mul_f32": lambda a, b: a * b,
    "v_fma_f32": fma,
    "v_fma_mix_f32": lambda a, b, c: fma(float_of(a), float_of(b), float_of(c)),
    "v_fmac_f32": fma,
    "v_max_f32": np.fmax,
    "v_min_f32": np.fmin,
    "v_max3_f32": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_min3_f32": lambda a, b, c: np.fmin(np.fmin(a, b), c),
    "v_maximum3_f32": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "v_minimum3_f32": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "v_med3_f32": median,
    "v_ldexp_f32": lambda a, b: np.ldexp(a.astype(np.float64), np.clip(b, -400, 400)),
    "v_trunc_f32": np.trunc,
    "v_floor_f32": np.floor,
    "v_rndne_f32": np.rint,
    "v_rcp_f32": lambda a: 1 / a.astype(np.float64),
    "v_rcp_iflag_f32": lambda a: 1 / a.astype(np.float64),
    "v_exp_f32": lambda a: np.exp2(a.astype(np.float64)),
    "v_log_f32": lambda a: np.log2(a.astype(np.float64)),
    "v_cvt_f32_u32": lambda a: a,
    "v_cvt_f32_i32": lambda a: a,
    "v_cvt_f32_ubyte0": lambda a: a & 255,
    "v_cvt_u32_f32": lambda a: np.clip(
        np.nan_to_num(np.trunc(a.astype(np.float64))), 0, 2.0**32 - 1
    ),
    "v_cvt_i32_f32": lambda a: np.clip(
        np.nan_to_num(np.trunc(a.astype(np.float64))), -(2.0**31), 2.0**31 - 1
    ),
    "v_cvt_f16_f32": f16,
    "v_cvt_f32_f16": lambda a: a.astype(np.uint16).view(np.float16),
    "v_cvt_pk_f16_f32": lambda a, b: f16(a) | f16(b) << U64(16),
    "v_cvt_pk_bf16_f32": lambda a, b: bf16(a) | bf16(b) << U64(16),
    "v_pack_b32_f16": lambda a, b: a & 0xFFFF | b << U32(16),
}
RELATIONS = {
    "eq": np.equal, "ne": np.not_equal, "lg": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
OF_FLOATS = {
    **RELATIONS,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}
VECTOR |= {f"v_cmp_{name}_f32": how for name, how in OF_FLOATS.items() if name != "ne"}
VECTOR |= {
    f"v_cmp_{name}_{kind}": how
    for kind in ("u32", "i32", "u64", "i64", "u16", "i16")
    for name, how in RELATIONS.items()
    if name != "lg"
}
PACKED = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fma,
}
