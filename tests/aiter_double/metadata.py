"""The six buffers of the persistent decode: their sizes, and a plan by AITER's published rules.

AITER also cuts long queries of many heads into tiles of rows, which no buffer of the double shows.
"""

import itertools

import torch

from tests.aiter_double import heads
from tests.aiter_double.faults import assume, check

BUFFERS = (
    "work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map",
    "reduce_partial_map",
)  # fmt: skip
WORK_COLUMNS = 8
OVERHEAD = 16  # granules that a work item costs beside its own, at pages of one token


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


def entries(found, kv_indptr, block_table, page_size):
    """As `entries_kernel.write_entries`, by torch: where each KV token is in the cache."""
    batch, columns = block_table.shape
    token = torch.arange(min(block_table.numel() * page_size, len(found)), dtype=torch.int32)
    sequence = torch.searchsorted(kv_indptr[1:], token, right=True).clamp_(max=batch - 1)
    at = (token - kv_indptr[sequence]).clamp_(max=columns * page_size - 1)
    slots = block_table[sequence, at // page_size] * page_size + at % page_size
    live = found[: len(token)]
    torch.where(token < kv_indptr[-1], slots, live, out=live)


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
    same = {name: a[name] for name in ("max_seqlen_qo", "max_split_per_batch")}
    count, (query, cache) = a["num_heads_per_head_k"] * a["num_heads_k"], types
    asked = {"batch_size": batch, "num_head_qo": count, "q_dtype": query, "kv_dtype": cache}
    asked |= {"is_sparse": False, **same}
    for name, (shape, dtype) in zip(BUFFERS, info(at, asked), strict=True):
        given = a[name]
        least = shape[0] if isinstance(shape, tuple) else shape
        assume(given.dtype == dtype, f"{name} is reinterpreted as {dtype}")
        assume(given.is_contiguous(), f"{name} must be dense")
        assume(given.shape[0] >= least, f"{name} is too small for the batch")
        exact = name in ("work_metadata_ptrs", "work_indptr")
        assume(not exact or given.shape[0] == least, f"the grid is read from the size of {name}")


def _write(units, a, qo, kv, fold):
    """The published rules of AITER's fast planner.

    A tile costs its granules and `OVERHEAD`. A unit may spend its share of all costs, and one
    overhead more. In order, each takes what is left of a tile if it can pay for that, else what it
    can pay for, if that is something; but not so much that fewer tokens than a query has rows stay.
    A cap shares the costs among fewer units: so many for each sequence, as the caller names them.
    """
    granule, cap = a["kv_granularity"], a["max_split_per_batch"]
    tiles = [(b, *kv[b // fold : b // fold + 2]) for b in range((len(qo) - 1) * fold)]
    costs = [-(-(end - start) // granule) + OVERHEAD for _, start, end in tiles]
    busy = min(units, cap * len(tiles)) if cap >= 0 else units
    budget = -(-sum(costs) // busy) + OVERHEAD
    works, final, partial = [], [[0, 0] for _ in tiles], []
    indptr, cuts, left = [0], [0], budget
    for b, start, end in tiles:
        rows, pieces, at = qo[b // fold : b // fold + 2], [], start
        while not pieces or at < end:
            rest = -(-(end - at) // granule)
            whole = left >= rest + OVERHEAD
            stop = end if whole else at + max(left - OVERHEAD, 0) * granule
            if stop > at and end - stop < a["max_seqlen_qo"]:
                stop = end
            if whole or stop > at:
                pieces.append([at, stop])
                at, left = stop, left - rest - OVERHEAD
            if at < end or left < 0 or not pieces:
                left = budget
                indptr.append(len(works) + len(pieces))
        for first, until in pieces:
            row = len(partial) * a["max_seqlen_qo"] if len(pieces) > 1 else -1
            partial += [row] * (len(pieces) > 1)
            works.append([b, row, *rows, first, until, end - until, 0])
        final[b] = rows
        cuts.append(len(partial))
    a["work_indptr"].fill_(len(works))
    a["reduce_indptr"].fill_(cuts[-1])
    filled = {"work_indptr": indptr, "work_info_set": works, "reduce_indptr": cuts}
    filled |= {"reduce_final_map": final, "reduce_partial_map": partial}
    for name, rows in filled.items():
        a[name][: len(rows)] = torch.tensor(rows, dtype=torch.int32)
