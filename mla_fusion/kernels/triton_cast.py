"""How the Triton kernel converts a value to the type of the query or of the cache."""

from __future__ import annotations

import triton
import triton.language as tl


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
def query_slots(slot_ptr, token, inside, ALL_ROWS: tl.constexpr):
    """Below 0 for a row without a query: one that is masked out by `inside`, or of padding.

    ALL_ROWS: no row is padding. Under context parallelism -1 is also the slot of a token that
    another rank keeps in its cache.
    """
    if ALL_ROWS:
        return tl.where(inside, 0, -1)
    else:
        return tl.load(slot_ptr + token, mask=inside, other=-1)


@triton.jit
def factors_of(factor_ptr, token, inside):
    """The query's factors of `token` in fp32, unused if it has none; `inside` masks rows out."""
    if factor_ptr is None:
        return 1.0  # Triton 3.6 has no functions that return None
    else:
        return tl.load(factor_ptr + token, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, factor, SCALED: tl.constexpr, ACT: tl.constexpr):
    """fp32 `x` rounded to the activation type, times `factor`, rounded again, in fp32.

    Unless SCALED it stays as it is.
    """
    if SCALED:
        x = (x.to(ACT).to(tl.float32) * factor).to(ACT).to(tl.float32)
    return x
