"""What scalar instructions compute, once more and in Python's integers: an oracle.

A function takes the sources as integers of their types (old values of the result last) and SCC; it
returns the result, or the result and SCC, or SCC alone where the instruction has no other. Results
are taken modulo the width of the register.
"""

import operator

FULL = 2**32 - 1


def carry(x):
    return x & FULL, x != x & FULL


def overflow(x):
    return x, not -(2**31) <= x < 2**31


def nonzero(x, bits):
    return x, x % 2**bits != 0


def field(x, at):
    return x >> (at & 31) & ((1 << (at >> 16 & 127)) - 1)


def signed_field(x, at):
    width = at >> 16 & 31
    value = field(x, at & 31 | width << 16)
    return value - (1 << width) if width and value >> (width - 1) else value


SCALAR = {
    "s_mov_b32": lambda a, s: a,
    "s_mov_b64": lambda a, s: a,
    "s_movk_i32": lambda a, s: a,
    "s_cmov_b32": lambda a, b, s: a if s else b,
    "s_cmovk_i32": lambda a, b, s: a if s else b,
    "s_cselect_b32": lambda a, b, s: a if s else b,
    "s_cselect_b64": lambda a, b, s: a if s else b,
    "s_sext_i32_i16": lambda a, s: a,
    "s_brev_b32": lambda a, s: int(f"{a:032b}"[::-1], 2),
    "s_pack_ll_b32_b16": lambda a, b, s: a % 2**16 + b % 2**16 * 2**16,
    "s_pack_lh_b32_b16": lambda a, b, s: a % 2**16 + b // 2**16 * 2**16,
    "s_pack_hh_b32_b16": lambda a, b, s: a // 2**16 + b // 2**16 * 2**16,
    "s_bitset0_b32": lambda a, b, s: b & ~(1 << a % 32),
    "s_bitset1_b32": lambda a, b, s: b | 1 << a % 32,
    "s_ff1_i32_b64": lambda a, s: (a & -a).bit_length() - 1,
    "s_add_u32": lambda a, b, s: carry(a + b),
    "s_sub_u32": lambda a, b, s: carry(a - b),
    "s_addc_u32": lambda a, b, s: carry(a + b + s),
    "s_subb_u32": lambda a, b, s: carry(a - b - s),
    "s_add_i32": lambda a, b, s: overflow(a + b),
    "s_sub_i32": lambda a, b, s: overflow(a - b),
    "s_addk_i32": lambda a, b, s: overflow(a + b),
    "s_mulk_i32": lambda a, b, s: a * b,
    "s_mul_i32": lambda a, b, s: a * b,
    "s_mul_hi_u32": lambda a, b, s: a * b >> 32,
    "s_mul_hi_i32": lambda a, b, s: a * b >> 32,
    "s_abs_i32": lambda a, s: nonzero(abs(a), 32),
    "s_min_i32": lambda a, b, s: (min(a, b), a < b),
    "s_max_i32": lambda a, b, s: (max(a, b), a > b),
    "s_min_u32": lambda a, b, s: (min(a, b), a < b),
    "s_max_u32": lambda a, b, s: (max(a, b), a > b),
    "s_not_b32": lambda a, s: nonzero(~a, 32),
    "s_not_b64": lambda a, s: nonzero(~a, 64),
    "s_bcnt1_i32_b64": lambda a, s: nonzero(a.bit_count(), 32),
    "s_bfe_u32": lambda a, b, s: nonzero(field(a, b), 32),
    "s_bfe_i32": lambda a, b, s: nonzero(signed_field(a, b), 32),
    "s_ashr_i32": lambda a, b, s: nonzero(a >> b % 32, 32),
    "s_ashr_i64": lambda a, b, s: nonzero(a >> b % 64, 64),
    "s_bitcmp0_b32": lambda a, b, s: not a >> b % 32 & 1,
    "s_bitcmp1_b32": lambda a, b, s: a >> b % 32 & 1,
    "s_cmp_eq_u64": lambda a, b, s: a == b,
    "s_cmp_lg_u64": lambda a, b, s: a != b,
}
LOGIC = {
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "andn2": lambda a, b: a & ~b, "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b), "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
RELATIONS = {"eq": operator.eq, "lg": operator.ne, "lt": operator.lt, "le": operator.le,
             "gt": operator.gt, "ge": operator.ge}  # fmt: skip
SCALAR |= {
    f"s_{name}_b{bits}": lambda a, b, s, how=how, bits=bits: nonzero(how(a, b), bits)
    for bits in (32, 64)
    for name, how in LOGIC.items()
}
SCALAR |= {
    f"s_{name}_b{bits}": lambda a, b, s, how=how, bits=bits: nonzero(how(a, b % bits), bits)
    for bits in (32, 64)
    for name, how in (("lshl", operator.lshift), ("lshr", operator.rshift))
}
SCALAR |= {f"s_lshl{n}_add_u32": lambda a, b, s, n=n: carry((a << n) + b) for n in (1, 2, 3, 4)}
SCALAR |= {
    f"s_cmp{k}_{name}_{kind}": lambda a, b, s, how=how: how(a, b)
    for k in ("", "k")
    for kind in ("u32", "i32")
    for name, how in RELATIONS.items()
}
