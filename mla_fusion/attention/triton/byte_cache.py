"""How the portable decode kernel reads the byte caches of `plan/layouts.py`, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_latents(entry, exponents, wanted, form: tl.constexpr, BLOCK_N: tl.constexpr):
    """Latents [tokens, L] of a tile, value * scale in fp32, rounded to bf16; zeros if not `wanted`.

    Scales that lie behind the data of a page are at `exponents`; a code of 0 or 255 is written by
    nobody, and not told apart from zero and infinity.
    """
    CODES: tl.constexpr = form.layout.quantized
    GROUP: tl.constexpr = form.layout.group
    L: tl.constexpr = form.L
    group, column = tl.arange(0, L // GROUP), tl.arange(0, L)[None, :]
    wanted = wanted[:, None]
    of_group = wanted & (group < CODES // GROUP)[None, :]
    if form.layout.behind:
        source = exponents.to(tl.pointer_type(tl.uint8), bitcast=True)
        code = tl.load(source[:, None] + group[None, :], mask=of_group, other=0)
        scales = (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        source = (entry + CODES).to(tl.pointer_type(tl.float32), bitcast=True)
        source = tl.multiple_of(source[:, None], (16, 16))
        scales = tl.load(source + group[None, :], mask=of_group, other=0.0)
    scales = tl.broadcast_to(scales[:, :, None], [BLOCK_N, L // GROUP, GROUP])
    # Triton 3.6 has lost the alignment of an entry by here, and would load single bytes.
    aligned = tl.multiple_of(entry[:, None], (16, 16))
    codes = tl.load(aligned + column, mask=wanted & (column < CODES), other=0.0)
    latents = (codes.to(tl.float32) * tl.reshape(scales, [BLOCK_N, L])).to(tl.bfloat16)
    if CODES < L:
        wide = (entry + CODES).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        wide = tl.multiple_of(wide[:, None], (16, 16)) + (column - CODES)
        wide = tl.load(wide, mask=wanted & (column >= CODES), other=0.0)
        latents = tl.where(column < CODES, latents, wide)
    return latents


@triton.jit
def read_rotated(entry, wanted, form: tl.constexpr):
    """The R bf16 values [tokens, R] behind values and fp32 scales; zeros if not `wanted`."""
    CODES: tl.constexpr = form.layout.quantized
    # Triton 3.6 forgets what it knows of an address where its type changes.
    source = entry + CODES + CODES // form.layout.group * 4
    source = source.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    source = tl.multiple_of(source[:, None], (16, 16))
    return tl.load(source + tl.arange(0, form.R)[None, :], mask=wanted[:, None], other=0.0)
