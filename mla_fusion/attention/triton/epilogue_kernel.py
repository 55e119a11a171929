"""The epilogue of a decode, in Triton: merge, product with W_UV and quantization in one launch.

A CTA has ROWS query rows of one head, one of SLICES slices of their latents, and COLUMNS
columns of their results. It merges its slice and multiplies it with its part of W_UV: with all
columns in one CTA nothing is merged twice. The last CTA of the slices adds the products.
That costs more than it saves where a row has few splits, which its CTAs read in the plan: they may
then divide it by columns.

Slots number the query rows of a step as if every sequence had `positions` of them: slot = sequence
* positions + position. A slot without a query row takes one of the rows after the last sequence, so
every row of the result is written, by one CTA.

W_UV is on its way before the decode has ended: it does not change between launches.
"""

from collections import namedtuple

import triton
import triton.language as tl

from mla_fusion.attention.plan.device_code import LN2, LOG2E
from mla_fusion.attention.triton.reduce_kernel import merge_step
from mla_fusion.kernels.triton_cast import cast

EPSILON = tl.constexpr(1e-10)


# Of a launch: tensors of the plan and of `Epilogue`, `latent_ptr` being `out` of the decode; the
# step, heads, and strides in elements.
Given = namedtuple(
    "Given",
    "partial_ptr partial_lse_ptr reduce_indptr_ptr reduce_partial_map_ptr qo_indptr_ptr latent_ptr "
    "lse_ptr sums_ptr count_ptr w_ptr out_ptr scale_ptr batch tokens positions heads "
    "latent_stride_t latent_stride_h w_head w_row w_column out_stride_t scale_stride_t "
    "scale_stride_g",
)

# Of each row of a CTA: its token, whether there is one, its row in a partial tile, and its splits:
# `begin` ... `end` - 1 of `reduce_partial_map`, none if it was not split.
Rows = namedtuple("Rows", "token real at begin end")


@triton.jit
def read_rows(given, slot, form: tl.constexpr):
    """What `slot` numbers are, for the head of this CTA."""
    head = tl.program_id(2)
    sequence = tl.minimum(slot // given.positions, given.batch)
    in_batch = sequence < given.batch
    first = tl.load(given.qo_indptr_ptr + sequence)
    count = tl.load(given.qo_indptr_ptr + sequence + 1, mask=in_batch, other=0) - first
    count = tl.where(in_batch, count, 0)
    position = slot - sequence * given.positions
    has_query = position < count
    # Slots without a query row before this one: all of those before, less the query rows.
    after_last = tl.load(given.qo_indptr_ptr + given.batch) + slot - first - count
    token = tl.where(has_query, first + position, after_last)
    # Not `has_query`: all loads of the plan are one trip.
    tile = given.reduce_indptr_ptr + sequence * form.FOLD + head // form.HEADS
    begin = tl.load(tile, mask=in_batch, other=0)
    end = tl.where(has_query, tl.load(tile + 1, mask=in_batch, other=0), begin)
    at = position * form.HEADS + head % form.HEADS
    return Rows(token.to(tl.int64), token < given.tokens, at, begin, end)


@triton.jit
def place(rows, reduce_partial_map_ptr, start, HEADS: tl.constexpr, SPLITS: tl.constexpr):
    """Rows of the partial tiles that hold splits `start` ... `start` + SPLITS - 1 of each row."""
    split = rows.begin[None, :] + start + tl.arange(0, SPLITS)[:, None]
    at = tl.load(reduce_partial_map_ptr + split, mask=split < rows.end[None, :], other=0)
    return at.to(tl.int64) * HEADS + rows.at[None, :]


@triton.jit
def loaded(
    rows, at, start, given, latent, L: tl.constexpr, SPLITS: tl.constexpr, VECTORS: tl.constexpr
):  # fmt: skip
    """LSE [SPLITS, ROWS] in base 2, and latents `latent` of the splits from `start` on."""
    split = rows.begin[None, :] + start + tl.arange(0, SPLITS)[:, None]
    wanted = split < rows.end[None, :]
    lse = tl.load(given.partial_lse_ptr + at, mask=wanted, other=float("-inf")) * LOG2E
    values = given.partial_ptr + at[:, :, None] * L + latent[None, None, :]
    if VECTORS:
        values = tl.multiple_of(values, (1, 1, 16))
    return lse, tl.load(values, mask=wanted[:, :, None], other=0.0)


@triton.jit
def merged(
    rows, given, latents, latent, form: tl.constexpr, SPLITS: tl.constexpr, VECTORS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Latents `latent` [ROWS, n] of each row in the type of W_UV, and its LSE [ROWS] in base 2.

    SPLITS splits are loaded at once, and the next ones before these are merged. `latents`: the rows
    that the decode has written itself. VECTORS: four neighbouring latents go to one thread.
    """
    m = tl.full([form.ROWS], float("-inf"), tl.float32)
    l = tl.zeros([form.ROWS], tl.float32)
    acc = tl.zeros([form.ROWS, latent.shape[0]], tl.float32)
    at = place(rows, given.reduce_partial_map_ptr, 0, form.HEADS, SPLITS)
    if PDL:
        # All that follows was written by the decode; the plan was there before it.
        tl.extra.cuda.gdc_wait()
    is_split = rows.end > rows.begin
    values = latents[:, None] + latent[None, :]
    if VECTORS:
        values = tl.multiple_of(values, (1, 8))
    whole = tl.load(values, mask=(rows.real & ~is_split)[:, None], other=0.0)
    lse, part = loaded(rows, at, 0, given, latent, form.L, SPLITS, VECTORS)
    most = tl.max(rows.end - rows.begin, 0)
    for start in range(SPLITS, most + SPLITS, SPLITS):
        next_lse, next_part = lse, part
        # A branch, or the compiler puts these loads behind the merge, which waits for others.
        if start < most:
            at = place(rows, given.reduce_partial_map_ptr, start, form.HEADS, SPLITS)
            next_lse, next_part = loaded(rows, at, start, given, latent, form.L, SPLITS, VECTORS)
        m, l, acc = merge_step(lse, part, m, l, acc)
        lse, part = next_lse, next_part
    lse = tl.where(l > 0.0, m + tl.log2(l), float("-inf"))
    acc *= tl.where(lse > float("-inf"), 1.0 / l, 0.0)[:, None]
    return tl.where(is_split[:, None], acc.to(whole.dtype), whole), lse


@triton.jit
def power_of_two(scale):
    """The least power of two that is neither below `scale` (fp32) nor `EPSILON`."""
    bits = tl.maximum(scale, EPSILON).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def quantized(
    y, token, stored, group, scale_ptr, scale_stride_t, scale_stride_g, QUANTIZATION: tl.constexpr,
    OUT: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """fp32 `y` [COLUMNS, rows] in OUT; with groups, each column is one, whose scale is stored."""
    if QUANTIZATION == "group" or QUANTIZATION == "group_ue8m0":
        scale = tl.maximum(tl.max(tl.abs(y), 0), EPSILON)
        scale = tl.div_rn(scale, tl.full(scale.shape, LARGEST, tl.float32))
        if QUANTIZATION == "group_ue8m0":
            scale = power_of_two(scale)
        tl.store(scale_ptr + token * scale_stride_t + group * scale_stride_g, scale, mask=stored)
        y = tl.div_rn(y, tl.broadcast_to(scale[None, :], y.shape))
    if QUANTIZATION == "tensor":
        y = y * tl.div_rn(1.0, tl.load(scale_ptr))
    return cast(y, 1.0, OUT, LIMIT)


@triton.jit
def is_last(
    sums, sums_ptr, count_ptr, part, ROWS: tl.constexpr, SLICES: tl.constexpr, AMD: tl.constexpr
):  # fmt: skip
    """Store the sums [COLUMNS, DOT_ROWS] of slice `part` % SLICES; True for the CTA that finds all
    stored, which puts the count back to 0 for the next launch: that counts after it has waited."""
    COLUMNS: tl.constexpr = sums.shape[0]
    column, row = tl.arange(0, COLUMNS)[:, None], tl.arange(0, sums.shape[1])[None, :]
    mine = sums_ptr + part.to(tl.int64) * (ROWS * COLUMNS)
    tl.store(mine + row * COLUMNS + column, sums, mask=row < ROWS)
    # All threads have stored when the one that counts releases what it sees. On AMD a barrier does
    # not wait for stores, and a release only for those of its own wave.
    if AMD:
        part = tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v,~{memory}", [part], tl.int32, False, 1
        )
    tl.debug_barrier()
    count_ptr += part // SLICES
    before = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    if before == SLICES - 1:
        tl.store(count_ptr, 0)
    return before == SLICES - 1


@triton.jit
def sum_of_slices(sums_ptr, part, SLICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The stored sums [COLUMNS, ROWS] of all slices, in their order: the same bits every time."""
    column, row = tl.arange(0, COLUMNS)[:, None], tl.arange(0, ROWS)[None, :]
    first = sums_ptr + (part // SLICES).to(tl.int64) * (SLICES * ROWS * COLUMNS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for i in tl.static_range(SLICES):
        total += tl.load(first + (i * ROWS + row) * COLUMNS + column)
    return total


@triton.jit
def write(given, sums, rows, form: tl.constexpr, SLICES: tl.constexpr, LIMIT: tl.constexpr):
    """Round, quantize and store the sums [COLUMNS, n] of `rows`, of which the first ROWS count."""
    COLUMNS: tl.constexpr = sums.shape[0]
    V: tl.constexpr = form.V
    head = tl.program_id(2)
    block = tl.program_id(1) // SLICES
    stored = rows.real & (tl.arange(0, sums.shape[1]) < form.ROWS)
    y = sums.to(given.w_ptr.dtype.element_ty)
    if form.QUANTIZATION != "none":
        y = quantized(
            y.to(tl.float32), rows.token, stored, (head * V) // COLUMNS + block, given.scale_ptr,
            given.scale_stride_t, given.scale_stride_g, form.QUANTIZATION,
            given.out_ptr.dtype.element_ty, form.LARGEST, LIMIT,
        )  # fmt: skip
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    out = given.out_ptr + rows.token[None, :] * given.out_stride_t + head * V + column[:, None]
    tl.store(out, y, mask=stored[None, :])


@triton.jit
def compute(given, form: tl.constexpr, cut: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr):
    """COLUMNS columns of `rows`, or what one of SLICES slices of their latents adds to them:
    `program_id(1)` is the slice + SLICES * the block of columns."""
    ROWS: tl.constexpr = form.ROWS
    DOT_ROWS: tl.constexpr = form.DOT_ROWS
    COLUMNS: tl.constexpr = cut.COLUMNS
    SLICES: tl.constexpr = cut.SLICES
    LATENTS: tl.constexpr = cut.LATENTS
    SLICE: tl.constexpr = form.L // SLICES
    FOURS: tl.constexpr = form.VECTORS > 0 and ROWS * LATENTS >= form.VECTORS
    head = tl.program_id(2)
    block = tl.program_id(1) // SLICES
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    latent = tl.program_id(1) % SLICES * SLICE + tl.arange(0, LATENTS)
    w_tile = given.w_ptr + head.to(tl.int64) * given.w_head + column[:, None] * given.w_column
    w = tl.load(w_tile + latent[None, :] * given.w_row)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = read_rows(given, slot, form)
    # The rows again, in the layout of the result; of one slice, they repeat as in its product.
    RESULTS: tl.constexpr = DOT_ROWS if SLICES == 1 else ROWS
    copy = tl.program_id(0) * ROWS + tl.arange(0, RESULTS) % ROWS
    out_rows = read_rows(given, copy, form)
    latents = given.latent_ptr + rows.token * given.latent_stride_t + head * given.latent_stride_h
    sums = tl.zeros([COLUMNS, DOT_ROWS], tl.float32)
    for start in tl.static_range(0, SLICE, LATENTS):
        x, lse = merged(rows, given, latents, start + latent, form, cut.SPLITS, FOURS, PDL)
        if start > 0:
            w = tl.load(w_tile + (start + latent)[None, :] * given.w_row)
        # Rows repeat up to the least width of a matrix instruction. One row too: for a sum of its
        # products Triton moves W_UV to the layout of the latents, after the wait.
        x = tl.broadcast_to(x[None], (DOT_ROWS // ROWS, ROWS, LATENTS))
        sums = tl.dot(w, tl.trans(tl.reshape(x, (DOT_ROWS, LATENTS))), sums)
    if form.LSE:  # noqa: SIM102 (known when compiled; the other one is not)
        if tl.program_id(1) == 0:
            is_split = rows.end > rows.begin
            lse_ptr = given.lse_ptr + rows.token * given.heads + head
            tl.store(lse_ptr, lse * LN2, mask=is_split)
    if SLICES > 1:
        part = (tl.program_id(0) * given.heads + head) * tl.num_programs(1) + tl.program_id(1)
        if is_last(sums, given.sums_ptr, given.count_ptr, part, ROWS, SLICES, form.AMD):
            total = sum_of_slices(given.sums_ptr, part, SLICES, ROWS, COLUMNS)
            write(given, total, out_rows, form, SLICES, LIMIT)
    else:
        write(given, sums, out_rows, form, SLICES, LIMIT)


# Do not specialize on a batch or a stride of 1: the warm-up runs few batches, and scales in rows
# where a graph may have them in columns. VECTORS says how partial results and latents are aligned.
@triton.jit(
    do_not_specialize=[
        "batch", "tokens", "positions", "heads", "scale_stride_t", "scale_stride_g", "partial_ptr",
        "latent_ptr", "scale_ptr",
    ]
)  # fmt: skip
def epilogue_kernel(
    partial_ptr, partial_lse_ptr, reduce_indptr_ptr, reduce_partial_map_ptr, qo_indptr_ptr,
    latent_ptr, lse_ptr, sums_ptr, count_ptr, w_ptr, out_ptr, scale_ptr, batch, tokens, positions,
    heads, latent_stride_t, latent_stride_h, w_head, w_row, w_column, out_stride_t, scale_stride_t,
    scale_stride_g, FORM: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots ROWS * `program_id(0)` and following of FORM, an `epilogue.Form`; head `program_id(2)`;
    `program_id(1)` is the slice + SLICES * the block of COLUMNS columns of CUT, or of WHOLE_CUT if
    no slot has more than WHOLE splits. LIMIT as `cast` has it. PDL: the launch precedes the end of
    the decode kernel, before which the first LATENTS of W_UV are read.
    """
    given = Given(
        partial_ptr, partial_lse_ptr, reduce_indptr_ptr, reduce_partial_map_ptr, qo_indptr_ptr,
        latent_ptr, lse_ptr, sums_ptr, count_ptr, w_ptr, out_ptr, scale_ptr, batch, tokens,
        positions, heads, latent_stride_t, latent_stride_h, w_head, w_row, w_column, out_stride_t,
        scale_stride_t, scale_stride_g,
    )  # fmt: skip
    if FORM.WHOLE > 0:
        # All CTAs of this slot and head read the same numbers: either each slice is counted or
        # none is, and the count is 0 again behind the launch.
        sequence = tl.program_id(0) // positions
        in_batch = sequence < batch
        tile = reduce_indptr_ptr + sequence * FORM.FOLD + tl.program_id(2) // FORM.HEADS
        begin = tl.load(tile, mask=in_batch, other=0)
        if tl.load(tile + 1, mask=in_batch, other=0) - begin <= FORM.WHOLE:
            compute(given, FORM, FORM.WHOLE_CUT, LIMIT, PDL)
            return
    compute(given, FORM, FORM.CUT, LIMIT, PDL)


@triton.jit(do_not_specialize=["scale_ptr", "scale_stride_t", "scale_stride_g"])
def quantize_kernel(
    y_ptr, out_ptr, scale_ptr, out_stride_t, scale_stride_t, scale_stride_g, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, QUANTIZATION: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize GROUP columns, `program_id(1)`, of row `program_id(0)` of a product [T, WIDTH]."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    inside = column < WIDTH
    y = tl.load(y_ptr + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    one = token + tl.arange(0, 1)
    y = quantized(
        y[:, None], one, one >= 0, tl.program_id(1), scale_ptr, scale_stride_t, scale_stride_g,
        QUANTIZATION, out_ptr.dtype.element_ty, LARGEST, LIMIT,
    )  # fmt: skip
    tl.store(out_ptr + token * out_stride_t + column[:, None], y, mask=inside[:, None])
