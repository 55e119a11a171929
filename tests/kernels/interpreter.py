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

import functools

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


class CheckFailed(Exception):
    """A kernel accessed memory that it must not access."""


# The types that the stock interpreter keeps as bit patterns.
SMALL = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn,
         tl.float8e4b8: torch.float8_e4m3fnuz}  # fmt: skip


def is_small(dtype):
    return dtype.scalar in SMALL


def decode(handle):
    """The values of a handle, in fp32 if its type is small."""
    if not is_small(handle.dtype):
        return handle.data
    return torch.tensor(handle.data).view(SMALL[handle.dtype.scalar]).float().numpy()


def encode(values, dtype):
    """A handle of type `dtype` with `values` rounded to it, to even; fp8 saturates."""
    dtype, values = dtype.scalar, np.asarray(values)
    stored = stock._get_np_dtype(dtype)
    if dtype not in SMALL:
        return stock.TensorHandle(values.astype(stored), dtype)
    x = torch.tensor(values.astype(np.float32))
    if dtype != tl.bfloat16:
        limit = torch.finfo(SMALL[dtype]).max
        x = x.clamp(-limit, limit)
    bits = x.to(SMALL[dtype]).view(torch.uint8 if dtype != tl.bfloat16 else torch.int16)
    return stock.TensorHandle(bits.numpy().view(stored), dtype)


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
            what = f"{int(outside.sum())} lanes out of bounds in a {'store' if store else 'load'}"
            raise CheckFailed(f"program {program}: {what}")


@functools.cache
def install():
    """Repair the interpreter of this process, before the first launch."""
    builder, checker = stock.InterpreterBuilder, Checker()
    stock_unary, stock_binary = builder.unary_op, builder.binary_op
    stock_ternary, stock_fma = builder.ternary_op, builder.create_fma
    stock_cast, stock_sum = builder.cast_impl, stock.ReduceOps.sum

    def cast(self, source, target):
        if source.dtype.scalar == target.scalar:
            return stock.TensorHandle(source.data, target.scalar)
        if is_small(source.dtype) or is_small(target):
            return encode(decode(source), target)
        return stock_cast(self, source, target)

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
        if not is_small(z.dtype):
            return stock_fma(self, x, y, z)
        wide = decode(x).astype(np.float64) * decode(y) + decode(z)
        return encode(wide.astype(np.float32), z.dtype)

    builder.cast_impl = cast
    builder.create_fp_to_fp = lambda self, source, target, rounding: cast(self, source, target)
    builder.binary_op, builder.unary_op, builder.ternary_op = binary, unary, ternary
    builder.create_dot, builder.create_fma, stock.ReduceOps.sum = dot, fma, reduce_sum
    # Half of the time of a launch: the overflow of each sum and product, for an assertion that is
    # off, and a dictionary of all types for each array.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *unused: None
    stock_numpy, numpy_types = stock._get_np_dtype, {}

    def numpy_type(of):
        if of.name not in numpy_types:
            numpy_types[of.name] = stock_numpy(of)
        return numpy_types[of.name]

    stock._get_np_dtype = numpy_type
    # A third: stock Triton patches its language anew for each call of a device function.
    patched = set()

    def call(self, *arguments, **keywords):
        module = self.fn.__module__
        if module not in patched:
            patched.add(module)
            stock._patch_lang(self.fn)
        return self.rewrite()(*arguments, **keywords)

    stock.InterpretedFunction.__call__ = call
    executor, stock_init = stock.GridExecutor, stock.GridExecutor._init_args_hst
    stock_load, stock_store = builder.create_masked_load, builder.create_masked_store

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
