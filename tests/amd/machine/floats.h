/* Arithmetic that C does not have: AMD's minima, division steps, conversions and bit operations.

   After "AMD Instinct MI300 Instruction Set Architecture" and its successor for CDNA 4. Denormals
   are kept and IEEE mode is on: the kernel descriptor says so, and execute.py checks that. */

static inline f32 as_f32(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline u32 as_u32(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }

static inline f32 quiet(f32 x) { return as_f32(as_u32(x) | 0x00400000u); }
static inline int signalling(f32 x) { return isnan(x) && !(as_u32(x) & 0x00400000u); }

/* IEEE mode: a signalling NaN is the result, quieted; a quiet one loses to a number. */
static inline f32 smaller(f32 a, f32 b)
{
    if (signalling(a)) return quiet(a);
    if (signalling(b)) return quiet(b);
    if (isnan(a)) return b;
    if (isnan(b)) return a;
    if (a == 0 && b == 0) return signbit(a) ? a : b;
    return a < b ? a : b;
}

static inline f32 larger(f32 a, f32 b)
{
    if (signalling(a)) return quiet(a);
    if (signalling(b)) return quiet(b);
    if (isnan(a)) return b;
    if (isnan(b)) return a;
    if (a == 0 && b == 0) return signbit(a) ? b : a;
    return a > b ? a : b;
}

/* The smallest if one is NaN, else the middle one. */
static inline f32 median(f32 a, f32 b, f32 c)
{
    if (isnan(a) || isnan(b) || isnan(c)) return smaller(smaller(a, b), c);
    f32 most = larger(larger(a, b), c);
    if (most == a) return larger(b, c);
    return most == b ? larger(a, c) : larger(a, b);
}

/* As smaller and larger, but any NaN is the result (gfx950). */
static inline f32 least(f32 a, f32 b, f32 c)
{
    if (isnan(a) || isnan(b) || isnan(c)) return quiet(isnan(a) ? a : isnan(b) ? b : c);
    return smaller(smaller(a, b), c);
}

static inline f32 most(f32 a, f32 b, f32 c)
{
    if (isnan(a) || isnan(b) || isnan(c)) return quiet(isnan(a) ? a : isnan(b) ? b : c);
    return larger(larger(a, b), c);
}

/* The result of an instruction of 1 ulp accuracy: to nearest, or upwards or downwards as the run
   asks for. */
static inline f32 approximate(const Machine *m, double x)
{
    f32 near = (f32)x;
    if (!isfinite(near) || near == 0) return near;
    if (m->rounding > 0 && near < x) return nextafterf(near, INFINITY);
    if (m->rounding < 0 && near > x) return nextafterf(near, -INFINITY);
    return near;
}

static inline int exponent(f32 x) { return as_u32(x) >> 23 & 255; }
static inline int denormal(f32 x) { return exponent(x) == 0 && x != 0; }

/* v_div_scale: a scaled so that the refinement of c / b neither overflows nor loses bits. */
static inline f32 division_scaled(f32 a, f32 b, f32 c, int *rescale)
{
    *rescale = 0;
    if (c == 0 || b == 0) return NAN;
    f32 inverse = (f32)(1.0 / (double)b), quotient = (f32)((double)c / (double)b);
    if (exponent(c) - exponent(b) >= 96) {
        *rescale = 1;
        return a == b ? ldexpf(a, 64) : a;
    }
    if (denormal(inverse) && denormal(quotient)) { /* by 2^-64, or the division would overflow */
        *rescale = 1;
        return a == b ? ldexpf(a, -64) : a;
    }
    if (denormal(b)) return ldexpf(a, 64);
    if (denormal(inverse)) return ldexpf(a, -64);
    if (denormal(quotient)) {
        *rescale = 1;
        return a == c ? ldexpf(a, 64) : a;
    }
    return exponent(c) <= 23 ? ldexpf(a, 64) : a;
}

static inline f32 division_step(f32 a, f32 b, f32 c, int rescale)
{
    f32 x = fmaf(a, b, c);
    return rescale ? ldexpf(x, exponent(c) > 127 ? 64 : -64) : x;
}

/* v_div_fixup: the quotient, or what IEEE asks for where an operand is special. */
static inline f32 division_fixed(f32 quotient, f32 b, f32 a)
{
    u32 sign = (as_u32(a) ^ as_u32(b)) & 0x80000000u;
    if (isnan(a)) return quiet(a);
    if (isnan(b)) return quiet(b);
    if ((a == 0 && b == 0) || (isinf(a) && isinf(b))) return as_f32(0xffc00000u);
    if (b == 0 || isinf(a)) return as_f32(sign | 0x7f800000u);
    if (a == 0 || isinf(b)) return as_f32(sign);
    if (isnan(quotient)) return as_f32(sign | 0x7f800000u);
    return as_f32(sign | (as_u32(quotient) & 0x7fffffffu));
}

static inline u32 to_bf16(f32 x)
{
    u32 bits = as_u32(x);
    return isnan(x) ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline f32 from_bf16(u32 x) { return as_f32(x << 16); }

static inline u32 to_f16(f32 x)
{
    _Float16 half = (_Float16)x;
    u16 bits;
    memcpy(&bits, &half, 2);
    return bits;
}

static inline f32 from_f16(u32 x)
{
    u16 bits = (u16)x;
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (f32)half;
}

/* e4m3, to nearest even. FP16_OVFL in the MODE register saturates; else out of range is NaN. Whether
   infinity saturates too is not documented: here it does not, so that code which relies on it is
   seen. */
static u32 to_fp8(f32 x, int fnuz, u32 mode)
{
    int bias = fnuz ? 8 : 7, lowest = 1 - bias, power;
    u32 sign = (as_u32(x) >> 31) << 7, nan = fnuz ? 0x80 : 0x7f | sign;
    u32 over = mode >> 23 & 1 ? (fnuz ? 0x7f : 0x7e) | sign : nan;
    if (isnan(x) || isinf(x)) return nan;
    double size = fabs((double)x);
    frexp(size, &power);
    power = power - 1 < lowest ? lowest : power - 1;
    double rounded = ldexp(nearbyint(ldexp(size, 3 - power)), power - 3);
    if (rounded > (fnuz ? 240 : 448)) return over;
    if (rounded == 0) return fnuz ? 0 : sign;
    frexp(rounded, &power);
    if (--power < lowest) return sign | (u32)ldexp(rounded, 3 - lowest);
    return sign | (u32)(power + bias) << 3 | ((u32)ldexp(rounded, 3 - power) - 8);
}

static f32 from_fp8(u32 x, int fnuz)
{
    int bias = fnuz ? 8 : 7, power = x >> 3 & 15, fraction = x & 7;
    if (fnuz ? (x & 255) == 0x80 : (x & 0x7f) == 0x7f) return NAN;
    f32 size = power ? ldexpf(8 + fraction, power - bias - 3) : ldexpf(fraction, -2 - bias);
    return x & 0x80 ? -size : size;
}

static inline u32 half_of(u32 x, int high) { return high & 1 ? x >> 16 : x & 0xffff; }

/* Two numbers in fp8 in one half of a register, whose other half stays. */
static inline u32 fp8_into(const Machine *m, const Wave *w, u32 old, f32 a, f32 b, int high)
{
    u32 x = to_fp8(a, m->fnuz, w->mode) | to_fp8(b, m->fnuz, w->mode) << 8;
    return high & 1 ? (old & 0xffffu) | x << 16 : (old & 0xffff0000u) | x;
}

static inline u64 f32_pair(const Machine *m, u32 x)
{
    return (u64)as_u32(from_fp8(x >> 8, m->fnuz)) << 32 | as_u32(from_fp8(x, m->fnuz));
}

static inline u32 bf16_pair(const Machine *m, u32 x)
{
    return to_bf16(from_fp8(x, m->fnuz)) | to_bf16(from_fp8(x >> 8, m->fnuz)) << 16;
}

/* A source of v_fma_mix: fp32, or the half of it that op_sel names. Its sign was changed as that of
   an fp32 number, which for the lower half is another bit. */
static inline f32 mixed(const Instruction *i, int k, u32 x)
{
    u32 sign = i->source[k].negate ? 0x80000000u : 0;
    if (!(i->op_sel_hi >> k & 1)) return as_f32(x);
    f32 half = from_f16(half_of(x ^ sign, i->op_sel >> k));
    return sign ? -half : half;
}

/* v_perm_b32: bytes 0 to 3 are b's, 4 to 7 a's; above 7 signs of halves, 0 and 255. */
static inline u32 permuted(u32 a, u32 b, u32 choice)
{
    u64 bytes = (u64)a << 32 | b;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        u32 which = choice >> 8 * k & 255, byte;
        if (which > 12) byte = 255;
        else if (which == 12) byte = 0;
        else if (which > 7) byte = bytes >> (16 * (which - 8) + 15) & 1 ? 255 : 0;
        else byte = bytes >> 8 * which & 255;
        result |= byte << 8 * k;
    }
    return result;
}

static inline u32 reversed(u32 x)
{
    u32 result = 0;
    for (int k = 0; k < 32; k++) result |= (x >> k & 1) << (31 - k);
    return result;
}

/* v_bitop3: bit a * 4 + b * 2 + c of the table, for each bit. */
static inline u32 by_table(u32 a, u32 b, u32 c, u32 table)
{
    u32 result = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return result;
}

static inline u32 field(u32 x, u32 offset, u32 width)
{
    return x >> (offset & 31) & ((1u << (width & 31)) - 1);
}

static inline u32 signed_field(u32 x, u32 offset, u32 width)
{
    width &= 31;
    return width ? (u32)((i32)(x >> (offset & 31) << (32 - width)) >> (32 - width)) : 0;
}

static inline int overflows(i64 a, i64 b) { return __builtin_add_overflow_p(a, b, (i64)0); }
static inline i32 signed24(u32 x) { return (i32)(x << 8) >> 8; }
static inline u32 lower_lanes(int lane) { return lane >= 32 ? 0xffffffffu : (1u << lane) - 1; }
static inline u32 upper_lanes(int lane) { return lane >= 32 ? (1u << (lane - 32)) - 1 : 0; }

static inline u32 f32_to_u32(f32 x)
{
    if (isnan(x) || x <= 0) return 0;
    return x >= 4294967296.0f ? 0xffffffffu : (u32)x;
}

static inline i32 f32_to_i32(f32 x)
{
    if (isnan(x)) return 0;
    if (x >= 2147483648.0f) return 0x7fffffff;
    return x < -2147483648.0f ? (i32)0x80000000 : (i32)x;
}
