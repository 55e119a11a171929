"""The decode of up to 32 query rows for Hopper (sm_90), warp-specialized: one CTA an SM.

One warpgroup computes scores and softmax of a tile, two widen fp8 values and multiply, and a single
warp asks the tensor copy engine (TMA) for the tiles. So a tile is scored while the one before is
multiplied and others arrive, and an item while the one before is stored. The chain of `decode.py`
takes longer than a tile's bytes.

TMA completes `tiles.full`, and the multiplying warps `tiles.free`. The scores complete
`shared.full`, with P of a tile or the last factors, and the multiplying warps `shared.free`.
"""

import math
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import cards, common, tile
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper.common import TILE, barrier, items_of, read_item, tiles_of
from mla_fusion.attention.hopper.decode import load_query, read_scales, store_rows
from mla_fusion.attention.hopper.warp_specialized_common import new_barriers
from mla_fusion.attention.hopper.warp_specialized_fp8 import send, send_last, slot_of
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LN2, Target, softmax_step
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch

WARPS = gl.constexpr(8)  # that multiply

# Tiles in shared memory: keys [n, tokens, L], ropes [n, tokens, R], and their barriers.
Tiles = namedtuple("Tiles", "keys ropes full free")


@gluon.jit
def copy(work, tiles, latents, rotated, block_rows, early, form: gl.constexpr):
    """The copying warp: all tiles of all items, in order, a box from each page."""
    BOX: gl.constexpr = latents.block_type.shape[0]
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    SIZE: gl.constexpr = TILE * (form.L + form.R) * tiles.keys.dtype.primitive_bitwidth // 8
    done = 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        if number == begin:
            # Once: the kernel in front has ended then.
            gdc.gdc_wait()
        for t in range(first, first + count):
            at = done % BUFFERS
            full = tiles.full.index(at)
            for i in gl.static_range(0, TILE, BOX):
                # Behind the end of the item another box stands in.
                token = gl.minimum(t * TILE + i, item.end - 1) // BOX * BOX
                row = common.load_kept(item.table + token // form.PAGE) * block_rows
                row += token % form.PAGE
                if i == 0:
                    mbarrier.wait(tiles.free.index(at), (done // BUFFERS & 1) ^ 1)
                    mbarrier.expect(full, SIZE)
                keys, ropes = tiles.keys.index(at), tiles.ropes.index(at)
                common.tma_load(latents, [row, 0], full, keys.slice(i, BOX))
                common.tma_load(rotated, [row, form.L], full, ropes.slice(i, BOX))
            done += 1
    # A product that merges may be launched, and waits: each SM has room for one of its CTAs. A
    # reduction waits for the last tile: the SMs that end first would take too many of its CTAs.
    if (early > 0) & (begin < end):
        gdc.gdc_launch_dependents()


@gluon.jit
def score(
    work, tiles, q_keys, q_ropes, shared, target, q_ptr, scale, q_scale_ptr, kv_scale_ptr,
    q_stride_t, q_stride_h, form: gl.constexpr,
):  # fmt: skip
    """A warpgroup: scores [tokens, rows] and softmax."""
    ROWS: gl.constexpr = q_keys.shape[0]
    BITS: gl.constexpr = q_keys.dtype.primitive_bitwidth
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // BITS])
    row = work.first_row + gl.arange(0, ROWS, gl.SliceLayout(0, scores))
    done = 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        # All that follows, scales too, may be written by the kernel in front.
        gdc.gdc_wait()
        factor, value_scale = read_scales(scale, q_scale_ptr, kv_scale_ptr, BITS == 8, 256.0)
        if common.is_edge(number == begin, item.begin, form.CHUNKS):
            load_query(
                q_keys, q_ropes, q_ptr, work, item, target.heads, q_stride_t, q_stride_h, form.HEADS
            )
            barrier()
        limit = gl.minimum(item.end, item.end + item.after - (item.count - 1 - row // form.HEADS))
        m = gl.full([ROWS], float("-inf"), gl.float32, row.type.layout)
        l = gl.zeros([TILE, ROWS], gl.float32, scores)
        for t in range(first, first + count):
            at = done % BUFFERS
            mbarrier.wait(tiles.full.index(at), done // BUFFERS & 1)
            s = gl.zeros([TILE, ROWS], gl.float32, scores)
            key, rope = tiles.keys.index(at), tiles.ropes.index(at)
            s = hopper.warpgroup_mma(key, q_keys.permute((1, 0)), s, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma(rope, q_ropes.permute((1, 0)), s, is_async=True)
            s = hopper.warpgroup_mma_wait(0, [s])
            token = t * TILE + gl.arange(0, TILE, gl.SliceLayout(1, scores))
            seen = (token >= item.begin)[:, None] & (token[:, None] < limit[None, :])
            p, decay, m, l = softmax_step(s, seen, factor, m, l)
            send(shared, p, decay, done + number - begin)
            done += 1
        total = gl.sum(l, 0)
        lse = gl.where(total == 0.0, float("-inf"), (m + gl.log2(total)) * LN2)
        inverse = gl.where(lse > float("-inf"), value_scale / total, 0.0)
        send_last(shared, inverse, done + number - begin)
        ws.store_lse(lse, work, item, target, form)


@gluon.jit
def multiply(work, tiles, shared, target, early, form: gl.constexpr):
    """The other warps: the sums [latents, rows], in fp8 of even and of odd latents apart."""
    ROWS: gl.constexpr = shared.p.shape[2]
    BUFFERS: gl.constexpr = tiles.keys.shape[0]
    PARTS: gl.constexpr = 16 // tiles.keys.dtype.primitive_bitwidth  # of the latents
    # Of 32 rows, sums and widened values of two products do not fit the registers.
    RUNNING: gl.constexpr = 2 if ROWS == 16 else 0
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, output)
    done = 0
    begin, end = items_of(work)
    for number in range(begin, end):
        item = read_item(work, number, form)
        first, count = tiles_of(work, item, form)
        acc = gl.zeros([form.L // PARTS, ROWS], gl.float32, output)
        odd = acc
        for t in range(first, first + count):
            slot, phase = slot_of(shared, done + number - begin)
            mbarrier.wait(slot.full, phase)
            decay = slot.factors.load(row_layout)
            at = done % BUFFERS
            # Complete already: the scores have waited. This makes the copies visible here.
            mbarrier.wait(tiles.full.index(at), done // BUFFERS & 1)
            key = tiles.keys.index(at)
            # P is zero behind the end, but a value may be NaN, unless it is widened fp8.
            if PARTS == 1 and item.end - t * TILE < TILE:
                common.clear_rows(key, item.end - t * TILE)
            acc, odd = tile.add_values(acc, odd, decay, key, slot.p, RUNNING, PARTS == 2)
            fence_async_shared()
            barrier()
            mbarrier.arrive(tiles.free.index(at), count=1)
            mbarrier.arrive(slot.free, count=1)
            done += 1
        slot, phase = slot_of(shared, done + number - begin)
        mbarrier.wait(slot.full, phase)
        factors = slot.factors.load(row_layout)
        barrier()
        mbarrier.arrive(slot.free, count=1)
        # The kernel in front may still read what is written here.
        gdc.gdc_wait()
        # The reduction may be launched, and waits.
        if (early < 1) & (number == end - 1):
            gdc.gdc_launch_dependents()
        store_rows((acc,), (odd,), factors, work, item, target, form, PARTS == 2)


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "fresh", "early"])
def mla_decode_few_rows(
    q_ptr, table_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr,
    work_info_ptr, q_scale_ptr, kv_scale_ptr, scale, heads, q_stride_t, q_stride_h, out_stride_t,
    out_stride_h, table_stride, latents, rotated, block_rows, fresh, early,
    FORM: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """This kernel takes the parameters of `mla_decode_hopper`, and is launched as early. early: not
    0 if the product merges, and the copying warp lets it in."""
    if fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = q_ptr.dtype.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    # More make SMs differ in what they get of the memory; of 16 bits no more fit.
    BUFFERS: gl.constexpr = 3 if BITS == 8 else 2
    wide: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(FORM.R * BITS // 8, BITS, 2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = Tiles(
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, FORM.L], wide),
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, FORM.R], narrow),
        new_barriers(BUFFERS), new_barriers(BUFFERS),
    )  # fmt: skip
    q_keys = gl.allocate_shared_memory(TYPE, [ROWS, FORM.L], wide)
    q_ropes = gl.allocate_shared_memory(TYPE, [ROWS, FORM.R], narrow)
    shared = ws.Probabilities(
        gl.allocate_shared_memory(gl.float16 if BITS == 8 else TYPE, [2, TILE, ROWS], p_layout),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
        new_barriers(2), new_barriers(2),
    )  # fmt: skip
    fence_async_shared()
    barrier()
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    work = common.Work(
        work_indptr_ptr, work_info_ptr, table_ptr, table_stride, table_ptr, table_stride,
        gl.program_id(1) * ROWS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (multiply, (work, tiles, shared, target, early, FORM)),
            (score, (
                work, tiles, q_keys, q_ropes, shared, target, q_ptr, scale, q_scale_ptr,
                kv_scale_ptr, q_stride_t, q_stride_h, FORM,
            )),
            (copy, (work, tiles, latents, rotated, block_rows, early, FORM)),
        ],
        [4, 1],
        [128 if BITS == 8 else 152, 40],
    )  # fmt: skip
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    rows, box = 16 if given.rows <= 16 else 32, math.gcd(TILE.value, given.kv_cache.shape[1])
    boxes = common.cache_boxes(given.kv_cache, given.widths, box)
    cache = dict(zip(("latents", "rotated", "block_rows"), boxes, strict=True))
    early = int(cards.merges(given))
    arguments = {**launches.common(given), **cache, "early": early, "ROWS": rows}
    options = {"num_warps": WARPS.value, "launch_pdl": True}
    return Launch(mla_decode_few_rows, launches.grid(given, rows), arguments, options)
