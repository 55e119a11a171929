"""The Triton kernel of the fused region: one source for NVIDIA and AMD.

One launch holds two kinds of programs, so that they run side by side instead of one after the
other:

    product   [block_m tokens, one head, block_n latents]: q_nope @ W_UK, rounded to the
              activation type, cast into q_out. A program loads its tile of W_UK once and walks
              over its token tiles, because at decode sizes W_UK is most of the bytes.
    rest      RoPE of k_pe and the cache rows of a few tokens, or RoPE of q_pe for a few rows of
              the flattened [tokens * heads]. A program works on a tile and not row after row: it
              is a chain of loads (slot, position, angles), and a chain per row would be most of
              the time of a large batch.

Offsets into q, w_uk_t and q_out fit 32 bits (the provider checks that); offsets into the cache
are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inverse(scale_ptr, LIMIT: tl.constexpr):
    """1 / scale with IEEE rounding where the target is fp8 (LIMIT not 0), else unused."""
    if LIMIT != 0:
        return tl.div_rn(1.0, tl.load(scale_ptr).to(tl.float32))
    else:
        return 1.0


@triton.jit
def _cast(x, inverse, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """fp32 `x` in DTYPE: scaled, clamped (NaN stays NaN) and rounded to nearest even.

    A negative LIMIT says that the conversion of this device clamps by itself.
    """
    if LIMIT != 0:
        x = x * inverse
    if LIMIT > 0:
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)


@triton.jit
def _product_cast(y, ACT: tl.constexpr, inverse, OUT: tl.constexpr, LIMIT: tl.constexpr):
    """fp32 sums `y` rounded to the activation type and then cast to OUT."""
    if LIMIT != 0:
        y = y.to(ACT).to(tl.float32)
    return _cast(y, inverse, OUT, LIMIT)


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
def _rope_rows(
    src,
    dst,
    rows,
    cos_sin,
    valid,
    inverse,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    LIMIT: tl.constexpr,
    ZERO_INVALID: tl.constexpr,
):
    """RoPE of rows of R elements; `src`, `dst` and `cos_sin` are [ROWS, 1] pointers to them.

    `rows` [ROWS, 1] masks rows out. Rows that are not `valid` [ROWS, 1] become zeros
    (ZERO_INVALID) or are not stored.
    """
    DTYPE: tl.constexpr = dst.dtype.element_ty
    HALF: tl.constexpr = R // 2
    cols = tl.arange(0, R_PAD)[None, :]
    stored = rows
    if not ZERO_INVALID:
        stored = rows & valid
    if not ROPE:
        x = tl.load(src + cols, mask=rows & (cols < R), other=0.0).to(tl.float32)
        y = _cast(x, inverse, tl.float32, LIMIT)
        if ZERO_INVALID:
            y = tl.where(valid, y, 0.0)
        tl.store(dst + cols, y.to(DTYPE), mask=stored & (cols < R))
    else:
        pair = tl.arange(0, R_PAD // 2)[None, :]
        inside = rows & (pair < HALF)
        cos = tl.load(cos_sin + pair, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(cos_sin + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        if NEOX:
            a = tl.load(src + pair, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(src + HALF + pair, mask=inside, other=0.0).to(tl.float32)
            first = _cast(a * cos - b * sin, inverse, tl.float32, LIMIT)
            second = _cast(b * cos + a * sin, inverse, tl.float32, LIMIT)
            if ZERO_INVALID:
                first = tl.where(valid, first, 0.0)
                second = tl.where(valid, second, 0.0)
            tl.store(dst + pair, first.to(DTYPE), mask=stored & (pair < HALF))
            tl.store(dst + HALF + pair, second.to(DTYPE), mask=stored & (pair < HALF))
        else:
            # Load and store whole rows, so that accesses stay wide; split the pairs in registers.
            ROWS: tl.constexpr = src.shape[0]
            x = tl.load(src + cols, mask=rows & (cols < R), other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (ROWS, R_PAD // 2, 2)))
            y = tl.join(a * cos - b * sin, b * cos + a * sin)
            y = _cast(tl.reshape(y, (ROWS, R_PAD)), inverse, tl.float32, LIMIT)
            if ZERO_INVALID:
                y = tl.where(valid, y, 0.0)
            tl.store(dst + cols, y.to(DTYPE), mask=stored & (cols < R))


@triton.jit
def _angles(cos_sin_ptr, position_ptr, token, inside, slot, stride, ROPE: tl.constexpr):
    """Pointers to the rows of cosines and sines of `token`; a padded row uses position 0."""
    if ROPE:
        position = tl.load(position_ptr + token, mask=inside, other=0)
        return cos_sin_ptr + tl.where(slot >= 0, position, 0) * stride
    else:
        return cos_sin_ptr + token * 0


@triton.jit
def _cache_rows(
    kv_c_ptr,
    k_pe_ptr,
    cache_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    k_scale_ptr,
    unit,
    tokens,
    kv_c_row,
    k_pe_row,
    cache_block,
    cache_entry,
    cos_sin_stride,
    R: tl.constexpr,
    L: tl.constexpr,
    R_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    K_LIMIT: tl.constexpr,
    CACHE_TOKENS: tl.constexpr,
):
    """cast(kv_c | rope(k_pe)) of CACHE_TOKENS tokens; a slot below 0 writes nothing."""
    token = unit * CACHE_TOKENS + tl.arange(0, CACHE_TOKENS)[:, None]
    inside = token < tokens
    slot = tl.load(slot_ptr + token, mask=inside, other=-1)
    angles = _angles(cos_sin_ptr, position_ptr, token, inside, slot, cos_sin_stride, ROPE)
    valid = slot >= 0
    inverse = _inverse(k_scale_ptr, K_LIMIT)
    cols = tl.arange(0, L_PAD)[None, :]
    latent = tl.load(kv_c_ptr + token * kv_c_row + cols, mask=inside & (cols < L), other=0.0)
    slot = tl.where(valid, slot, 0)
    row = (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_entry
    latent = _cast(latent.to(tl.float32), inverse, cache_ptr.dtype.element_ty, K_LIMIT)
    tl.store(cache_ptr + row + cols, latent, mask=valid & (cols < L))
    _rope_rows(
        k_pe_ptr + token * k_pe_row,
        cache_ptr + row + L,
        inside,
        angles,
        valid,
        inverse,
        R,
        R_PAD,
        ROPE,
        NEOX,
        K_LIMIT,
        False,
    )


@triton.jit
def _query_rows(
    q_ptr,
    out_ptr,
    latent_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    q_scale_ptr,
    unit,
    tokens,
    heads,
    q_row,
    q_head,
    cos_sin_stride,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    R_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    Q_LIMIT: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """RoPE of ROPE_ROWS rows of q_pe [tokens * heads, R]; what PRODUCT leaves to do besides.

    ONE_TOKEN: all rows belong to one token, whose slot, position and angles are loaded once and
    not for each row.
    """
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = L + R
    row = unit * ROPE_ROWS + tl.arange(0, ROPE_ROWS)[:, None]
    TOKENS: tl.constexpr = 1 if ONE_TOKEN else ROPE_ROWS
    token = (unit * ROPE_ROWS + tl.arange(0, TOKENS)[:, None]) // heads
    inside = token < tokens
    slot = tl.load(slot_ptr + token, mask=inside, other=-1)
    angles = _angles(cos_sin_ptr, position_ptr, token, inside, slot, cos_sin_stride, ROPE)
    valid = slot >= 0
    inverse = _inverse(q_scale_ptr, Q_LIMIT)
    _rope_rows(
        q_ptr + token * q_row + (row % heads) * q_head + P,
        out_ptr + row * WIDTH + L,
        inside,
        angles,
        valid,
        inverse,
        R,
        R_PAD,
        ROPE,
        NEOX,
        Q_LIMIT,
        True,
    )
    cols = tl.arange(0, L_PAD)[None, :]
    out = out_ptr + row * WIDTH + cols
    if PRODUCT == "staged":
        staged = latent_ptr + row * L + cols
        y = tl.load(staged, mask=inside & (cols < L), other=0.0).to(tl.float32)
        y = tl.where(valid, _cast(y, inverse, tl.float32, Q_LIMIT), 0.0)
        tl.store(out, y.to(OUT), mask=inside & (cols < L))
    else:
        # The product leaves the latents of padded rows to us: a mask on its stores is cheaper
        # than a select for each of its elements.
        padded = inside & (slot < 0)
        if tl.max(tl.reshape(padded.to(tl.int32), (padded.shape[0],)), axis=0) > 0:
            zero = tl.zeros((ROPE_ROWS, L_PAD), tl.float32).to(OUT)
            tl.store(out, zero, mask=padded & (cols < L))


@triton.jit(
    do_not_specialize=["tokens", "heads", "q_row", "kv_c_row", "k_pe_row"],
)
def prep_kernel(
    q_ptr,
    w_ptr,
    kv_c_ptr,
    k_pe_ptr,
    cache_ptr,
    slot_ptr,
    position_ptr,
    cos_sin_ptr,
    k_scale_ptr,
    q_scale_ptr,
    out_ptr,
    latent_ptr,
    tokens,
    heads,
    q_row,
    q_head,
    w_head,
    w_row,
    w_col,
    kv_c_row,
    k_pe_row,
    cache_block,
    cache_entry,
    cos_sin_stride,
    P: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROPE: tl.constexpr,
    NEOX: tl.constexpr,
    Q_LIMIT: tl.constexpr,
    K_LIMIT: tl.constexpr,
    ALIGN: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    M_TILES: tl.constexpr,
    ROPE_ROWS: tl.constexpr,
    CACHE_TOKENS: tl.constexpr,
    REST_LAST: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """See the module. Shapes and types are those of `kernels.fused_mla_decode_prep`.

    PRODUCT says who computes the latent part of the query:
        "here"     the product programs of this launch;
        "done"     a product that has already written it into q_out: only padded rows are zeroed;
        "staged"   a product that left it in `latent_ptr` [T, H, L]: it is cast into q_out.
    Q_LIMIT and K_LIMIT are the largest finite fp8 values, 0 for a target that is not fp8, and
    negative where conversions saturate by themselves. The row
    strides of q, kv_c and k_pe come divided by ALIGN. PDL: the launch carries the
    programmatic-dependent-launch attribute.
    """
    # Products with a constant: Triton sees the alignment (tl.multiple_of does nothing to an
    # argument), which decides between 16-byte and 2-byte loads.
    q_row = q_row * ALIGN
    kv_c_row = kv_c_row * ALIGN
    k_pe_row = k_pe_row * ALIGN
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = L + R
    if PDL:
        # The next kernel may start loading its weights; it waits for this grid before it reads
        # or writes anything else.
        tl.extra.cuda.gdc_launch_dependents()

    cache_programs = tl.cdiv(tokens, CACHE_TOKENS)
    rest = cache_programs + tl.cdiv(tokens * heads, ROPE_ROWS)
    work = tl.program_id(0)
    products = tl.num_programs(0) - rest
    if REST_LAST:
        is_rest = work >= products
        unit = work - products
    else:
        is_rest = work < rest
        unit = work
        work = work - rest

    if is_rest:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if unit < cache_programs:
            _cache_rows(
                kv_c_ptr,
                k_pe_ptr,
                cache_ptr,
                slot_ptr,
                position_ptr,
                cos_sin_ptr,
                k_scale_ptr,
                unit,
                tokens,
                kv_c_row,
                k_pe_row,
                cache_block,
                cache_entry,
                cos_sin_stride,
                R,
                L,
                R_PAD,
                L_PAD,
                BLOCK_SIZE,
                ROPE,
                NEOX,
                K_LIMIT,
                CACHE_TOKENS,
            )
        else:
            _query_rows(
                q_ptr,
                out_ptr,
                latent_ptr,
                slot_ptr,
                position_ptr,
                cos_sin_ptr,
                q_scale_ptr,
                unit - cache_programs,
                tokens,
                heads,
                q_row,
                q_head,
                cos_sin_stride,
                P,
                R,
                L,
                R_PAD,
                L_PAD,
                ROPE,
                NEOX,
                Q_LIMIT,
                PRODUCT,
                ROPE_ROWS,
                ONE_TOKEN,
            )
    elif PRODUCT == "here":
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
        inverse = _inverse(q_scale_ptr, Q_LIMIT)
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
