"""A decode kernel for AMD's CDNA 3 and 4 (gfx942, gfx950), in Gluon.

In the portable kernel, with 16 rows, all warps repeat the scores, keys go through LDS with a
barrier before and after, and nothing is in flight meanwhile. Here

- a warp computes the scores of 16 of 64 tokens, then a quarter of the latents over all 64;
- keys come from memory as matrix instructions take them, once for each product;
- keys and values of a tile are on their way at once, and no barrier waits for them; other waves of
  the SIMD compute meanwhile, and there are more of them than if a wave held two tiles' keys;
- only P, the largest scores and the query are in LDS.

Scores and output are transposed, as in `hopper/decode.py`; an fp8 query meets fp8 keys as they are,
values become bf16.

A matrix instruction (MFMA) of 16 by 16 takes from lane l row l % 16 of its first factor and column
l % 16 of the second, and some neighbours in the depth, which l / 16 chooses. So keys are read from
memory for both products in this order, and never moved between lanes:

    scores    tokens are rows: a lane reads 16 bytes of one token, four lanes 64 bytes in a row
    output    latents are rows, tokens the depth: a lane reads EACH latents of several tokens, and
              row i of instruction number r is latent i * EACH + r. So the 16 lanes read 16 * EACH
              latents in a row, and of the result a lane holds 4 * EACH latents in a row.
"""

from collections import namedtuple
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna3

from mla_fusion import gpu
from mla_fusion.attention.cdna.cards import rows_and_waves
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LN2, LOG2E, Target, read_item, softmax_step
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch

WARPS = gl.constexpr(4)
TILE = gl.constexpr(64)  # tokens; 16 of each warp's scores
PART = gl.constexpr(64)  # columns of the query that are in registers at a time
# The cache, the row of its block table for one sequence, and the tokens of an item.
Cache = namedtuple("Cache", "pointer table block_stride begin end")
# The query in LDS, [rows, columns]: its latents and its rotated part.
StoredQuery = namedtuple("StoredQuery", "latents rotated")


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


@gluon.jit
def part_of(query, i: gl.constexpr):
    """Columns i * PART and following of the query, PART of them."""
    LATENTS: gl.constexpr = query.latents.shape[1] // PART
    if i < LATENTS:
        return query.latents.slice(i * PART, PART, 1)
    else:
        return query.rotated.slice((i - LATENTS) * PART, PART, 1)


@gluon.jit
def clamped(cache, at):
    """`at`, or the nearest token of the item. Unsigned: a division by a page is a shift."""
    return gl.maximum(gl.minimum(at, cache.end - 1), cache.begin).to(gl.uint32)


@gluon.jit
def tokens_of(cache, tile, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """COUNT tokens of a tile from its token FIRST on; one of the item for each that is not."""
    return clamped(cache, tile * TILE + FIRST + gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)))


@gluon.jit
def blocks_of(
    cache, tile, FIRST: gl.constexpr, COUNT: gl.constexpr, PAGE: gl.constexpr, LAYOUT: gl.constexpr
):
    """The block of each of these tokens; one number if all are in one."""
    if PAGE % COUNT == 0:
        at = clamped(cache, tile * TILE + FIRST)
    else:
        at = tokens_of(cache, tile, FIRST, COUNT, LAYOUT)
    return gl.load(cache.table + at // PAGE)


@gluon.jit
def read(
    cache, tile, blocks, FIRST: gl.constexpr, COUNT: gl.constexpr, COLUMN: gl.constexpr,
    WIDTH: gl.constexpr, form: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """WIDTH columns from COLUMN on of these tokens, whose `blocks` are known. Tokens that are not
    the item's repeat one that is: their P is zero, and a masked load would be a branch."""
    PAGE: gl.constexpr = form.PAGE
    at = tokens_of(cache, tile, FIRST, COUNT, LAYOUT)
    column = COLUMN + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if PAGE % COUNT == 0:
        start = clamped(cache, tile * TILE + FIRST)
        # LLVM does not know that all lanes have loaded one number. Buffer loads read a register
        # that a vector instruction has written five cycles later at the soonest.
        block = gl.inline_asm_elementwise(
            "v_readfirstlane_b32 $0, $1\ns_nop 4", "=s,v", [blocks], gl.int32, True, 1
        )
        base = cache.pointer + block.to(gl.int64) * cache.block_stride
        entry = (at - start // PAGE * PAGE).to(gl.int32) * form.ENTRY
        return cdna3.buffer_load(base, entry[:, None] + column[None, :])
    else:
        entry = cache.pointer + blocks.to(gl.int64) * cache.block_stride + at % PAGE * form.ENTRY
        return gl.load(entry[:, None] + column[None, :])


@gluon.jit
def read_keys(cache, tile, blocks, form: gl.constexpr, LAYOUT: gl.constexpr):
    """The keys of a tile, PART columns each."""
    keys = ()
    for i in gl.static_range(0, (form.L + form.R) // PART):
        part = read(cache, tile, blocks, 0, TILE, i * PART, PART, form, LAYOUT)
        keys = keys + (part,)  # type: ignore[assignment]  # noqa: RUF005 (no starred tuples)
    return keys


@gluon.jit
def store_query(query, pointer, item, position, stride_t, stride_h):
    """The query's rows into LDS; for rows of padding some that are real, which nobody uses."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [16, 4], [WARPS, 1], [1, 0])
    COLUMNS: gl.constexpr = query.latents.shape[1] + query.rotated.shape[1]
    token = gl.where(item.real, item.token, item.token - position)
    row = token * stride_t + gl.where(item.real, item.head, 0) * stride_h
    pointer = (pointer + gl.convert_layout(row, gl.SliceLayout(1, LAYOUT)))[:, None]
    column = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))[None, :]
    for i in gl.static_range(COLUMNS // PART):
        part_of(query, i).store(gl.load(pointer + i * PART + column))


@gluon.jit
def widened(x, CDNA: gl.constexpr):
    """fp8 values in bf16. Of fp32 that fp8 became, the lower half is zero: nothing is rounded."""
    if x.dtype.primitive_bitwidth == 8 and CDNA == 3:
        bits = x.to(gl.float32).to(gl.int32, bitcast=True) >> 16
        return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    else:
        return x.to(gl.bfloat16)


@gluon.jit
def store_item(acc, m, l, value_scale, item, row, target, form: gl.constexpr):
    """Normalize the sums and write them: to the output, or to partial rows for a split."""
    L: gl.constexpr = form.L
    ROWS: gl.constexpr = acc.shape[1]
    stored: gl.constexpr = output_layout(L, ROWS)
    columns: gl.constexpr = gl.SliceLayout(0, stored)
    divisor = gl.sum(l, 0)
    lse = gl.where(divisor == 0.0, float("-inf"), (m + gl.log2(divisor)) * LN2)
    factor = gl.where(lse > float("-inf"), value_scale / divisor, 0.0)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(0, acc.type.layout))[None, :]
    acc = as_latents(acc, L, stored)
    latent = gl.arange(0, L, gl.SliceLayout(1, stored))
    real = gl.convert_layout(item.real, columns)[None, :]
    if item.partial < 0:
        final = target.out + item.token * target.stride_t + item.head * target.stride_h
        final = gl.convert_layout(final, columns)[None, :] + latent[:, None]
        gl.store(final, acc.to(target.out.dtype.element_ty), mask=real)
        if form.LSE:
            gl.store(target.lse + item.token * target.heads + item.head, lse, mask=item.real)
    else:
        at_partial = item.partial.to(gl.int64) * form.HEADS + row
        rows = target.partial + gl.convert_layout(at_partial, columns)[None, :] * L
        gl.store(rows + latent[:, None], acc, mask=real)
        gl.store(target.partial_lse + at_partial, lse, mask=item.real)


@gluon.jit
def attend(
    cache, query, shared_p, position, item, factor, m, l, acc, first, stop, form: gl.constexpr,
    CDNA: gl.constexpr,
):  # fmt: skip
    """Tiles `first` to `stop` of an item: new m, l and sums of rows at `position` of a query."""
    scores: gl.constexpr = l.type.layout
    output: gl.constexpr = acc.type.layout
    TYPE: gl.constexpr = query.latents.dtype
    ROWS: gl.constexpr = query.latents.shape[0]
    L: gl.constexpr = form.L
    PAGE: gl.constexpr = form.PAGE
    WIDE: gl.constexpr = 128 // TYPE.primitive_bitwidth  # 16 bytes of a lane
    keys: gl.constexpr = gl.DotOperandLayout(0, scores, WIDE)
    queries: gl.constexpr = gl.DotOperandLayout(1, scores, WIDE)
    values: gl.constexpr = value_layout(L, CDNA)
    DEPTH: gl.constexpr = depth_of(CDNA)
    CHUNK: gl.constexpr = 4 * DEPTH
    # Row i of n sees tokens up to n - 1 - i before the end of the sequence.
    limit = gl.minimum(item.end, item.end + item.after - (item.count - 1 - position))
    blocks = blocks_of(cache, first, 0, TILE, PAGE, keys)
    for tile in range(first, stop):
        key = read_keys(cache, tile, blocks, form, keys)
        value_blocks = ()
        for i in gl.static_range(TILE // CHUNK):
            part = blocks
            if PAGE % TILE != 0:
                part = blocks_of(cache, tile, i * CHUNK, CHUNK, PAGE, values)
            value_blocks = value_blocks + (part,)  # type: ignore[assignment]  # noqa: RUF005
        blocks = blocks_of(cache, tile + 1, 0, TILE, PAGE, keys)
        value = ()
        for i in gl.static_range(TILE // CHUNK):
            part = read(cache, tile, value_blocks[i], i * CHUNK, CHUNK, 0, L, form, values)
            value = value + (part,)  # type: ignore[assignment]  # noqa: RUF005
        s = gl.zeros([TILE, ROWS], gl.float32, scores)
        for i in gl.static_range((L + form.R) // PART):
            part = part_of(query, i).permute((1, 0)).load(queries)
            s = cdna3.mfma(key[i].to(TYPE), part, s)
        at = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, scores))
        seen = (at >= item.begin)[:, None] & (at[:, None] < limit[None, :])
        p, decay, m, l = softmax_step(s, seen, factor, m, l)
        shared_p.store(p.to(gl.bfloat16))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(0, output))[None, :]
        for i in gl.static_range(TILE // CHUNK):
            p_part = shared_p.slice(i * CHUNK, CHUNK).load(gl.DotOperandLayout(1, output, DEPTH))
            part = as_factor(widened(value[i], CDNA), L, gl.DotOperandLayout(0, output, DEPTH))
            acc = cdna3.mfma(part, p_part, acc)
    return m, l, acc


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride"])
def mla_decode_cdna(
    q_ptr, kv_ptr, table_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr,
    work_info_ptr, qo_indptr_ptr, kv_indptr_ptr, q_scale_ptr, kv_scale_ptr, scale, heads,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride, block_stride,
    FORM: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, CDNA: gl.constexpr,
):  # fmt: skip
    """`plan.launches` has the parameters. CDNA: 3 or 4. BLOCK_N: tokens of a tile."""
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    L: gl.constexpr = FORM.L
    R: gl.constexpr = FORM.R
    HEADS: gl.constexpr = FORM.HEADS
    scores: gl.constexpr = product_layout(CDNA, BITS)
    output: gl.constexpr = product_layout(CDNA, 16)
    # Sixteen bytes are read at once, from each row at another place.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(128 // BITS, 1, BITS // 2, [1, 0])
    narrow: gl.constexpr = gl.SwizzledSharedLayout(128 // BITS, 1, BITS * R // 128, [1, 0])
    query = StoredQuery(
        gl.allocate_shared_memory(TYPE, [ROWS, L], swizzled),
        gl.allocate_shared_memory(TYPE, [ROWS, R], narrow),
    )
    by_token: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [0, 1])
    shared_p = gl.allocate_shared_memory(gl.bfloat16, [TILE, ROWS], by_token)
    factor = scale * LOG2E
    value_scale = 1.0
    if BITS == 8:
        factor *= gl.load(q_scale_ptr)
    if kv_ptr.dtype.element_ty.primitive_bitwidth == 8:
        value_scale = gl.load(kv_scale_ptr)
        factor *= value_scale
    first_row = gl.program_id(1) * ROWS
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, scores))
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    begin = gl.load(work_indptr_ptr + gl.program_id(0))
    for work in range(begin, gl.load(work_indptr_ptr + gl.program_id(0) + 1)):
        info = work_info_ptr + 8 * work
        item = read_item(info, qo_indptr_ptr, kv_indptr_ptr, row, heads, HEADS, FORM.FOLD)
        table = table_ptr + item.sequence.to(gl.int64) * table_stride
        cache = Cache(kv_ptr, table, block_stride, item.begin, item.end)
        first = item.begin // TILE
        stop = (item.end + TILE - 1) // TILE
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, scores))
        l = gl.zeros([TILE, ROWS], gl.float32, scores)
        acc = gl.zeros([L, ROWS], gl.float32, output)
        # Row blocks after the query rows of this sequence have nothing to do.
        if (stop > first) & (first_row < HEADS * item.count):
            position = row // HEADS
            store_query(query, q_ptr, item, position, q_stride_t, q_stride_h)
            m, l, acc = attend(
                cache, query, shared_p, position, item, factor, m, l, acc, first, stop, FORM, CDNA,
            )  # fmt: skip
        store_item(acc, m, l, value_scale, item, row, target, FORM)


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    q, cache, arch = given.q, given.kv_cache, gpu.of(given.q.device).arch
    rows, waves = rows_and_waves(arch, given.rows, q.dtype, cache.dtype, cache.shape[1])
    arguments = {
        **launches.common(given),
        "kv_ptr": cache, "block_stride": cache.stride(0), "ROWS": rows, "BLOCK_N": TILE.value,
        "CDNA": 4 if arch == "gfx950" else 3,
    }  # fmt: skip
    options = {"num_warps": WARPS.value, "waves_per_eu": waves}
    return Launch(mla_decode_cdna, launches.grid(given, rows), arguments, options)
