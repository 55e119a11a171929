"""The six buffers of the persistent decode: their sizes, and a plan of contiguous cuts.

The plan is not AITER's: every sequence is cut into up to four equal pieces of whole granules. It
obeys the same meaning of the buffers and the same bounds, which is all that a caller may rely on.
"""

import itertools

import torch

from tests.aiter_double import heads
from tests.aiter_double.faults import assume, check

BUFFERS = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)
WORK_COLUMNS = 8
MAX_PIECES = 4


def info(at, a):
    """(shape, dtype) of the six buffers, in the order of `BUFFERS`."""
    many = at.heads_multiple
    assert a["num_head_qo"] % many == 0, f"num_head_qo must be a multiple of {many}"
    units, batch, qlen = at.arch.compute_units, a["batch_size"], a["max_seqlen_qo"]
    kind = heads.kinds(a["q_dtype"], a["kv_dtype"])
    run = heads.Shape(at, a["num_head_qo"], qlen, kind).folded
    batch *= (a["num_head_qo"] // run) * (qlen if a["is_sparse"] else 1)
    tiles = 1 if run * qlen <= 128 else -(-run * qlen // 16)
    rows = (batch + units - 1) * tiles
    partial = min(batch + units - 1, 2 * (units - 1)) * tiles
    if (cap := a.get("max_split_per_batch", -1)) > 0:
        partial = max(partial, batch * tiles + min(units, cap * batch))
    return [
        (2, torch.uint64),
        (units + 1, torch.int32),
        ((rows, WORK_COLUMNS), torch.int32),
        (batch * tiles + 1, torch.int32),
        ((batch * tiles, 2), torch.int32),
        (partial, torch.int32),
    ]


def plan(at, a):
    """Write the plan of a batch into the six buffers."""
    qo, kv = _indptr(at, a, "seqlens_qo_indptr"), _indptr(at, a, "seqlens_kv_indptr")
    last = a["kv_last_page_lens"]
    check(at, last.dtype == torch.int32 and last.is_contiguous(), "page lengths are int32")
    for name in ("kv_granularity", "page_size"):
        size = a[name]
        check(at, size > 0 and size & (size - 1) == 0, f"{name} is a power of two")
    batch = len(qo) - 1
    assume(len(kv) == batch + 1, "the two indptr tensors describe the same batch")
    assume(last.shape[0] >= batch, "a page length for each sequence")
    assume(a["page_size"] != 1 or bool((last[:batch] == 1).all()), "pages of one token hold one")
    lengths = {after - at for at, after in itertools.pairwise(qo)}
    assume(max(lengths) <= a["max_seqlen_qo"], "a query is longer than max_seqlen_qo")
    uniform = a["uni_seqlen_qo"]
    assume(uniform < 0 or lengths == {uniform}, "uni_seqlen_qo says that all queries are so long")
    types = _types(at, a)
    count = a["num_heads_per_head_k"] * a["num_heads_k"]
    shape = heads.Shape(at, count, a["max_seqlen_qo"], heads.kinds(*types))
    shape.check_planned()
    _check_sizes(at, a, batch, types)
    _write(at.arch.compute_units, a, qo, kv, count // shape.folded)
    pointers = [a["work_indptr"].data_ptr(), a["work_info_set"].data_ptr()]
    a["work_metadata_ptrs"].copy_(torch.tensor(pointers).view(torch.uint64))


def _indptr(at, a, name):
    tensor = a[name]
    ok = tensor.dtype == torch.int32 and tensor.is_contiguous()
    check(at, ok, f"{name} is a dense int32 tensor")
    values = tensor.tolist()
    assume(values[0] == 0 and values == sorted(values), f"{name} starts at 0 and never falls")
    return values


def _types(at, a):
    """Of the query and the cache."""
    query, cache = (
        a.get(f"dtype_{of}") or a.get(f"dtype_{of}_nope") or torch.bfloat16 for of in ("q", "kv")
    )
    check(at, query in (torch.bfloat16, at.arch.fp8), f"unsupported query type {query}")
    return query, cache


def _check_sizes(at, a, batch, types):
    """The grid is read from the sizes: work_indptr is exact, the others hold the batch."""
    capped = a["max_split_per_batch"] > 0
    assume(at.has("split_budget") or not capped, "buffers cannot be sized for max_split_per_batch")
    asked = {
        "batch_size": batch,
        "max_seqlen_qo": a["max_seqlen_qo"],
        "num_head_qo": a["num_heads_per_head_k"] * a["num_heads_k"],
        "q_dtype": types[0],
        "kv_dtype": types[1],
        "is_sparse": False,
        "max_split_per_batch": a["max_split_per_batch"],
    }
    for name, (shape, dtype) in zip(BUFFERS, info(at, asked), strict=True):
        given = a[name]
        least = shape[0] if isinstance(shape, tuple) else shape
        assume(given.dtype == dtype, f"{name} is reinterpreted as {dtype}")
        assume(given.is_contiguous(), f"{name} must be dense")
        assume(given.shape[0] >= least, f"{name} is too small for the batch")
        exact = name in ("work_metadata_ptrs", "work_indptr")
        assume(not exact or given.shape[0] == least, f"the grid is read from the size of {name}")


def _write(units, a, qo, kv, fold):
    granule, batch = a["kv_granularity"], (len(qo) - 1) * fold
    budget = max(1, min(MAX_PIECES, (units - 1) // max(batch, 1)))
    works, final, partial, cuts = [], [], [], [0]
    for b in range(batch):
        real = b // fold
        start, end, q0, q1 = kv[real], kv[real + 1], qo[real], qo[real + 1]
        size = max(-(-(end - start) // budget // granule) * granule, granule)
        # A piece shorter than the queries would leave one of them without a key.
        pieces = [(s, min(s + size, end)) for s in range(start, max(end, start + 1), size)]
        if len(pieces) > 1 and pieces[-1][1] - pieces[-1][0] < q1 - q0:
            tail = pieces.pop()
            pieces[-1] = (pieces[-1][0], tail[1])
        for first, until in pieces:
            row = -1
            if len(pieces) > 1:
                row = len(partial) * a["max_seqlen_qo"]
                partial.append(row)
            works.append([b, row, q0, q1, first, until, end - until, 0])
        final.append([q0, q1])
        cuts.append(len(partial))
    share = -(-len(works) // units)
    starts = [min(c * share, len(works)) for c in range(units + 1)]
    a["work_indptr"].copy_(torch.tensor(starts))
    a["reduce_indptr"].fill_(cuts[-1])
    filled = {"work_info_set": works, "reduce_indptr": cuts}
    filled |= {"reduce_final_map": final, "reduce_partial_map": partial}
    for name, rows in filled.items():
        a[name][: len(rows)] = torch.tensor(rows, dtype=torch.int32)
