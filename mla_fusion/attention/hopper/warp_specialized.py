"""A decode kernel for Hopper (sm_90) with 64 query rows, whose warps have different work.

In `hopper/decode.py` eight warps compute scores, P and output in step, and the tensor cores idle
during the softmax. Here one warpgroup computes the scores of a tile, the softmax and the left half
of the output, the other one only the right half, and a single warp asks the tensor copy engine
(TMA) for the tiles. Products of the right half run beside those of the left half, and end last. So
that half is freed, copied and scored in two quarters of the latents, last of all.

Scores are [rows, tokens]: 64 rows fill the M of WGMMA. Their registers, P, are the left operand of
the left half's products. For the other warpgroup P and factors go through shared memory, behind
the start of those products. Barriers (mbarrier), all completed by one arrival:

| barrier | completed by | waited for by |
|---|---|---|
| query.full: the query's rows of an item are there | TMA | the scores |
| query.free: they were used | the scores | the copying warp |
| left_full: left half and rotated part of a tile have arrived | TMA | who reads |
| right_full: so has a quarter of the right | TMA | who reads |
| left_free: the left half's products have ended | the scores | the copying warp |
| right_free: a quarter's products have ended | the right half | the copying warp |
| shared.full: P of a tile, or the last factor, is there | the scores | the right half |
| shared.free: it was loaded | the right half | the scores |
| scored: all products of a tile's scores are issued | the scores | the right half |
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper import cards
from mla_fusion.attention.hopper import warp_specialized_bf16 as bf16
from mla_fusion.attention.hopper import warp_specialized_common as ws
from mla_fusion.attention.hopper import warp_specialized_fp8 as fp8
from mla_fusion.attention.hopper.common import TILE, Work, barrier, cache_boxes
from mla_fusion.attention.hopper.warp_specialized_common import ROWS, WARPS, new_barriers
from mla_fusion.attention.plan import launches
from mla_fusion.attention.plan.device_code import LOG2E, Target
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.launches import Launch


# Do not specialize on stride 1: the warm-up's one-column table would compile another variant.
@gluon.jit(do_not_specialize=["table_stride", "fresh", "early"])
def mla_decode_hopper_ws(
    table_ptr, out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, work_indptr_ptr, work_info_ptr,
    q_scale_ptr, kv_scale_ptr, scale, heads, out_stride_t, out_stride_h, table_stride, q_halves,
    q_quarters, q_rotated, halves, quarters, rotated, block_rows, fresh, early,
    FORM: gl.constexpr,
):  # fmt: skip
    """`plan.launches` has the parameters; the others are `Boxes` of query and cache, and the rows
    of a cache from one block to the next. It is launched as early as `hopper.decode`, which has
    `fresh` too.
    """
    if fresh != 0:
        gdc.gdc_wait()
    TYPE: gl.constexpr = halves.block_type.element_ty
    BITS: gl.constexpr = TYPE.primitive_bitwidth
    FP8: gl.constexpr = BITS == 8
    BUFFERS: gl.constexpr = 4 if FP8 else 2
    HALF: gl.constexpr = halves.block_type.shape[1]
    PART: gl.constexpr = quarters.block_type.shape[1]
    R: gl.constexpr = rotated.block_type.shape[1]
    tile: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    rope: gl.constexpr = gl.NVMMASharedLayout(R * BITS // 8, BITS, 2)
    tiles = ws.Tiles(
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, HALF], tile),
        gl.allocate_shared_memory(TYPE, [2 * BUFFERS, TILE, PART], tile),
        gl.allocate_shared_memory(TYPE, [BUFFERS, TILE, R], rope),
        new_barriers(BUFFERS), new_barriers(2 * BUFFERS),
        new_barriers(BUFFERS), new_barriers(2 * BUFFERS),
    )  # fmt: skip
    query_made = new_barriers(2)
    query = ws.Query(
        ws.Boxes(q_halves, q_quarters, q_rotated),
        gl.allocate_shared_memory(TYPE, [ROWS, HALF], tile),
        gl.allocate_shared_memory(TYPE, [2, ROWS, PART], tile),
        gl.allocate_shared_memory(TYPE, [ROWS, R], rope),
        query_made.index(0), query_made.index(1),
    )  # fmt: skip
    work = Work(
        work_indptr_ptr, work_info_ptr, table_ptr, table_stride,
        table_ptr, table_stride, gl.program_id(1) * ROWS,
    )  # fmt: skip
    target = Target(
        out_ptr, lse_ptr, partial_ptr, partial_lse_ptr, out_stride_t, out_stride_h, heads
    )
    cache = ws.Boxes(halves, quarters, rotated)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if FP8:
        shared = ws.Probabilities(
            gl.allocate_shared_memory(gl.float16, [2, ROWS, TILE], p_layout),
            gl.allocate_shared_memory(gl.float32, [2, ROWS], plain),
            new_barriers(2), new_barriers(2, 2),
        )  # fmt: skip
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (fp8.score, (
                    work, query, tiles, shared, target, scale, q_scale_ptr, kv_scale_ptr, FORM
                )),
                (fp8.multiply, (work, tiles, shared, target, FORM, False)),
                (fp8.multiply, (work, tiles, shared, target, FORM, True)),
                (ws.copy, (work, query, tiles, cache, block_rows, early, FORM)),
            ],
            [4, 4, 1],
            [192, 192, 24],
        )  # fmt: skip
    else:
        made = new_barriers(3)
        shared = ws.Probabilities(
            gl.allocate_shared_memory(TYPE, [ROWS, TILE], p_layout),
            gl.allocate_shared_memory(gl.float32, [ROWS], plain),
            made.index(0), made.index(1),
        )  # fmt: skip
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (bf16.score, (
                    work, query, tiles, shared, made.index(2), target, scale * LOG2E, FORM
                )),
                (bf16.multiply, (work, tiles, shared, made.index(2), target, FORM)),
                (ws.copy, (work, query, tiles, cache, block_rows, early, FORM)),
            ],
            [4, 1],
            [216, 40],
        )  # fmt: skip
    # Idle CTAs must signal too: a dependent grid waits for all of them.
    gdc.gdc_wait()
    gdc.gdc_launch_dependents()


def launch_of(given: Inputs) -> Launch:
    """The launch of a decode."""
    latent, rope = given.widths
    columns = latent // 2, latent // 4, rope
    halves, quarters, rotated, block_rows = cache_boxes(given.kv_cache, columns)
    arguments = {
        **launches.common(given),
        **ws.query_boxes(given.q, latent, given.plan.layout.per_work),
        "halves": halves, "quarters": quarters, "rotated": rotated, "block_rows": block_rows,
        "early": int(cards.merges(given)),
    }  # fmt: skip
    options = {"num_warps": WARPS.value, "launch_pdl": True}
    return Launch(mla_decode_hopper_ws, launches.grid(given, ROWS.value), arguments, options)
