"""A repaired Triton interpreter, with bounds and write-race checks.

Triton's CPU interpreter (3.6 to 3.9) is silently wrong for small floating-point types: bf16
arithmetic runs on the bit patterns as integers, fp32 -> bf16 truncates, conversions to fp8
neither round to even nor saturate, and a broadcast comparison of a scalar loses its boolean type.
`install()` replaces those operations in this process: small values are computed in fp32 and rounded
once, as on a GPU.

Checks, which raise `CheckFailed`:
    bounds   every unmasked lane addresses the storage of a tensor argument
    races    no two programs of one launch store to the same byte

Only processes started with TRITON_INTERPRET=1 can use this module.
"""

import dataclasses
import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


class CheckFailed(Exception):
    """A kernel accessed memory that it must not access."""


@dataclasses.dataclass(frozen=True)
class Fp8:
    """An 8-bit format without infinities: 1 sign bit, `exponent` bits, the rest mantissa.

    fnuz: negative zero is the only NaN; otherwise the all-ones magnitude is NaN.
    """

    exponent: int
    bias: int
    fnuz: bool

    @property
    def nan(self):
        """The NaN code."""
        return 0x80 if self.fnuz else 0x7F

    def values(self):
        """The value of every code 0 ... 255, float64."""
        code = np.arange(256)
        mantissa_bits = 7 - self.exponent
        exponent = (code >> mantissa_bits) & ((1 << self.exponent) - 1)
        mantissa = (code & ((1 << mantissa_bits) - 1)) / 2.0**mantissa_bits
        magnitude = np.where(
            exponent == 0,
            mantissa * 2.0 ** (1 - self.bias),
            (1 + mantissa) * 2.0 ** (exponent - self.bias),
        )
        value = np.where(code & 0x80, -magnitude, magnitude)
        value[self.nan] = np.nan
        if not self.fnuz:
            value[0xFF] = np.nan
        return value

    def encode(self, x):
        """fp32 `x` as codes: nearest, ties to the even code, saturating, NaN to NaN."""
        positive = self.values()[:0x80]
        positive = positive[np.isfinite(positive)]
        midpoints = (positive[:-1] + positive[1:]) / 2
        magnitude = np.minimum(np.abs(x.astype(np.float64)), positive[-1])
        code = np.searchsorted(midpoints, magnitude, side="left")
        tie = (code < len(midpoints)) & (
            midpoints[np.minimum(code, len(midpoints) - 1)] == magnitude
        )
        code = code + (tie & (code % 2 == 1))
        signed = np.signbit(x) & ((code != 0) | (not self.fnuz))
        code = np.where(signed, code | 0x80, code)
        return np.where(np.isnan(x), self.nan, code).astype(np.uint8)


FORMATS = {
    tl.float8e4nv: Fp8(exponent=4, bias=7, fnuz=False),
    tl.float8e4b8: Fp8(exponent=4, bias=8, fnuz=True),
}
TABLES = {dtype: form.values().astype(np.float32) for dtype, form in FORMATS.items()}


def bf16_decode(raw):
    """fp32 values of bf16 bit patterns."""
    return (raw.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)


def bf16_encode(x):
    """bf16 bit patterns of fp32 `x`, nearest with ties to even; NaN becomes the quiet NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def is_small(dtype):
    """Whether the stock interpreter keeps `dtype` as bit patterns."""
    return dtype.scalar == tl.bfloat16 or dtype.scalar in FORMATS


def decode(handle):
    """The values of a handle, in fp32 if its type is small."""
    dtype = handle.dtype.scalar
    if dtype == tl.bfloat16:
        return bf16_decode(handle.data)
    if dtype in FORMATS:
        return TABLES[dtype][handle.data.view(np.uint8)]
    return handle.data


def encode(values, dtype):
    """A handle of type `dtype` with `values` rounded to it."""
    dtype = dtype.scalar
    values = np.asarray(values)
    if dtype == tl.bfloat16:
        data = bf16_encode(values.astype(np.float32))
    elif dtype in FORMATS:
        data = FORMATS[dtype].encode(values.astype(np.float32))
    else:
        data = values.astype(stock._get_np_dtype(dtype))
    return stock.TensorHandle(data, dtype)


class Checker:
    """Bounds and race checks of one launch, called for every load and store.

    owners: (first byte, last, and for each byte the number of the program that stored it) of the
    storages of the launch's arguments.
    """

    def __init__(self):
        self.owners, self.numbers = [], {}

    def begin(self, arguments):
        """Start a launch whose tensor arguments may be addressed."""
        storages = [x.untyped_storage() for x in arguments if hasattr(x, "untyped_storage")]
        spans = {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages}
        self.owners = [(*span, np.zeros(span[1] - span[0], np.int32)) for span in spans]
        self.numbers = {}

    def access(self, pointers, mask, program, store):
        """Check one load or store; `mask` says which lanes take part."""
        addresses, mask = np.broadcast_arrays(pointers.data, mask)
        addresses = addresses[mask.astype(bool)].astype(np.int64)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        number = self.numbers.setdefault(program, len(self.numbers) + 1)
        outside = np.ones(addresses.shape, bool)
        for begin, end, owners in self.owners:
            inside = (addresses >= begin) & (addresses + width <= end)
            outside &= ~inside
            if store:
                stored = (addresses[inside, None] - begin + np.arange(width)).ravel()
                others = owners[stored]
                if ((others != 0) & (others != number)).any():
                    raise CheckFailed(f"program {program}: a store to one byte of another's")
                owners[stored] = number
        if outside.any():
            raise CheckFailed(
                f"program {program}: {int(outside.sum())} lanes out of bounds in a "
                f"{'store' if store else 'load'}"
            )


@functools.cache
def install():
    """Repair the interpreter of this process, before the first launch."""
    builder, checker = stock.InterpreterBuilder, Checker()
    stock_binary, stock_unary, stock_ternary = (
        builder.binary_op,
        builder.unary_op,
        builder.ternary_op,
    )
    stock_cast, stock_sum = builder.cast_impl, stock.ReduceOps.sum

    def cast(self, source, target):
        if source.dtype.scalar == target.scalar:
            return stock.TensorHandle(source.data, target.scalar)
        if is_small(source.dtype) or is_small(target):
            return encode(decode(source), target)
        return stock_cast(self, source, target)

    def convert(self, source, target, rounding):
        return cast(self, source, target)

    def binary(self, left, right, op):
        if op in COMPARISONS:
            return stock.TensorHandle(op(decode(left), decode(right)), tl.int1)
        if is_small(left.dtype) and op not in BITWISE:
            return encode(op(decode(left), decode(right)), left.dtype)
        return stock_binary(self, left, right, op)

    def unary(self, value, op):
        if is_small(value.dtype):
            return encode(op(decode(value)), value.dtype)
        return stock_unary(self, value, op)

    def ternary(self, a, b, c, op):
        if is_small(c.dtype) and op is not np.where:
            return encode(op(decode(a), decode(b), decode(c)), c.dtype)
        return stock_ternary(self, a, b, c, op)

    def dot(self, a, b, c, *precision):
        product = np.matmul(decode(a), decode(b), dtype=c.data.dtype)
        return stock.TensorHandle(product + c.data, c.dtype.scalar)

    def reduce_sum(self, value):
        if not is_small(value.dtype):
            return stock_sum(self, value)
        total = np.sum(decode(value.handle), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(encode(total, value.dtype).data, value.dtype)

    def fma(self, x, y, z):
        wide = decode(x).astype(np.float64) * decode(y) + decode(z)
        return encode(wide.astype(np.float32), z.dtype)

    builder.cast_impl, builder.create_fp_to_fp = cast, convert
    builder.binary_op, builder.unary_op, builder.ternary_op = binary, unary, ternary
    builder.create_dot, stock.ReduceOps.sum = dot, reduce_sum
    stock_fma = builder.create_fma
    builder.create_fma = lambda self, x, y, z: (
        fma(self, x, y, z) if is_small(z.dtype) else stock_fma(self, x, y, z)
    )
    # Stock Triton patches its language anew for each call of a device function, a third of the time
    # of a launch.
    patched = set()

    def call(self, *arguments, **keywords):
        module = self.fn.__module__
        if module not in patched:
            patched.add(module)
            stock._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    stock.InterpretedFunction.__call__ = call
    executor = stock.GridExecutor
    stock_init, stock_load, stock_store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def initialize(self, arguments, keywords):
        result = stock_init(self, arguments, keywords)
        patched.clear()
        checker.begin([*result[0], *result[1].values()])
        return result

    def load(self, pointers, mask, *rest):
        checker.access(pointers, mask.data, self.grid_idx, store=False)
        return stock_load(self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest):
        checker.access(pointers, mask.data, self.grid_idx, store=True)
        return stock_store(self, pointers, value, mask, *rest)

    executor._init_args_hst = initialize
    builder.create_masked_load, builder.create_masked_store = load, store
