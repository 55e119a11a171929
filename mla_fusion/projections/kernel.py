"""Triton kernels for x @ w.T with up to 16 rows of x, where a GPU's time is reading w.

A CTA has BLOCK_N rows of a weight and all of K, in the registers of its warps. It loads them before
`gdc_wait`, while the launch in front still computes x: weights are parameters, which no kernel
writes. Behind `gdc_wait` come the loads of x, the sums in fp32, and the store.

No CTA ends, writes, or lets the launch behind begin before its `gdc_wait`: that one may be a kernel
of Inductor's, which reads without a wait what the launch in front of this one wrote. See
"Programmatic launch" in docs/kernels.md.

`block` takes weights in block fp8, and x in bf16, which it rounds to e4m3 by groups of 128 as
vLLM's op does: values times 448 / the largest.

A norm beside a product is a launch of the same kind: behind one of Inductor's, which lets no launch
begin early, the weights of the product would load when the norm has ended.
"""

# ruff: noqa: RUF005 (Triton 3.6 does not unpack a tuple within another)
from __future__ import annotations

import triton
import triton.language as tl

PIECE = tl.constexpr(16)  # loads of x, each 4 registers of a thread, that `vector` has under way
# They differ between calls of one layer, and compile no variant of their own.
NUMBERS = ["x_row", "tokens"]


@triton.jit
def _weight_of(pid, w0, w1, y0, y1, n0, n1, row0, row1, BLOCK_N: tl.constexpr, TWO: tl.constexpr):
    """Weight, output, their rows and columns, the weight's row stride, and the first row of program
    `pid`. Programs of the first weight come first."""
    w, y, n, row, block = w0, y0, n0, row0, pid
    if TWO:
        first = tl.cdiv(n0, BLOCK_N)
        if pid >= first:
            w, y, n, row, block = w1, y1, n1, row1, pid - first
    return w, y, n, row, block * BLOCK_N


@triton.jit
def _load(ptr, row, rows, k, K: tl.constexpr, FULL_ROWS: tl.constexpr, FULL_K: tl.constexpr):
    """Elements behind `ptr`, zeros beyond `rows` and K. Loads without a mask are wide for sure.

    Every load is [n * W, 256], in which a warp has each W-th row: of two dimensions Triton splits
    the first among the warps, and of three one release splits another than the next."""
    if FULL_ROWS and FULL_K:
        x = tl.load(ptr)
    elif FULL_K:
        x = tl.load(ptr, mask=(row < rows) & (k >= 0), other=0.0)
    else:
        x = tl.load(ptr, mask=(row < rows) & (k < K), other=0.0)
    return x


@triton.jit
def _behind(x, other, number):
    """x, of 16 or 32 bits, as if it needed `other` too. Else the assembler issues a load just in
    front of what reads it, and each takes a trip to memory. number: below 2^16, as the assembler
    does not know."""
    pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    kind: tl.constexpr = tl.int16 if pack == 2 else tl.int32
    zero = tl.zeros(x.shape, kind) + (number >> 16).to(kind)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xF8;", "=r,r,r,r", [x, other, zero], x.dtype, True, pack
    )


@triton.jit
def _widen(x, PDL: tl.constexpr):
    """x in fp32. For a pair of bf16 Triton takes three instructions, this takes two."""
    if PDL and x.dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2
        )
    return x.to(tl.float32)


@triton.jit(do_not_specialize=NUMBERS)
def vector(
    x_ptr, w0, w1, y0, y1, n0, n1, row0, row1, x_row, tokens,
    K: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
    W: tl.constexpr, FULL_N: tl.constexpr, FULL_K: tl.constexpr, TWO: tl.constexpr,
    ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Token `program_id(1)`: each of W warps has BLOCK_N / W whole rows, lane i 8 elements of each
    256. Weights may be fp32."""
    w, y, end, row, start = _weight_of(
        tl.program_id(0), w0, w1, y0, y1, n0, n1, row0 * ALIGN, row1 * ALIGN, BLOCK_N, TWO
    )
    x_ptr += tl.program_id(1) * x_row * ALIGN
    y += tl.program_id(1) * end
    R: tl.constexpr = BLOCK_N // W
    warp, inner = tl.arange(0, W)[:, None], tl.arange(0, 256)[None, :]
    tiles = ()
    for i in tl.static_range(AHEAD):
        for r in tl.static_range(R):
            n, k = start + r * W + warp, i * 256 + inner
            tiles = tiles + (_load(w + n * row + k, n, end, k, K, FULL_N, FULL_K),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i in tl.static_range(AHEAD, CHUNKS):
        for r in tl.static_range(R):
            n, k = start + r * W + warp, i * 256 + inner
            tiles = tiles + (_load(w + n * row + k, n, end, k, K, FULL_N, FULL_K),)
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros((W, 256), tl.float32),)
    for p in tl.static_range(0, CHUNKS, PIECE):
        xs = ()
        for i in tl.static_range(PIECE):
            if p + i < CHUNKS:
                k = (p + i) * 256 + inner + 0 * warp
                xs = xs + (_load(x_ptr + k, warp, W, k, K, True, FULL_K),)
        first = xs[0]
        for i in tl.static_range(1, PIECE):
            if PDL and p + i < CHUNKS:
                first = _behind(first, xs[i], tokens)
        for i in tl.static_range(PIECE):
            if p + i < CHUNKS:
                x = _widen(first if i == 0 else xs[i], PDL)
                more = ()
                for r in tl.static_range(R):
                    more = more + (sums[r] + _widen(tiles[(p + i) * R + r], PDL) * x,)
                sums = more
    for r in tl.static_range(R):
        n = start + r * W + tl.arange(0, W)
        tl.store(y + n, tl.sum(sums[r], axis=1).to(y.dtype.element_ty), mask=n < end)


@triton.jit
def _fragments(
    ptr, row, first, end, start, K: tl.constexpr, ROWS: tl.constexpr, J: tl.constexpr,
    W: tl.constexpr, FULL_ROWS: tl.constexpr, FULL_K: tl.constexpr, V: tl.constexpr = 8,
    E: tl.constexpr = 2,
):  # fmt: skip
    """[W, ROWS, J * 4 * V] elements of a matrix, as operand of a matrix instruction without a trip
    through shared memory: a slice of K for each of W warps, in an order of K in which the V
    elements that a lane loads at once are those that it must hold, each E of them neighbours. Both
    operands have that order, and the order of a sum's terms is free."""
    split = tl.arange(0, ROWS // 8 * J * W)[:, None]
    part, warp = split // W, split % W
    inner = tl.arange(0, 32 * V)[None, :]
    r = first + part // J * 8 + inner // (4 * V)
    k = start + (warp * J + part % J) * (4 * V) + inner % (4 * V)
    x = _load(ptr + r * row + k, r, end, k, K, FULL_ROWS, FULL_K)
    # [8 rows, 4 * V of K, warp, row, lane % 4, V / E of K, E]
    x = tl.reshape(x, (ROWS // 8, J, W, 8, 4, V // E, E))
    return tl.reshape(tl.permute(x, (2, 0, 3, 1, 5, 4, 6)), (W, ROWS, J * 4 * V))


@triton.jit(do_not_specialize=NUMBERS)
def matrix(
    x_ptr, w0, w1, y0, y1, n0, n1, row0, row1, x_row, tokens,
    K: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, J: tl.constexpr,
    CHUNKS: tl.constexpr, AHEAD: tl.constexpr, W: tl.constexpr, FULL_N: tl.constexpr,
    FULL_K: tl.constexpr, TWO: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to TILE tokens, 8 or 16, by matrix instructions: each of W warps has a slice of K of all
    BLOCK_N rows, and the sums of the warps are added through shared memory."""
    w, y, end, row, start = _weight_of(
        tl.program_id(0), w0, w1, y0, y1, n0, n1, row0 * ALIGN, row1 * ALIGN, BLOCK_N, TWO
    )
    x_row = x_row * ALIGN
    STEP: tl.constexpr = J * W * 32
    tiles = ()
    for i in tl.static_range(AHEAD):
        k = i * STEP
        tile = _fragments(w, row, start, end, k, K, BLOCK_N, J, W, FULL_N, FULL_K)
        tiles = tiles + (tile,)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    xs = ()
    for i in tl.static_range(CHUNKS):
        k = i * STEP
        xs = xs + (_fragments(x_ptr, x_row, 0, tokens, k, K, TILE, J, W, False, FULL_K),)
        if i >= AHEAD:
            tile = _fragments(w, row, start, end, k, K, BLOCK_N, J, W, FULL_N, FULL_K)
            tiles = tiles + (tile,)
    sums = tl.zeros((W, TILE, BLOCK_N), tl.float32)
    for i in tl.static_range(CHUNKS):
        sums = tl.dot(xs[i], tl.trans(tiles[i], (0, 2, 1)), sums)
    total = tl.sum(sums, axis=0).to(y.dtype.element_ty)
    n = start + tl.arange(0, BLOCK_N)[None, :]
    t = tl.arange(0, TILE)[:, None]
    tl.store(y + t * end + n, total, mask=(n < end) & (t < tokens))


@triton.jit
def _scale(most):
    """448 / most, rounded once, as by an exact division, which would call a subroutine; 1 for 0."""
    inverse = 1.0 / most
    scale = 448.0 * inverse
    scale = tl.fma(tl.fma(-scale, most, 448.0), inverse, scale)
    return tl.where(most > 1e-30, scale, tl.where(most > 0, 448.0 / most, 1.0))


@triton.jit(do_not_specialize=NUMBERS)
def block(
    x_ptr, w, scales, y, n, row, x_row, tokens, K: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, W: tl.constexpr, FULL_N: tl.constexpr, FULL_K: tl.constexpr,
    ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to 8 tokens: each of W warps has groups of K of all BLOCK_N rows of w, which have one
    scale in a group. e4m3 has no number that fp16 has not, so the products are exact.

    Tiles are 8 x 8: only then Triton takes x from registers."""
    start = tl.program_id(0) * BLOCK_N
    row, x_row = row * ALIGN, x_row * ALIGN
    R: tl.constexpr = BLOCK_N // 8
    tiles = ()
    factors = ()
    for i in tl.static_range(CHUNKS):
        for r in tl.static_range(R):
            first, k = start + r * 8, i * W * 128
            tile = _fragments(w, row, first, n, k, K, 8, 2, W, FULL_N, FULL_K, 16, 4)
            tiles = tiles + (tile,)
        group = i * W + tl.arange(0, W)
        factor = tl.load(scales + start // 128 * (K // 128) + group, mask=group < K // 128, other=0)
        factors = factors + (factor,)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = ()
    for _ in tl.static_range(R):
        sums = sums + (tl.zeros((W, 8, 8), tl.float32),)
    for p in tl.static_range(0, CHUNKS, 4):
        xs = ()
        found = ()
        for i in tl.static_range(4):
            if p + i < CHUNKS:
                k = (p + i) * W * 128
                x = _fragments(x_ptr, x_row, 0, tokens, k, K, 8, 2, W, False, FULL_K, 16, 4)
                xs = xs + (x,)
                found = found + (_scale(tl.max(tl.abs(x.to(tl.float32)), axis=2)),)
        first = found[0]
        for i in tl.static_range(1, 4):
            if PDL and p + i < CHUNKS:
                first = _behind(first, found[i], tokens)
        for i in tl.static_range(4):
            if p + i < CHUNKS:
                scale = first if i == 0 else found[i]
                x = (xs[i].to(tl.float32) * scale[:, :, None]).to(tl.float8e4nv).to(tl.float16)
                both = (factors[p + i][:, None] / scale)[:, :, None]
                more = ()
                for r in tl.static_range(R):
                    tile = tl.trans(tiles[(p + i) * R + r].to(tl.float16), (0, 2, 1))
                    more = more + (sums[r] + tl.dot(x, tile) * both,)
                sums = more
    column, t = start + tl.arange(0, 8)[None, :], tl.arange(0, 8)[:, None]
    for r in tl.static_range(R):
        total = tl.sum(sums[r], axis=0).to(y.dtype.element_ty)
        tl.store(y + t * n + column + r * 8, total, mask=(column + r * 8 < n) & (t < tokens))


@triton.jit
def _row(
    x, add0, add1, w, y, total, epsilon, factor, K: tl.constexpr, BLOCK: tl.constexpr,
    ADDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The norm of one row of K elements times a factor, to which ADDS others are added, and `total`
    is the sum."""
    k = tl.arange(0, BLOCK)
    weight = tl.load(w + k, mask=k < K, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32) * factor
    if ADDS > 0:
        value += tl.load(add0 + k, mask=k < K, other=0.0).to(tl.float32)
        if ADDS > 1:
            value += tl.load(add1 + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(total + k, value.to(total.dtype.element_ty), mask=k < K)
    root = tl.rsqrt(tl.sum(value * value) / K + epsilon)
    tl.store(y + k, (value * root * weight).to(y.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["row0", "row1", "row2", "row3"])
def rms_norm(
    x0, x1, add0, add1, w0, w1, y0, y1, total, row0, row1, row2, row3, epsilon0, epsilon1,
    factor, K0: tl.constexpr, K1: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    ALIGN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id(0)` of norm `program_id(1)`. K1: 0 for one norm. ADDS, factor: of the
    first."""
    t = tl.program_id(0)
    if tl.program_id(1) == 0:
        x, sums = x0 + t * row0 * ALIGN, total + t * K0
        a, b = add0 + t * row2 * ALIGN, add1 + t * row3 * ALIGN
        _row(x, a, b, w0, y0 + t * K0, sums, epsilon0, factor, K0, BLOCK, ADDS, PDL)
    elif K1 > 0:
        x = x1 + t * row1 * ALIGN
        _row(x, x1, x1, w1, y1 + t * K1, x1, epsilon1, 1.0, K1, BLOCK, 0, PDL)
