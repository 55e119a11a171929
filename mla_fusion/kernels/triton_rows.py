"""The programs beside the product, for rotated query rows and cache rows, and what both share.

A program works on a tile of rows: the loads of slot, position and angles depend on each other, and
such a chain for each row would take most of the time of a large batch.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# As `kernels.fused_mla_decode_prep` has them; strides in elements, of a stated dimension.
Given = namedtuple(
    "Given",
    "q w kv_c k_pe cache slot position cos_sin k_scale q_scale factor out tokens heads q_row "
    "q_head w_head w_row w_col kv_c_row k_pe_row cache_block cache_entry cos_sin_row norm",
)


@triton.jit
def inverse_of(scale_ptr, LIMIT: tl.constexpr):
    """1 / scale with IEEE rounding where the target is fp8 (LIMIT not 0), else unused."""
    if LIMIT != 0:
        return tl.div_rn(1.0, tl.load(scale_ptr).to(tl.float32))
    else:
        return 1.0


@triton.jit
def cast(x, inverse, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """fp32 `x` in DTYPE: scaled, clamped (NaN stays NaN) and rounded to nearest even. A negative
    LIMIT says that the conversion of this device clamps by itself."""
    if LIMIT != 0:
        x = x * inverse
    if LIMIT > 0:
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def query_slots(given, token, ALL_ROWS: tl.constexpr):
    """Below 0 for a row without a query: one beyond the tokens, or of padding, which no row is with
    ALL_ROWS: under context parallelism -1 is the slot of a token that another rank keeps."""
    inside = token < given.tokens
    if ALL_ROWS:
        return tl.where(inside, 0, -1)
    else:
        return tl.load(given.slot + token, mask=inside, other=-1)


@triton.jit
def factors_of(given, token):
    """The query's factors of `token` in fp32, unused if it has none."""
    if given.factor is None:
        return 1.0  # Triton 3.6 has no functions that return None
    else:
        return tl.load(given.factor + token, mask=token < given.tokens, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, factor, SCALED: tl.constexpr, ACT: tl.constexpr):
    """fp32 `x`, if SCALED rounded to the activation type, times `factor`, and rounded again."""
    if SCALED:
        x = (x.to(ACT).to(tl.float32) * factor).to(ACT).to(tl.float32)
    return x


@triton.jit
def _rope_rows(
    src, dst, rows, cos_sin, valid, inverse, factor, form: tl.constexpr, LIMIT: tl.constexpr,
    SCALED: tl.constexpr, ZERO_INVALID: tl.constexpr,
):  # fmt: skip
    """RoPE of rows of R elements, to which `src`, `dst` and `cos_sin` are [ROWS, 1] pointers, times
    `factor` if SCALED; `rows` masks them, those not `valid` become zeros if ZERO_INVALID."""
    DTYPE: tl.constexpr = dst.dtype.element_ty
    ACT: tl.constexpr = src.dtype.element_ty
    R: tl.constexpr = form.R
    R_PAD: tl.constexpr = form.R_PAD
    HALF: tl.constexpr = R // 2
    cols = tl.arange(0, R_PAD)[None, :]
    stored = rows if ZERO_INVALID else rows & valid
    if form.ROPE:
        pair = tl.arange(0, R_PAD // 2)[None, :]
        inside = rows & (pair < HALF)
        cos = tl.load(cos_sin + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    if form.ROPE and form.NEOX:
        a = tl.load(src + pair, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(src + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        first = scaled(a * cos - b * sin, factor, SCALED, ACT)
        second = scaled(b * cos + a * sin, factor, SCALED, ACT)
        first = cast(first, inverse, tl.float32, LIMIT)
        second = cast(second, inverse, tl.float32, LIMIT)
        if ZERO_INVALID:
            first = tl.where(valid, first, 0.0)
            second = tl.where(valid, second, 0.0)
        tl.store(dst + pair, first.to(DTYPE), mask=stored & (pair < HALF))
        tl.store(dst + HALF + pair, second.to(DTYPE), mask=stored & (pair < HALF))
    else:
        x = tl.load(src + cols, mask=rows & (cols < R), other=0.0).to(tl.float32)
        if form.ROPE:
            # Accesses of whole rows are wide; pairs are split in registers.
            a, b = tl.split(tl.reshape(x, (src.shape[0], R_PAD // 2, 2)))
            x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (src.shape[0], R_PAD))
        y = cast(scaled(x, factor, SCALED, ACT), inverse, tl.float32, LIMIT)
        if ZERO_INVALID:
            y = tl.where(valid, y, 0.0)
        tl.store(dst + cols, y.to(DTYPE), mask=stored & (cols < R))


@triton.jit
def _angles(given, token, slot, ROPE: tl.constexpr):
    """Pointers to the rows of cosines and sines of `token`; a padded row uses position 0."""
    if ROPE:
        position = tl.load(given.position + token, mask=token < given.tokens, other=0)
        return given.cos_sin + tl.where(slot >= 0, position, 0) * given.cos_sin_row
    else:
        return given.cos_sin + token * 0


@triton.jit
def _normalized(x, given, cols, form: tl.constexpr):
    """RMSNorm of fp32 rows `x` [TOKENS, L_PAD], zero from column L on, rounded once to the
    activation type, as fp32."""
    ACT: tl.constexpr = given.kv_c.dtype.element_ty
    weight = tl.load(given.norm + cols, mask=cols < form.L, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / form.L)
    return (x * tl.rsqrt(mean + form.EPSILON) * weight).to(ACT).to(tl.float32)


@triton.jit
def cache_rows(given, unit, form: tl.constexpr):
    """cast(kv_c | rope(k_pe)) of CACHE_TOKENS tokens, kv_c normalized if there is a weight; a slot
    below 0 writes nothing."""
    CACHE_TOKENS: tl.constexpr = form.plan.cache_tokens
    token = unit * CACHE_TOKENS + tl.arange(0, CACHE_TOKENS)[:, None]
    inside = token < given.tokens
    slot = tl.load(given.slot + token, mask=inside, other=-1)
    angles = _angles(given, token, slot, form.ROPE)
    valid = slot >= 0
    inverse = inverse_of(given.k_scale, form.K_LIMIT)
    cols = tl.arange(0, form.L_PAD)[None, :]
    wanted = inside & (cols < form.L)
    latent = tl.load(given.kv_c + token * given.kv_c_row + cols, mask=wanted, other=0.0)
    slot = tl.where(valid, slot, 0)
    row = slot // form.BLOCK_SIZE * given.cache_block + slot % form.BLOCK_SIZE * given.cache_entry
    latent = latent.to(tl.float32)
    if given.norm is not None:
        latent = _normalized(latent, given, cols, form)
    latent = cast(latent, inverse, given.cache.dtype.element_ty, form.K_LIMIT)
    tl.store(given.cache + row + cols, latent, mask=valid & (cols < form.L))
    _rope_rows(
        given.k_pe + token * given.k_pe_row, given.cache + row + form.L, inside, angles, valid,
        inverse, 1.0, form, form.K_LIMIT, False, False,
    )  # fmt: skip


@triton.jit
def rotated_rows(given, unit, form: tl.constexpr):
    """RoPE of ROPE_ROWS rows of q_pe [tokens * heads, R]. Returns their numbers, which are inside
    of the batch, their slots, and 1 / scale. ONE_TOKEN: a token's are loaded once for all."""
    ROPE_ROWS: tl.constexpr = form.plan.rope_rows
    row = unit * ROPE_ROWS + tl.arange(0, ROPE_ROWS)[:, None]
    TOKENS: tl.constexpr = 1 if form.ONE_TOKEN else ROPE_ROWS
    token = (unit * ROPE_ROWS + tl.arange(0, TOKENS)[:, None]) // given.heads
    inside = token < given.tokens
    slot = query_slots(given, token, form.ALL_ROWS)
    angles = _angles(given, token, slot, form.ROPE)
    inverse = inverse_of(given.q_scale, form.Q_LIMIT)
    q = given.q + token * given.q_row + (row % given.heads) * given.q_head + form.P
    _rope_rows(
        q, given.out + row * (form.L + form.R) + form.L, inside, angles, slot >= 0, inverse,
        factors_of(given, token), form, form.Q_LIMIT, given.factor is not None, True,
    )  # fmt: skip
    return row, inside, slot, inverse


@triton.jit
def query_rows(given, unit, form: tl.constexpr):
    """`rotated_rows`, and zeros in the latent part of those that are padding."""
    row, inside, slot, _ = rotated_rows(given, unit, form)
    cols = tl.arange(0, form.L_PAD)[None, :]
    out = given.out + row * (form.L + form.R) + cols
    # Not stored by the product: a mask on its stores is cheaper than a select for each element.
    padded = inside & (slot < 0)
    if tl.max(tl.reshape(padded.to(tl.int32), (padded.shape[0],)), axis=0) > 0:
        zero = tl.zeros(out.shape, tl.float32).to(given.out.dtype.element_ty)
        tl.store(out, zero, mask=padded & (cols < form.L))
