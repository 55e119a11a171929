"""The arguments of a launch of the fused region; types, scales and slots of query and cache."""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

# As `kernels.fused_mla_decode_prep` has them; strides in elements, of a stated dimension.
Given = namedtuple(
    "Given",
    "q w kv_c k_pe cache slot position cos_sin k_scale q_scale factor out tokens heads q_row "
    "q_head w_head w_row w_col kv_c_row k_pe_row cache_block cache_entry cos_sin_row",
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
    """fp32 `x` in DTYPE: scaled, clamped (NaN stays NaN) and rounded to nearest even.

    A negative LIMIT says that the conversion of this device clamps by itself.
    """
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
