"""The reduction behind a decode, in Triton: pieces of split sequences become rows of the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from mla_fusion.attention.plan.device import power_of_two
from mla_fusion.attention.plan.device_code import LN2, LOG2E, within
from mla_fusion.kernels.triton import has_early_launch

if TYPE_CHECKING:
    import torch

    from mla_fusion.attention.plan.buffers import PlanBuffers


@triton.jit
def merge_step(lse, part, peak, total, acc):
    """Merge PIECES more pieces: their LSE [pieces, rows] in base 2, outputs [..., columns]."""
    new_peak = tl.maximum(peak, tl.max(lse, 0))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(lse - base[None, :])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(p, 0)
    acc = acc * decay[:, None] + tl.sum(part * p[:, :, None], 0)
    return new_peak, total, acc


@triton.jit
def reduce_kernel(
    partial_ptr, partial_lse_ptr, reduce_indptr_ptr, reduce_final_map_ptr, reduce_partial_map_ptr,
    qo_indptr_ptr, sink_ptr, out_ptr, lse_ptr, heads, out_stride_t, out_stride_h,
    SINK: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, LSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of tile `program 0`: ROWS query rows from ROWS * `program 1` on.

    out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i), over PIECES pieces at once
    and for COLUMNS latents (program 2; the last one may have fewer). The decode kernel writes tiles
    that were not split. PDL: the launch precedes the end of the decode kernel, which has waited for
    the plan; this kernel waits for the decode before it reads anything else.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PADDED: tl.constexpr = (L + COLUMNS - 1) // COLUMNS * COLUMNS
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(reduce_indptr_ptr + tile)
    last = tl.load(reduce_indptr_ptr + tile + 1)
    if first == last:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    count = tl.load(reduce_final_map_ptr + 2 * tile + 1) - tl.load(reduce_final_map_ptr + 2 * tile)
    head = tile % FOLD * HEADS + row % HEADS
    real = (row // HEADS < count) & (head < heads)
    token = tl.load(qo_indptr_ptr + tile // FOLD).to(tl.int64) + row // HEADS
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, PIECES):
        piece = start + tl.arange(0, PIECES)
        at = tl.load(reduce_partial_map_ptr + piece, mask=piece < last, other=0).to(tl.int64)
        at = at[:, None] * HEADS + row[None, :]
        if PDL:
            tl.extra.cuda.gdc_wait()
        wanted = (piece < last)[:, None] & real[None, :]
        lse = tl.load(partial_lse_ptr + at, mask=wanted, other=float("-inf")) * LOG2E
        values = partial_ptr + at[:, :, None] * L + column[None, None, :]
        of_piece = within(wanted[:, :, None], column[None, None, :], L, PADDED)
        part = tl.load(values, mask=of_piece, other=0.0)
        peak, total, acc = merge_step(lse, part, peak, total, acc)
    lse = tl.where(total > 0.0, (peak + tl.log2(total)) * LN2, float("-inf"))
    if SINK:
        total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0) * LOG2E - peak)
    acc *= tl.where(lse > float("-inf"), 1.0 / total, 0.0)[:, None]
    final = out_ptr + token * out_stride_t + head * out_stride_h
    of_row = within(real[:, None], column[None, :], L, PADDED)
    tl.store(final[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=of_row)
    if LSE:  # noqa: SIM102 (known when compiled; the other one is not)
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + token * heads + head, lse, mask=real)


kernel: Any = reduce_kernel


def reduction(tiles: int, rows: int) -> tuple[int, int, int]:
    """Rows, pieces and columns of a program that merges `tiles` tiles of `rows` query rows each.

    Few tiles have many pieces, which are loaded at once; many tiles have few, if any. Measured on
    an H200, where a program has 16 bytes of each of its rows and pieces in a thread.
    """
    if tiles * rows <= 64:
        return 1, 32, 128
    if tiles * rows <= 512:
        return 1, 16, 512
    return (1 if tiles * rows <= 2048 else 4), 4, 512


def arguments(
    plan: PlanBuffers,
    tiles: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sink: torch.Tensor | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of the reduction of the first `tiles` tiles."""
    latent, unused = plan.settings.v_head_dim, plan.partial_lse
    rows, pieces, columns = reduction(tiles, plan.heads_per_work)
    args = (
        plan.partial_output,
        plan.partial_lse,
        plan.reduce_indptr,
        plan.reduce_final_map,
        plan.reduce_partial_map,
        plan.qo_indptr,
        unused if sink is None else sink,
        out,
        unused if lse is None else lse,
        out.shape[1],
        out.stride(0),
        out.stride(1),
    )
    pdl = has_early_launch(out.device)
    options = {
        "SINK": sink is not None,
        "L": latent,
        "HEADS": plan.heads_per_work,
        "FOLD": plan.fold,
        "ROWS": rows,
        "PIECES": pieces,
        "COLUMNS": min(columns, power_of_two(latent)),
        "LSE": lse is not None,
        "PDL": pdl,
        "num_warps": 4,
    }
    if pdl:
        options["launch_pdl"] = True
    return args, options
