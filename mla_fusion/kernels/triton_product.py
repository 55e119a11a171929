"""The q-absorb product: q_nope @ W_UK, written into the latent part of the query.

A program loads its tile of W_UK once and walks over its token tiles, because at decode sizes W_UK
is most of the bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_fusion.kernels.triton_cast import cast, inverse_of


@triton.jit
def _product_cast(y, ACT: tl.constexpr, inverse, OUT: tl.constexpr, LIMIT: tl.constexpr):
    """fp32 sums `y` rounded to the activation type and then cast to OUT."""
    if LIMIT != 0:
        y = y.to(ACT).to(tl.float32)
    return cast(y, inverse, OUT, LIMIT)


@triton.jit
def _query_tile(
    q_ptrs, q_row, m_start, end, P: tl.constexpr, P_PAD: tl.constexpr, BLOCK_M: tl.constexpr
):
    """q_nope of one head for tokens m_start ... m_start + BLOCK_M, zero from token `end` on."""
    m = m_start + tl.arange(0, BLOCK_M)
    k = tl.arange(0, P_PAD)
    return tl.load(
        q_ptrs + m[:, None] * q_row + k[None, :],
        mask=(m < end)[:, None] & (k < P)[None, :],
        other=0.0,
    )


@triton.jit
def product(
    q_ptr,
    w_ptr,
    slot_ptr,
    q_scale_ptr,
    out_ptr,
    work,
    tokens,
    heads,
    q_row,
    q_head,
    w_head,
    w_row,
    w_col,
    P: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    P_PAD: tl.constexpr,
    Q_LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    M_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """q_nope @ W_UK of one head, for M_TILES * BLOCK_M tokens and BLOCK_N latents.

    `work` says which: latents of a group of tokens follow each other, then groups, then heads.
    Other arguments are those of `prep_kernel`. Rows without a slot are not stored.
    """
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    n_tiles: tl.constexpr = (L + BLOCK_N - 1) // BLOCK_N
    m_groups = tl.cdiv(tokens, BLOCK_M * M_TILES)
    n_start = (work % n_tiles) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    m_start = ((work // n_tiles) % m_groups) * BLOCK_M * M_TILES
    head = work // n_tiles // m_groups
    k = tl.arange(0, P_PAD)
    w_ptrs = w_ptr + head * w_head + k[:, None] * w_row + n[None, :] * w_col
    if P == P_PAD and L % BLOCK_N == 0:
        w = tl.load(w_ptrs)
    else:
        w = tl.load(w_ptrs, mask=(k < P)[:, None] & (n < L)[None, :], other=0.0)
    if PDL:
        # Weights do not change between launches; everything below may.
        tl.extra.cuda.gdc_wait()
    inverse = inverse_of(q_scale_ptr, Q_LIMIT)
    q_ptrs = q_ptr + head * q_head
    out_ptrs = out_ptr + head * WIDTH
    if BLOCK_M == 1:
        for i in tl.static_range(M_TILES):
            token = m_start + i
            inside = token < tokens
            q = tl.load(q_ptrs + token * q_row + k, mask=inside & (k < P), other=0.0)
            slot = tl.load(slot_ptr + token, mask=inside, other=-1)
            y = tl.sum(q.to(tl.float32)[:, None] * w.to(tl.float32), axis=0)
            y = _product_cast(y, q_ptr.dtype.element_ty, inverse, OUT, Q_LIMIT)
            out = out_ptrs + token * heads * WIDTH + n
            tl.store(out, y, mask=(slot >= 0) & (n < L))
    else:
        q = _query_tile(q_ptrs, q_row, m_start, tokens, P, P_PAD, BLOCK_M)
        for i in tl.range(0, M_TILES, num_stages=1):
            m = m_start + i * BLOCK_M
            if M_TILES > 1:
                # Loads the next tile while this one is multiplied and stored.
                end = tl.minimum(tokens, m_start + M_TILES * BLOCK_M)
                following = _query_tile(q_ptrs, q_row, m + BLOCK_M, end, P, P_PAD, BLOCK_M)
            y = tl.dot(q, w, input_precision="ieee")
            y = _product_cast(y, q_ptr.dtype.element_ty, inverse, OUT, Q_LIMIT)
            # A store of the shape of the q or W tile would make Triton load that tile with the
            # store's 16 elements per thread, which for 16-bit operands halves the use of
            # every memory transaction: such a tile is stored as [2 BLOCK_M, BLOCK_N / 2].
            FOLD: tl.constexpr = 2 if BLOCK_N == P_PAD or BLOCK_M == P_PAD else 1
            y = tl.reshape(y, (FOLD * BLOCK_M, BLOCK_N // FOLD))
            part = tl.arange(0, FOLD * BLOCK_M)[:, None]
            row = m + part // FOLD
            slot = tl.load(slot_ptr + row, mask=row < tokens, other=-1)
            column = tl.arange(0, BLOCK_N // FOLD)[None, :]
            column += n_start + (part % FOLD) * (BLOCK_N // FOLD)
            out = out_ptrs + row * heads * WIDTH + column
            tl.store(out, y, mask=(slot >= 0) & (column < L))
            if M_TILES > 1:
                q = following
