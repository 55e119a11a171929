"""`mla_reduce_v1`: the pieces of a split sequence become one row."""

import torch

from tests.aiter_double.faults import assume, check

# width of the values -> head counts with a kernel
SHAPES = {
    512: (8, 16, 24, 32, 48, 64, 80, 96, 112, 128),
    128: (1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128),
    64: (64,),
}


def merge(pieces):
    """Flash-style merge of (normalized output, natural-log sum) of the pieces of one tile."""
    outs = torch.stack([out.double() for out, _ in pieces])
    sums = torch.stack([total.double() for _, total in pieces])
    total = sums.logsumexp(0)
    return (outs * (sums - total).exp().unsqueeze(-1)).sum(0), total


def run(at, a):
    """Merge the pieces of every split tile into final_output [T, H, Dv].

    partial_output is [rows, 1, H, Dv], partial_lse [rows, 1, H, 1]. A row that sees no key in any
    piece comes out as NaN, with a sum of +inf.
    """
    out, sums = a["final_output"], a["final_lse"]
    heads, width = out.shape[1:]
    check(at, heads in SHAPES.get(width, ()), f"no reduction of {heads} heads of {width}")
    check(at, out.dtype in (torch.bfloat16, torch.float16), "the result is bf16 or fp16")
    assume(out.is_contiguous(), "final_output is packed")
    for name in ("partial_output", "partial_lse", "final_lse"):
        assume(a[name] is None or a[name].dtype == torch.float32, f"{name} is read as fp32")
    for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map"):
        dense = a[name] is None or (a[name].dtype == torch.int32 and a[name].is_contiguous())
        assume(dense, f"{name} is read as dense int32")
    partial = a["partial_output"].view(-1, heads, width), a["partial_lse"].view(-1, heads)
    starts, rows = a["reduce_indptr"].tolist(), a["max_seqlen_q"]
    for tile in range(len(starts) - 1):
        pieces = a["reduce_partial_map"][starts[tile] : starts[tile + 1]].tolist()
        if len(pieces) < 2:
            continue
        q0, q1 = tile * rows, (tile + 1) * rows  # without a map all tiles are alike
        if a["reduce_final_map"] is not None:
            q0, q1 = a["reduce_final_map"][tile].tolist()
        assume(max(pieces) + q1 - q0 <= len(partial[0]), "a piece outside the partial rows")
        assume(q1 <= len(out), "a tile outside the result")
        merged, total = merge([tuple(x[p : p + q1 - q0] for x in partial) for p in pieces])
        nothing = total.isneginf()
        out[q0:q1] = merged.masked_fill(nothing.unsqueeze(-1), torch.nan).to(out.dtype)
        if sums is not None:
            sums[q0:q1] = total.masked_fill(nothing, torch.inf).float()
