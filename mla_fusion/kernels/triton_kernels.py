"""The Triton kernel of the fused region: one source for NVIDIA and AMD.

One launch holds two kinds of programs, which run side by side:

    product   [block_m tokens, one head, block_n latents]: q_nope @ W_UK, rounded to the activation
              type, cast into q_out. It loads its tile of W_UK once for several token tiles: in
              decode it is most of the bytes
    rest      `triton_rows.py`: RoPE of k_pe and the cache rows of a few tokens, or RoPE of q_pe
              for a few rows of the flattened [tokens * heads]

The plan alone decides in which order the P terms of a product are summed. A row is rotated, scaled
and cast by itself. So with one plan for all batches the bits of a row depend on its own arguments
alone.

Offsets into q, w_uk_t and q_out fit 32 bits (the provider checks that), those into the cache 64.

DIRECT: large tiles of an fp8 query are stored straight from the registers of WGMMA, which leaves a
warp with 16 tokens, and a lane with two neighbours of every 8 columns of the tokens lane / 4 and
lane / 4 + 8:

    column      0  1   2  3   4  5   6  7   8  9  10 11  12 13  14 15  16 17 ...
    lane % 4    0      1      2      3      0      1      2      3      0

Two bytes are too few for a store, and collecting 16 through shared memory costs every token tile
two or three exchanges of two barriers each. But the order of W_UK's columns decides which latent a
column holds. In this order a lane has 16 consecutive latents of every 64:

    latent      0  1  16 17  32 33  48 49   2  3  18 19  34 35  50 51   4  5 ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_fusion.kernels import triton_rows
from mla_fusion.kernels.triton_rows import Given, cast, factors_of, inverse_of, query_slots, scaled


@triton.jit
def _product_cast(y, given, inverse, LIMIT: tl.constexpr, DIRECT: tl.constexpr):
    """fp32 sums `y` rounded to the activation type and then cast to that of the query."""
    if DIRECT and LIMIT < 0:
        # To bf16 and back, two elements at once: as below it is a slow instruction for each.
        y = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r", [y], tl.float32, True, 2,
        )  # fmt: skip
    elif LIMIT != 0:
        y = y.to(given.q.dtype.element_ty).to(tl.float32)
    return cast(y, inverse, given.out.dtype.element_ty, LIMIT)


@triton.jit
def _query_tile(q_ptrs, q_row, m_start, end, form: tl.constexpr):
    """q_nope of one head for tokens m_start ... m_start + BLOCK_M, zero from token `end` on."""
    m = m_start + tl.arange(0, form.plan.block_m)
    k = tl.arange(0, form.P_PAD)
    wanted = (m < end)[:, None] & (k < form.P)[None, :]
    return tl.load(q_ptrs + m[:, None] * q_row + k[None, :], mask=wanted, other=0.0)


@triton.jit
def _weights(given, head, n_start, k, n, form: tl.constexpr):
    """W_UK of one head for rows k and latents n (those from `n_start` on), zero outside of it."""
    P_PAD: tl.constexpr = form.P_PAD
    BLOCK_N: tl.constexpr = form.plan.block_n
    w = given.w + head * given.w_head
    if form.DIRECT:
        # [lane % 4, P_PAD, 64 latents, 16 of a lane]: Triton spreads a warp over the last dimension
        # and then over the others from the first on, here over 4 rows of 64 latents: whole lines of
        # memory, and rows that the swizzle of shared memory keeps in banks of their own.
        lane = tl.arange(0, 4)[:, None, None, None]
        k = tl.arange(0, P_PAD)[None, :, None, None]
        block = tl.arange(0, BLOCK_N // 64)[None, None, :, None]
        n = n_start + block * 64 + lane * 16 + tl.arange(0, 16)[None, None, None, :]
        w = w + k * given.w_row + n * given.w_col
        wanted = (k < form.P) & (n < form.L)
    else:
        w = w + k[:, None] * given.w_row + n[None, :] * given.w_col
        wanted = (k < form.P)[:, None] & (n < form.L)[None, :]
    if form.P == P_PAD and form.L % BLOCK_N == 0:
        w = tl.load(w)
    else:
        w = tl.load(w, mask=wanted, other=0.0)
    if form.DIRECT:
        w = tl.permute(tl.reshape(w, (4, P_PAD, BLOCK_N // 64, 8, 2)), (1, 2, 3, 0, 4))
        w = tl.reshape(w, (P_PAD, BLOCK_N))
    return w


@triton.jit
def _direct_store(y, slot, out_ptrs, m, n_start, heads, form: tl.constexpr):
    """Store a tile in DIRECT order as rows of 64 latents, each from the four lanes that hold it.

    The order of the rows is the one that Triton spreads over the program: 8 for a warp, then the
    next warps (16 tokens further, then in the columns beside), then the next rows of the same warp
    (64 columns further, then 8 tokens). So the layout changes without moving data."""
    BLOCK_M: tl.constexpr = form.plan.block_m
    BLOCK_N: tl.constexpr = form.plan.block_n
    SIDES: tl.constexpr = 16 * form.plan.num_warps // BLOCK_M
    BLOCKS: tl.constexpr = BLOCK_N // SIDES // 64
    ROWS: tl.constexpr = BLOCK_M * BLOCK_N // 64
    # [16 tokens, half, token, side, 64 columns, 8 columns, lane % 4, 2] of the instruction
    y = tl.reshape(y, (BLOCK_M // 16, 2, 8, SIDES, BLOCKS, 8, 4, 2))
    y = tl.reshape(tl.permute(y, (1, 4, 3, 0, 2, 6, 5, 7)), (ROWS, 64))
    part = tl.arange(0, ROWS)[:, None]
    row = part % 8 + part // 8 % (BLOCK_M // 16) * 16 + part // (ROWS // 2) * 8
    side = part // (BLOCK_M // 2) % SIDES
    block = part // (BLOCK_M // 2 * SIDES) % BLOCKS
    column = n_start + side * (BLOCK_N // SIDES) + block * 64 + tl.arange(0, 64)[None, :]
    stored = tl.broadcast_to(slot >= 0, (2, BLOCK_N // 64, BLOCK_M // 2))
    out = out_ptrs + (m + row) * heads * (form.L + form.R) + column
    tl.store(out, y, mask=tl.reshape(stored, (ROWS, 1)) & (column < form.L))


@triton.jit
def _store(y, given, out_ptrs, m, n_start, form: tl.constexpr):
    """Store a tile of the tokens m ... m + BLOCK_M and the latents n_start ... n_start + BLOCK_N.

    A store of the shape of the q or W tile would make Triton load that tile with the store's 16
    elements per thread, which for 16-bit operands halves the use of every memory transaction: such
    a tile is stored as [2 BLOCK_M, BLOCK_N / 2]."""
    BLOCK_M: tl.constexpr = form.plan.block_m
    BLOCK_N: tl.constexpr = form.plan.block_n
    FOLD: tl.constexpr = 2 if BLOCK_N == form.P_PAD or BLOCK_M == form.P_PAD else 1
    y = tl.reshape(y, (FOLD * BLOCK_M, BLOCK_N // FOLD))
    part = tl.arange(0, FOLD * BLOCK_M)[:, None]
    row = m + part // FOLD
    slot = query_slots(given, row, form.ALL_ROWS)
    column = tl.arange(0, BLOCK_N // FOLD)[None, :]
    column += n_start + (part % FOLD) * (BLOCK_N // FOLD)
    out = out_ptrs + row * given.heads * (form.L + form.R) + column
    tl.store(out, y, mask=(slot >= 0) & (column < form.L))


@triton.jit
def _sum_rows(w, given, q_ptrs, out_ptrs, inverse, m_start, k, n, form: tl.constexpr):
    """M_TILES rows of the product, each as a sum over k without matrix instructions."""
    M_TILES: tl.constexpr = form.plan.m_tiles
    for i in tl.static_range(M_TILES):
        token = m_start + i
        wanted = (token < given.tokens) & (k < form.P)
        q = tl.load(q_ptrs + token * given.q_row + k, mask=wanted, other=0.0)
        slot = query_slots(given, token, form.ALL_ROWS)
        factor = factors_of(given, token)
        q = scaled(q.to(tl.float32), factor, given.factor is not None, q_ptrs.dtype.element_ty)
        y = tl.sum(q[:, None] * w.to(tl.float32), axis=0)
        y = _product_cast(y, given, inverse, form.Q_LIMIT, False)
        out = out_ptrs + token * given.heads * (form.L + form.R) + n
        tl.store(out, y, mask=(slot >= 0) & (n < form.L))


@triton.jit
def _walk_tiles(w, given, q_ptrs, out_ptrs, inverse, m_start, n_start, form: tl.constexpr):
    """M_TILES tiles of the product, of BLOCK_M tokens each, by matrix instructions."""
    BLOCK_M: tl.constexpr = form.plan.block_m
    M_TILES: tl.constexpr = form.plan.m_tiles
    q = _query_tile(q_ptrs, given.q_row, m_start, given.tokens, form)
    for i in tl.range(0, M_TILES, num_stages=1):
        m = m_start + i * BLOCK_M
        if M_TILES > 1:
            # Loads the next tile while this one is multiplied and stored.
            end = tl.minimum(given.tokens, m_start + M_TILES * BLOCK_M)
            following = _query_tile(q_ptrs, given.q_row, m + BLOCK_M, end, form)
        if form.DIRECT:
            # In the order of `_direct_store`: [2, 1, BLOCK_M / 2]. They arrive during the product.
            row = tl.arange(0, BLOCK_M // 2)[None, None, :]
            token = m + row % 8 + row // 8 * 16 + tl.arange(0, 2)[:, None, None] * 8
            slot = query_slots(given, token, form.ALL_ROWS)
        if given.factor is not None:
            # Here, before there is a result in registers: a loaded tile is half as wide.
            factor = factors_of(given, m + tl.arange(0, BLOCK_M))[:, None]
            q = scaled(q.to(tl.float32), factor, True, q.dtype).to(q.dtype)
        y = tl.dot(q, w, input_precision="ieee")
        y = _product_cast(y, given, inverse, form.Q_LIMIT, form.DIRECT)
        if form.DIRECT:
            _direct_store(y, slot, out_ptrs, m, n_start, given.heads, form)
        else:
            _store(y, given, out_ptrs, m, n_start, form)
        if M_TILES > 1:
            q = following


@triton.jit
def product(given, work, form: tl.constexpr, PDL: tl.constexpr):
    """q_nope @ W_UK of a head, for M_TILES * BLOCK_M tokens and BLOCK_N latents. `work` says which:
    latents of a group of tokens in a row, then groups, then heads. Padded rows are not stored."""
    BLOCK_N: tl.constexpr = form.plan.block_n
    GROUP: tl.constexpr = form.plan.block_m * form.plan.m_tiles
    n_tiles: tl.constexpr = (form.L + BLOCK_N - 1) // BLOCK_N
    m_groups = tl.cdiv(given.tokens, GROUP)
    n_start = (work % n_tiles) * BLOCK_N
    n = n_start + tl.arange(0, BLOCK_N)
    m_start = ((work // n_tiles) % m_groups) * GROUP
    head = work // n_tiles // m_groups
    k = tl.arange(0, form.P_PAD)
    w = _weights(given, head, n_start, k, n, form)
    if PDL:
        # Weights do not change between launches; everything below may.
        tl.extra.cuda.gdc_wait()
    inverse = inverse_of(given.q_scale, form.Q_LIMIT)
    q_ptrs = given.q + head * given.q_head
    out_ptrs = given.out + head * (form.L + form.R)
    if form.plan.block_m == 1:
        _sum_rows(w, given, q_ptrs, out_ptrs, inverse, m_start, k, n, form)
    else:
        _walk_tiles(w, given, q_ptrs, out_ptrs, inverse, m_start, n_start, form)


@triton.jit(do_not_specialize=["tokens", "heads", "q_row", "kv_c_row", "k_pe_row"])
def mla_prep(
    q_ptr, w_ptr, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr, k_scale_ptr,
    q_scale_ptr, factor_ptr, norm_ptr, out_ptr, tokens, heads, q_row, q_head, w_head, w_row, w_col,
    kv_c_row, k_pe_row, cache_block, cache_entry, cos_sin_row, FORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """See the module. Shapes and types are those of `kernels.fused_mla_decode_prep`; FORM is a
    `triton.Form`, whose `plan` gives BLOCK_M and other sizes their values. `factor_ptr` is None for
    a query without a factor, `norm_ptr` for latents that are normalized: the machine code then has
    no trace of it. PDL: the launch has the programmatic-dependent-launch attribute."""
    # The factor shows Triton the alignment, which decides between 16-byte and 2-byte loads;
    # tl.multiple_of has no effect on an argument.
    q_row = q_row * FORM.ALIGN
    kv_c_row = kv_c_row * FORM.ALIGN
    k_pe_row = k_pe_row * FORM.ALIGN
    if PDL:
        # The next kernel may load its weights; before anything else it waits for this grid.
        tl.extra.cuda.gdc_launch_dependents()
    given = Given(
        q_ptr, w_ptr, kv_c_ptr, k_pe_ptr, cache_ptr, slot_ptr, position_ptr, cos_sin_ptr,
        k_scale_ptr, q_scale_ptr, factor_ptr, out_ptr, tokens, heads, q_row, q_head, w_head, w_row,
        w_col, kv_c_row, k_pe_row, cache_block, cache_entry, cos_sin_row, norm_ptr,
    )  # fmt: skip
    cache_programs = tl.cdiv(tokens, FORM.plan.cache_tokens)
    rest = cache_programs + tl.cdiv(tokens * heads, FORM.plan.rope_rows)
    work = tl.program_id(0)
    # Of the rest, the programs of cache rows are the first.
    if FORM.plan.rest_last:
        products = tl.num_programs(0) - rest
        is_rest, unit = work >= products, work - products
    else:
        is_rest, unit, work = work < rest, work, work - rest
    if is_rest:
        if PDL:
            tl.extra.cuda.gdc_wait()
        if unit < cache_programs:
            triton_rows.cache_rows(given, unit, FORM)
        else:
            triton_rows.query_rows(given, unit - cache_programs, FORM)
    else:
        product(given, work, FORM, PDL)
