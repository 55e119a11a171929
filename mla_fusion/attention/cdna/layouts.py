"""Layouts of the decode kernel for CDNA 3 and 4: which lane and register holds which element.

A matrix instruction (MFMA) of 16 by 16 takes from lane l row l % 16 of its first factor and column
l % 16 of the second, and some neighbours in the depth, which l / 16 chooses. Keys are read from
memory for both products in the order that this wants, and never moved between lanes:

    scores    tokens are rows: a lane reads 16 bytes of one token, four lanes 64 bytes in a row
    output    latents are rows, tokens the depth: a lane reads EACH latents of several tokens, and
              row i of instruction number r is latent i * EACH + r. So the 16 lanes read 16 * EACH
              latents in a row, and of the result a lane holds 4 * EACH latents in a row.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout

WARPS = gl.constexpr(4)
TILE = gl.constexpr(64)  # tokens; 16 of each warp's scores


@gluon.constexpr_function
def _steps(first: int, end: int) -> list[int]:
    """first, 2 * first, 4 * first and so on below `end`."""
    return [first << n for n in range((end // first - 1).bit_length())]


@gluon.constexpr_function
def depth_of(CDNA: int) -> int:
    """Neighbours in the depth that a lane holds of a bf16 factor."""
    return 4 if CDNA == 3 else 8


@gluon.constexpr_function
def product_layout(CDNA: int, BITS: int) -> AMDMFMALayout:
    """The result of a product of factors of BITS bits; warps have rows of their own."""
    depth = 4 * (depth_of(CDNA) if BITS == 16 else 8)
    return AMDMFMALayout(CDNA, [16, 16, depth], False, [WARPS.value, 1])


@gluon.constexpr_function
def value_layout(L: int, CDNA: int) -> Any:
    """Values [tokens, L] of one instruction's depth, as they are read."""
    each, depth = L // 16 // WARPS.value, depth_of(CDNA)
    registers = [[0, n] for n in _steps(1, each)] + [[n, 0] for n in _steps(1, depth)]
    lanes = [[0, n] for n in _steps(each, 16 * each)] + [[depth, 0], [2 * depth, 0]]
    warps = [[0, 16 * each], [0, 32 * each]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [4 * depth, L])


@gluon.constexpr_function
def output_layout(L: int, ROWS: int) -> Any:
    """The result [L, rows], as it is stored."""
    each = L // 16 // WARPS.value
    registers = [[n, 0] for n in _steps(1, 4 * each)] + [[0, n] for n in _steps(16, ROWS)]
    lanes = [[0, n] for n in _steps(1, 16)] + [[4 * each, 0], [8 * each, 0]]
    warps = [[16 * each, 0], [32 * each, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [L, ROWS])


@gluon.jit
def as_factor(values, L: gl.constexpr, LAYOUT: gl.constexpr):
    """Values [tokens, L] as the first factor of the output's product, which renames registers."""
    EACH: gl.constexpr = L // 16 // WARPS
    TOKENS: gl.constexpr = values.shape[0]
    values = gl.permute(gl.reshape(values, [TOKENS, WARPS, 16, EACH]), (3, 1, 2, 0))
    return gl.convert_layout(gl.reshape(values, [L, TOKENS]), LAYOUT, assert_trivial=True)


@gluon.jit
def as_latents(acc, L: gl.constexpr, LAYOUT: gl.constexpr):
    """The output's product with its latents in order, which renames registers."""
    EACH: gl.constexpr = L // 16 // WARPS
    ROWS: gl.constexpr = acc.shape[1]
    acc = gl.permute(gl.reshape(acc, [EACH, WARPS, 16, ROWS]), (1, 2, 0, 3))
    return gl.convert_layout(gl.reshape(acc, [L, ROWS]), LAYOUT, assert_trivial=True)
