"""The arithmetic of one tile in the decode kernel for Hopper: scores and weighted values.

The second product reads an fp8 tile as pairs: the two bytes of a 16-bit element are two latents of
one token. `widen` makes fp16 of either byte, exact except for a factor of 2^-8: it moves the sign,
and exponent and mantissa, to where fp16 has them. Two other kernels convert both (`widen_pairs`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

# Triton 3.9 renamed it.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


# PTX that widens a byte of each int16, two at a time: it puts sign and rest in place.
LOW = gl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $1, 8;
    shl.b32 rest, $1, 7;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
}""")
HIGH = gl.constexpr("""{
    .reg .b32 sign, rest;
    shr.u32 rest, $1, 1;
    and.b32 sign, $1, 0x80008000;
    lop3.b32 $0, rest, 0x3F803F80, sign, 0xEA;
}""")
# And both bytes, converted.
BOTH = gl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")
BF16_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
FP16_PAIR = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def widen(pairs, BYTE: gl.constexpr):
    """The LOW or HIGH bytes of int16 `pairs` as fp16, times 2^-8. A NaN becomes 480."""
    return gl.inline_asm_elementwise(BYTE, "=r,r", [pairs], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def packed(low, high, TYPE: gl.constexpr):
    """Two fp32 in TYPE as one integer, `low` in its low bits. Triton converts one at a time."""
    if TYPE.primitive_bitwidth == 32:
        low = low.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
        pair = low | (high.to(gl.int32, bitcast=True).to(gl.int64) << 32)
    else:
        CODE: gl.constexpr = BF16_PAIR if gl.bfloat16 == TYPE else FP16_PAIR
        pair = gl.inline_asm_elementwise(CODE, "=r,f,f", [low, high], gl.int32, True, 1)
    return pair


@gluon.jit
def widen_pairs(pairs):
    """The low and the high bytes of int16 `pairs`, e4m3, as fp16: exact, and NaN stays NaN."""
    return gl.inline_asm_elementwise(BOTH, "=r,=r,r", [pairs], (gl.float16, gl.float16), True, 2)


@gluon.jit
def reinterpret(shared, TYPE: gl.constexpr, SHAPE: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as another type or shape."""
    if RENAMED:
        view = shared.reinterpret(TYPE, SHAPE, layout)
    else:
        view = shared._reinterpret(TYPE, SHAPE, layout)
    return view


@gluon.jit
def pairs_of(tile):
    """A tile in shared memory [tokens, columns] as integers of two neighbours."""
    BITS: gl.constexpr = 2 * tile.dtype.primitive_bitwidth
    SHAPE: gl.constexpr = [tile.shape[0], tile.shape[1] // 2]
    layout: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    return reinterpret(tile, gl.int16 if BITS == 16 else gl.int32, SHAPE, layout)


@gluon.jit
def scores_of(buffers, buffer, q_keys, q_ropes, layout: gl.constexpr):
    """Products [tokens, rows] of a tile with the query."""
    key = buffers.keys.index(buffer)
    BLOCK_N: gl.constexpr = key.shape[0]
    ROWS: gl.constexpr = q_keys.shape[0]
    s = gl.zeros([BLOCK_N, ROWS], gl.float32, layout)
    s = warpgroup_mma(key, q_keys.permute((1, 0)), s, use_acc=False, is_async=True)
    rope = buffers.ropes.index(buffer)
    s = warpgroup_mma(rope, q_ropes.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def add_box(acc, odd, view, p, BOX: gl.constexpr, RUNNING: gl.constexpr):
    """Add the weighted values of 64 tokens, the first or the second of `view`.

    RUNNING: products that may run under the widening of the next values. Registers hold two.
    """
    STEP: gl.constexpr = 32
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for j in gl.static_range(2):
        value = view.slice(64 * BOX + STEP * j, STEP).permute((1, 0)).load(operand)
        part = p.slice(64 * BOX + STEP * j, STEP)
        acc = warpgroup_mma(widen(value, LOW), part, acc, is_async=True)
        odd = warpgroup_mma(widen(value, HIGH), part, odd, is_async=True)
        acc, odd = warpgroup_mma_wait(RUNNING, [acc, odd])
    return warpgroup_mma_wait(0, [acc, odd])


@gluon.jit
def add_values(acc, odd, decay, key, p, left, FP8: gl.constexpr):
    """Decay the sums [latents, rows] and add the weighted values of a tile, of `left` tokens."""
    acc = acc * decay[None, :]
    if FP8:
        odd = odd * decay[None, :]
        view = pairs_of(key)
        BOXES: gl.constexpr = key.shape[0] // 64
        RUNNING: gl.constexpr = 2 * (BOXES - 1)
        acc, odd = add_box(acc, odd, view, p, 0, RUNNING)
        if BOXES == 2 and left > 64:
            acc, odd = add_box(acc, odd, view, p, 1, RUNNING)
    else:
        acc = warpgroup_mma(key.permute((1, 0)), p, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
    return acc, odd
