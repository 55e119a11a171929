"""The decode kernel for Hopper (sm_90), in Gluon: the layouts and copies are spelled out.

Why not only the portable kernel: shared memory holds two tiles, and its pipeliner then copies the
next one only when the current one has been used. Nor can it read an fp8 tile as latent vectors
across tokens without a trip through shared memory.

Scores are computed transposed, as keys [tokens, L] times queries [L, rows], and so is the output,
as values [L, tokens] times P [tokens, rows]. WGMMA needs M >= 64: transposed, M is tokens or
latents (always enough) instead of a rank's 16 heads. Keys and values are one tile in shared
memory, read once for each product while the next one is copied (`hopper/tile.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import cards, common, tile
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper.common import TILE, Work, barrier, read_item
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LN2, LOG2E, Source, Target, softmax_step
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch


@gluon.jit
def query_rows(target, q_ptr, work, item, heads, stride_t, stride_h, HEADS: gl.constexpr):
    """Rows of the query [rows, width] for `target`; zeros for rows of padding."""
    layout: gl.constexpr = common.load_layout(target.shape[1], target.dtype, gl.num_warps())
    rows = work.first_row + gl.arange(0, target.shape[0], gl.SliceLayout(1, layout))
    cols = gl.arange(0, target.shape[1], gl.SliceLayout(0, layout))
    head = item.first_head + rows % HEADS
    pointers = q_ptr + (rows // HEADS).to(gl.int64) * stride_t + head * stride_h
    wanted = (rows // HEADS < item.count) & (head < heads)
    return gl.load(pointers[:, None] + cols[None, :], mask=wanted[:, None], other=0.0)


@gluon.jit
def load_query(keys, ropes, q_ptr, work, item, heads, stride_t, stride_h, HEADS: gl.constexpr):
    """The query [rows, L + R] into shared memory, in one trip to memory."""
    query = q_ptr + item.token * stride_t
    latents = query_rows(keys, query, work, item, heads, stride_t, stride_h, HEADS)
    rotated = query_rows(ropes, query + keys.shape[1], work, item, heads, stride_t, stride_h, HEADS)
    keys.store(latents)
    ropes.store(rotated)
    fence_async_shared()


@gluon.jit
def store_output(start, sums, odds, inverse, wanted, L: gl.constexpr, PAIRS: gl.constexpr):
    """Store L latents times `inverse` from `start` [rows] on: see `store_item`."""
    TYPE: gl.constexpr = start.dtype.element_ty
    col = gl.arange(0, sums[0].shape[0], gl.SliceLayout(1, sums[0].type.layout))
    for i in gl.static_range(len(sums)):
        acc, odd = sums[i] * inverse, odds[i] * inverse
        pointers = start + i * (L // len(sums))
        if PAIRS:
            # One store for two neighbours: one of them would fill only half of a memory sector.
            pairs = tile.packed(acc, odd, TYPE)
            target = pointers.to(gl.pointer_type(pairs.dtype), bitcast=True)
            gl.store(target[None, :] + col[:, None], pairs, mask=wanted[None, :])
        else:
            gl.store(pointers[None, :] + col[:, None], acc.to(TYPE), mask=wanted[None, :])


@gluon.jit
def read_scales(scale, q_scale_ptr, kv_scale_ptr, FP8: gl.constexpr, WIDENED: gl.constexpr = 1.0):
    """The factors of the scores, in base 2, and of the output. WIDENED: what values lack of it."""
    factor, value_scale = scale * LOG2E, 1.0
    if FP8:
        value_scale = gl.load(kv_scale_ptr)
        factor *= gl.load(q_scale_ptr) * value_scale
        value_scale *= WIDENED
    return factor, value_scale


@gluon.jit
def attend(
    buffers, q_keys, q_ropes, shared_p, copies, work, item, row, factor, first_end, stop, phases,
    current, copied, early, form: gl.constexpr, BULK: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of an item. Its first tile is on the way to buffer
    `current`.

    row: query rows of the CTA, in the layout of columns of the scores.
    copied: no tile is copied from this token on. Where it lies behind the item, the first tile of
    the next item is on its way at the end. early: the kernel behind is let in with the last tile.

    Returns the sums [latents, rows], with PAIRS those of even and of odd latents, m [rows],
    l [tokens, rows], the phases of the barriers, and the buffer of the next tile."""
    ROWS: gl.constexpr = shared_p.shape[1]
    L: gl.constexpr = q_keys.shape[1]
    score: gl.constexpr = row.type.layout.parent
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    # Row i of n sees tokens up to n - 1 - i before the end of the sequence.
    limit = gl.minimum(item.end, item.end + item.after - (item.count - 1 - row // form.HEADS))
    m = gl.full([ROWS], float("-inf"), gl.float32, row.type.layout)
    l = gl.zeros([TILE, ROWS], gl.float32, score)
    acc = gl.zeros([L // 2 if PAIRS else L, ROWS], gl.float32, output)
    odd = acc
    for t in range(item.begin // TILE, stop):
        if BULK:
            # No warp reads the other buffer any more.
            barrier()
        else:
            async_copy.wait_group(0)
        # After the last tile this copies nothing, or the next item's first.
        tile.start_copy(buffers, 1 - current, copies, t + 1, copied, first_end, form, BULK)
        if early & (t + 1 == stop):
            gdc.gdc_launch_dependents()
        left = item.end - t * TILE
        if BULK:
            mbarrier.wait(buffers.arrived.index(current), phases >> current & 1)
            phases ^= 1 << current
            keys = buffers.keys.index(current)
            # P is zero there. Widened fp8 has no NaN.
            if keys.dtype.primitive_bitwidth == 16 and left < TILE:
                common.clear_rows(keys, left)
        else:
            fence_async_shared()
        key = buffers.keys.index(current)
        s = gl.zeros([TILE, ROWS], gl.float32, score)
        s = hopper.warpgroup_mma(key, q_keys.permute((1, 0)), s, use_acc=False, is_async=True)
        rope = buffers.ropes.index(current)
        s = hopper.warpgroup_mma(rope, q_ropes.permute((1, 0)), s, is_async=True)
        s = hopper.warpgroup_mma_wait(0, [s])
        at = t * TILE + gl.arange(0, TILE, gl.SliceLayout(1, score))
        seen = (at >= item.begin)[:, None] & (at[:, None] < limit[None, :])
        if form.SPARSE:
            if t * TILE < form.FIRST:
                slots = gl.load(copies.first.table + at, mask=at < first_end, other=-1)
            else:
                slots = gl.load(copies.extra.table + at - form.FIRST, mask=at < item.end, other=-1)
            seen &= (slots >= 0)[:, None]
        p, decay, m, l = softmax_step(s, seen, factor, m, l)
        shared_p.store(p.to(shared_p.dtype))
        fence_async_shared()
        decay = gl.convert_layout(decay, gl.SliceLayout(0, output))
        acc, odd = tile.add_values(acc, odd, decay, key, shared_p, 0, PAIRS)
        current = 1 - current
    return acc, odd, m, l, phases, current


@gluon.jit
def store_rows(sums, odds, inverse, work, item, target, form: gl.constexpr, PAIRS: gl.constexpr):
    """Store sums times `inverse` [rows]: to the output, or to partial rows for a split. sums:
    [latents, rows] of each part of the L latents; with PAIRS the even ones, and `odds` the others.
    """
    layout: gl.constexpr = inverse.type.layout
    rows, head, real = ws.rows_of(work, item, target, inverse.shape[0], form.HEADS, layout)
    inverse = inverse[None, :]
    if item.partial < 0:
        at_token = item.token + rows // form.HEADS
        final = target.out + at_token * target.stride_t + head * target.stride_h
        store_output(final, sums, odds, inverse, real, form.L, PAIRS)
    else:
        partial = target.partial + (item.partial.to(gl.int64) * form.HEADS + rows) * form.L
        store_output(partial, sums, odds, inverse, real, form.L, PAIRS)


@gluon.jit
def store_item(
    sums, odds, m, l, value_scale, work, item, target, sink_ptr, form: gl.constexpr,
    PAIRS: gl.constexpr,
):  # fmt: skip
    """Normalize the sums and store them and their LSE, as `store_rows` has them."""
    out_row: gl.constexpr = gl.SliceLayout(0, sums[0].type.layout)
    l = gl.sum(l, 0)
    lse = gl.where(l == 0.0, float("-inf"), (m + gl.log2(l)) * LN2)
    lse, divisor = gl.convert_layout(lse, out_row), gl.convert_layout(l, out_row)
    if form.SINK and item.partial < 0:
        _, head, real = ws.rows_of(work, item, target, lse.shape[0], form.HEADS, out_row)
        sink = gl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E
        divisor += gl.exp2(sink - gl.convert_layout(m, out_row))
    inverse = gl.where(lse > float("-inf"), value_scale / divisor, 0.0)
    store_rows(sums, odds, inverse, work, item, target, form, PAIRS)
    ws.store_lse(lse, work, item, target, form)


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "extra_table_stride", "fresh", "early"])
def mla_decode_hopper(
    q_ptr, kv_ptr, table_ptr, extra_ptr, extra_table_ptr, first_lens_ptr, sink_ptr, out_ptr,
    lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr, q_scale_ptr,
    kv_scale_ptr, scale, heads, q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride,
    block_stride, extra_table_stride, extra_block_stride, latents, rotated, block_rows, fresh,
    early, FORM: gl.constexpr, ROWS: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    """`plan.launches` has the parameters, `common.cache_boxes` latents, rotated and block_rows.

    BULK: the copy engine takes whole tiles. The launch precedes the end of the kernel in front, for
    which this one waits before it reads anything but the plan, and at once if `fresh` is not 0:
    that kernel may be writing the plan."""
    if fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = kv_ptr.dtype.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    FP8: gl.constexpr = BITS == 8
    # An item copies the first tile of the next one, if both are of one query.
    AHEAD: gl.constexpr = FORM.CHUNKS and BULK
    wide: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(FORM.R * BITS // 8, BITS, 2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    keys = gl.allocate_shared_memory(TYPE, [2, TILE, FORM.L], wide)
    ropes = gl.allocate_shared_memory(TYPE, [2, TILE, FORM.R], narrow)
    q_keys = gl.allocate_shared_memory(TYPE, [ROWS, FORM.L], wide)
    q_ropes = gl.allocate_shared_memory(TYPE, [ROWS, FORM.R], narrow)
    shared_p = gl.allocate_shared_memory(gl.float16 if FP8 else TYPE, [TILE, ROWS], p_layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    buffers = tile.Buffers(keys, ropes, arrived)
    if BULK:
        for i in gl.static_range(2):
            mbarrier.init(arrived.index(i), count=1)
        fence_async_shared()
        barrier()
    # For each buffer a bit: the phase of its barrier that the next tile by the engine completes.
    phases, current = 0, 0

    # More warps than a tile has 16 tokens for share them by rows.
    WARPS: gl.constexpr = gl.num_warps()
    SPLIT: gl.constexpr = WARPS * 16 // TILE
    score: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // SPLIT, SPLIT], [16, ROWS // SPLIT, 256 // BITS]
    )
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    work = Work(
        work_indptr_ptr, work_info_ptr, table_ptr, table_stride,
        extra_table_ptr, extra_table_stride, gl.program_id(1) * ROWS,
    )  # fmt: skip
    row = work.first_row + gl.arange(0, ROWS, gl.SliceLayout(0, score))
    begin, end = common.items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, FORM)
        first = Source(kv_ptr, item.table, block_stride)
        extra = Source(extra_ptr, item.extra_table, extra_block_stride)
        copies = tile.Copies(first, extra, latents, rotated, block_rows)
        # All that follows, scales too, may be written by the kernel in front.
        gdc.gdc_wait()
        factor, value_scale = read_scales(scale, q_scale_ptr, kv_scale_ptr, FP8, 256.0)
        first_end = item.end
        if FORM.SPARSE:
            first_end = gl.minimum(item.end, gl.load(first_lens_ptr + item.sequence))
        first_tile = item.begin // TILE
        # Row blocks after the query rows of this sequence have nothing to do.
        has_rows = work.first_row < FORM.HEADS * item.count
        stop = gl.where(has_rows, (item.end + TILE - 1) // TILE, first_tile)
        # A copy without a wait would put its barrier a phase ahead.
        copied = item.end
        if not AHEAD:
            current = 0
        elif not common.is_edge(number + 1 == end, item.after, AHEAD):
            copied += item.after
        if common.is_edge(number == begin, item.begin, AHEAD):
            if first_tile < stop:
                tile.start_copy(
                    buffers, current, copies, first_tile, item.end, first_end, FORM, BULK
                )
            load_query(
                q_keys, q_ropes, q_ptr, work, item, heads, q_stride_t, q_stride_h, FORM.HEADS
            )
        acc, odd, m, l, phases, current = attend(
            buffers, q_keys, q_ropes, shared_p, copies, work, item, row, factor, first_end, stop,
            phases, current, copied, (early > 0) & (number + 1 == end), FORM, BULK, FP8,
        )  # fmt: skip
        async_copy.wait_group(0)
        # The zeros after the last tile, before the copy engine writes there.
        fence_async_shared()
        # The reduction may be launched, and waits. Not yet where it has many rows: all its CTAs
        # would go to the few SMs that are done first.
        if ROWS <= 32 and number + 1 == end:
            gdc.gdc_launch_dependents()
        store_item((acc,), (odd,), m, l, value_scale, work, item, target, sink_ptr, FORM, FP8)
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    rows = 16 if given.rows <= 16 else 32 if given.rows <= 32 else 64
    cache = given.kv_cache
    # The slots of a sparse sequence are scattered rows.
    latents, rotated, block_rows = cache, cache, 0
    if not given.sparse:
        latents, rotated, block_rows = common.cache_boxes(cache, given.widths)
    arguments = {
        **launches.common(given), **launches.caches(given),
        "latents": latents, "rotated": rotated, "block_rows": block_rows,
        "ROWS": rows, "BULK": block_rows > 0, "early": int(cards.merges(given)),
    }  # fmt: skip
    options = {"num_warps": 4 if rows == 16 else 8, "launch_pdl": True}
    return Launch(mla_decode_hopper, launches.grid(given, rows), arguments, options)
