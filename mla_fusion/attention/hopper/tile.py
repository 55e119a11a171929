"""The tiles of `hopper/decode.py`: how they get into shared memory, and what is computed of them.

The tensor copy engine (TMA) copies tiles of whole pages; one thread computes the address. All
threads copy the others, 16 bytes each at a time: over several pages, lists of slots. The second
product reads an fp8 tile as pairs.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mla_fusion.attention.hopper import common
from mla_fusion.attention.hopper.common import TILE, async_load, pairs_of, tma_load

# What the tiles of a sequence are copied from. first, extra: its scopes; the other is for sparse
# sequences. latents, rotated, block_rows: as `cache_boxes` returns them.
Copies = namedtuple("Copies", "first extra latents rotated block_rows")

# Two tiles in shared memory, and a barrier for each, which the copy engine completes. keys: [2,
# tokens, L]. ropes: [2, tokens, R].
Buffers = namedtuple("Buffers", "keys ropes arrived")

# PTX of `widen`, two int16 at a time.
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
BF16_PAIR = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
FP16_PAIR = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@gluon.jit
def copy_part(
    target, base, source, token, end, ENTRY: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr
):  # fmt: skip
    """Start the copy of some columns of tokens `token` ... into `target` [tokens, width]; zeros for
    those from `end` on, and of slot -1. base: of the columns, in the cache."""
    layout: gl.constexpr = common.load_layout(target.shape[1], target.dtype, gl.num_warps())
    row = gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    col = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    wanted = row < end - token
    if SPARSE:
        at = gl.load(source.table + token + row, mask=wanted, other=-1)
        wanted = at >= 0
        page = at // PAGE
    else:
        at = token + row
        page = gl.load(source.table + at // PAGE, mask=wanted, other=0)
    offset = page.to(gl.int64) * source.block_stride + at % PAGE * ENTRY
    async_load(target, base + offset[:, None] + col[None, :], mask=wanted[:, None])


@gluon.jit
def copy_tile(
    buffer, source, tile, end, ENTRY: gl.constexpr, PAGE: gl.constexpr, SPARSE: gl.constexpr
):
    """Start the copy of tile `tile` of a sequence."""
    keys, ropes = buffer.keys, buffer.ropes
    token, base = tile * keys.shape[0], source.pointer
    copy_part(keys, base, source, token, end, ENTRY, PAGE, SPARSE)
    copy_part(ropes, base + keys.shape[1], source, token, end, ENTRY, PAGE, SPARSE)
    async_copy.commit_group()


@gluon.jit
def start_copy(buffers, at, copies, tile, end, first_end, form: gl.constexpr, BULK: gl.constexpr):
    """Start the copy of tile `tile` of a sequence into buffer `at`. BULK: the copy engine copies,
    the tokens after an end too, which may be NaN; none where no token is left."""
    buffer = Buffers(buffers.keys.index(at), buffers.ropes.index(at), buffers.arrived.index(at))
    if form.SPARSE:
        SKIP: gl.constexpr = form.FIRST // TILE
        if tile < SKIP:
            copy_tile(buffer, copies.first, tile, first_end, form.ENTRY, form.PAGE, True)
        else:
            copy_tile(
                buffer, copies.extra, tile - SKIP, end - form.FIRST, form.EXTRA_ENTRY,
                form.EXTRA_PAGE, True,
            )  # fmt: skip
    elif BULK:
        token, arrived = tile * TILE, buffer.arrived
        if token < end:
            BITS: gl.constexpr = buffer.keys.dtype.primitive_bitwidth
            mbarrier.expect(arrived, TILE * (form.L + form.R) * BITS // 8)
            row = common.load_kept(copies.first.table + token // form.PAGE) * copies.block_rows
            row += token % form.PAGE
            tma_load(copies.latents, [row, 0], arrived, buffer.keys)
            tma_load(copies.rotated, [row, form.L], arrived, buffer.ropes)
    else:
        copy_tile(buffer, copies.first, tile, end, form.ENTRY, form.PAGE, False)


@gluon.jit
def widen(pairs, BYTE: gl.constexpr):
    """The LOW or HIGH bytes of int16 `pairs` as fp16, exact but for a factor of 2^-8: the sign, and
    exponent and mantissa, move to where fp16 has them. A NaN becomes 480."""
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
def add_pairs(acc, odd, view, p, RUNNING: gl.constexpr):
    """Add the weighted values of a tile. RUNNING: products that may run under the widening of the
    next values. Registers hold two."""
    STEP: gl.constexpr = 32
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    for j in gl.static_range(2):
        value = view.slice(STEP * j, STEP).permute((1, 0)).load(operand)
        part = p.slice(STEP * j, STEP)
        acc = hopper.warpgroup_mma(widen(value, LOW), part, acc, is_async=True)
        odd = hopper.warpgroup_mma(widen(value, HIGH), part, odd, is_async=True)
        acc, odd = hopper.warpgroup_mma_wait(RUNNING, [acc, odd])
    return hopper.warpgroup_mma_wait(0, [acc, odd])


@gluon.jit
def add_values(acc, odd, decay, key, p, RUNNING: gl.constexpr, FP8: gl.constexpr):
    """Decay the sums [latents, rows] and add the weighted values of a tile."""
    acc = acc * decay[None, :]
    if FP8:
        odd = odd * decay[None, :]
        acc, odd = add_pairs(acc, odd, pairs_of(key), p, RUNNING)
    else:
        acc = hopper.warpgroup_mma(key.permute((1, 0)), p, acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, [acc])
    return acc, odd
