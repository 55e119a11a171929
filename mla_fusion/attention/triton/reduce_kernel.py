"""The reduction behind a decode, in Triton: the splits of a sequence become rows of the output."""

import triton
import triton.language as tl

from mla_fusion.attention.plan.device_code import LN2, LOG2E, within
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.kernels.launches import Launch
from mla_fusion.kernels.triton import early_launch


@triton.jit
def merge_step(lse, part, m, l, acc):
    """Merge SPLITS more splits: their LSE [splits, rows] and outputs [..., columns]. A split of
    which a row sees no key leaves the row's bits alone: it adds zeros, and decays by 1."""
    new_m = tl.maximum(m, tl.max(lse, 0))
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = tl.exp2((lse - base[None, :]) * LOG2E)
    decay = tl.exp2((m - base) * LOG2E)
    l = l * decay + tl.sum(p, 0)
    acc = acc * decay[:, None] + tl.sum(part * p[:, :, None], 0)
    return new_m, l, acc


@triton.jit
def mla_reduce(
    partial_ptr, partial_lse_ptr, reduce_indptr_ptr, reduce_final_map_ptr, reduce_partial_map_ptr,
    qo_indptr_ptr, sink_ptr, out_ptr, lse_ptr, heads, out_stride_t, out_stride_h,
    SINK: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, LSE: tl.constexpr,
    FOLLOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of tile `program_id(0)`: ROWS query rows from ROWS * `program_id(1)` on.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), over SPLITS splits at once
    and for COLUMNS latents (`program_id(2)`; the last one may have fewer). PDL: the launch precedes
    the end of the decode kernel, which has waited for the plan; this kernel waits before it reads
    more. FOLLOWED: by a product, which waits; in a benchmark the next decode would begin early."""
    if PDL and FOLLOWED:
        tl.extra.cuda.gdc_launch_dependents()
    PADDED: tl.constexpr = (L + COLUMNS - 1) // COLUMNS * COLUMNS
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(reduce_indptr_ptr + tile)
    last = tl.load(reduce_indptr_ptr + tile + 1)
    # In the same trip to memory: rows, any for a tile without splits; the first token; rows from a
    # split to the next, since a plan has none or several.
    count = tl.load(reduce_final_map_ptr + 2 * tile + 1) - tl.load(reduce_final_map_ptr + 2 * tile)
    token = tl.load(qo_indptr_ptr + tile // FOLD).to(tl.int64) + row // HEADS
    apart = tl.load(reduce_partial_map_ptr + 1)
    if first == last:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    head = tile % FOLD * HEADS + row % HEADS
    real = (row // HEADS < count) & (head < heads)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, SPLITS):
        split = start + tl.arange(0, SPLITS)
        at = (split.to(tl.int64) * apart)[:, None] * HEADS + row[None, :]
        if PDL:
            tl.extra.cuda.gdc_wait()
        wanted = (split < last)[:, None] & real[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=wanted, other=float("-inf"))
        values = partial_ptr + at[:, :, None] * L + column[None, None, :]
        of_split = within(wanted[:, :, None], column[None, None, :], L, PADDED)
        part = tl.load(values, mask=of_split, other=0.0)
        m, l, acc = merge_step(lse, part, m, l, acc)
    # The LSE of a single split is its own, to the bit.
    lse = tl.where(l == 0.0, float("-inf"), m + tl.log2(l) * LN2)
    if SINK:
        l += tl.exp2((tl.load(sink_ptr + head, mask=real, other=0.0) - m) * LOG2E)
    acc *= tl.where(lse > float("-inf"), 1.0 / l, 0.0)[:, None]
    final = out_ptr + token * out_stride_t + head * out_stride_h
    of_row = within(real[:, None], column[None, :], L, PADDED)
    tl.store(final[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=of_row)
    if LSE:  # noqa: SIM102 (known when compiled; the other one is not)
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + token * heads + head, lse, mask=real)


def reduction(tiles: int, rows: int, batch_invariant: bool = False) -> tuple[int, int, int]:
    """Rows, splits and columns of a CTA, for `tiles` tiles of `rows` query rows each.

    Few tiles have many splits, and a CTA loads them at once. The numbers are measured on an H200,
    where a thread has 16 bytes of each row and split. The order of a row's sum depends on all
    three, so every step of a batch-invariant plan has those of a small batch."""
    if tiles * rows <= 128 and not batch_invariant:
        return 1, 32, 256
    if tiles * rows <= 256 or batch_invariant:
        return 1, 16, 512
    return (1 if tiles * rows <= 1024 else 2 if tiles * rows <= 4096 else 4), 4, 512


def launch_of(given: Inputs) -> Launch:
    """The launch of the reduction of a step."""
    plan, out, (latent, _) = given.plan, given.out, given.widths
    assert plan.step is not None, "the caller has refreshed the plan"
    tiles = plan.step.batch * plan.layout.fold
    rows, splits, columns = reduction(tiles, given.rows, plan.settings.batch_invariant)
    columns = min(columns, next_power_of_two(latent))
    stride_t, stride_h, _ = out.stride()
    early = early_launch(out.device)
    arguments = {
        "partial_ptr": plan.partial_output, "partial_lse_ptr": plan.partial_lse,
        "reduce_indptr_ptr": plan.reduce_indptr, "reduce_final_map_ptr": plan.reduce_final_map,
        "reduce_partial_map_ptr": plan.reduce_partial_map, "qo_indptr_ptr": plan.qo_indptr,
        "sink_ptr": given.or_unused(given.sink), "out_ptr": out,
        "lse_ptr": given.or_unused(given.lse), "heads": out.shape[1], "out_stride_t": stride_t,
        "out_stride_h": stride_h, "SINK": given.sink is not None, "L": latent,
        "HEADS": plan.layout.per_work, "FOLD": plan.layout.fold, "ROWS": rows, "SPLITS": splits,
        "COLUMNS": columns, "LSE": given.lse is not None, "FOLLOWED": given.epilogue is not None,
        "PDL": early.pop("PDL"),
    }  # fmt: skip
    grid = tiles, -(-given.rows // rows), -(-latent // columns)
    return Launch(mla_reduce, grid, arguments, {"num_warps": 4, **early})
