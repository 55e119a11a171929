"""`mla_decode_fwd` and the Gluon decode for few heads, in float64 on a CPU."""

import itertools

import torch

from tests.aiter_double import heads, metadata
from tests.aiter_double.faults import assume, check

ENTRY, LATENT = 576, 512
PLAN = ("work_meta_data", *metadata.BUFFERS[1:])  # two names of one buffer


def run(at, a):
    """Write the attention of q [T, H, 576] over the paged latents into o [T, H, 512]."""
    q, kv, o = a["q"], a["kv_buffer"], a["o"]
    shape = _validate(at, a)
    qo, ends = a["qo_indptr"].tolist(), a["kv_indptr"].tolist()
    batch = len(qo) - 1
    planned = a["work_meta_data"] is not None
    if planned and shape.skips_plan(batch):
        planned = a["num_kv_splits"] is not None
    if not a.get("causal", True):
        raise NotImplementedError("nobody calls it so")
    if planned:
        shape.check_persistent(a["return_lse"])
    else:
        shape.check_plain(a["num_kv_splits"])
    keys = kv.reshape(-1, ENTRY)
    scale = a["sm_scale"] if a["sm_scale"] is not None else ENTRY**-0.5
    wide_q = q.double() * (a["q_scale"].double() if shape.kind == "fp8" else 1)
    key_scale = a["kv_scale"].double() if shape.kind != "bf16" else 1

    def piece(first_q, last_q, first, until, after):
        slots = a["kv_indices"][first:until].long()
        assume(bool((slots >= 0).all()) and bool((slots < keys.shape[0]).all()),
               "an index outside the cache reads other memory")  # fmt: skip
        return _attend(wide_q[first_q:last_q], keys[slots].double() * key_scale, after, scale)

    lse = torch.zeros(q.shape[:2], dtype=torch.float32)
    if not planned:
        for b in range(batch):
            out, sums = piece(qo[b], qo[b + 1], ends[b], ends[b + 1], 0)
            o[qo[b] : qo[b + 1]] = out.to(o.dtype)
            lse[qo[b] : qo[b + 1]] = sums.float()
    else:
        _follow_plan(shape, a, piece, lse)
    # A row that sees no key.
    nothing = lse.isneginf()
    o.masked_fill_(nothing.unsqueeze(-1), torch.nan)
    lse.masked_fill_(nothing, torch.inf)
    return None, lse if a["return_lse"] else None


def _attend(q, keys, after, scale):
    """(normalized output, natural-log sum) of one piece; `after` keys of the sequence follow it."""
    scores = torch.einsum("qhd,kd->qhk", q, keys) * scale
    # Query i of n sees all but the last n - 1 - i keys of the sequence.
    behind = torch.arange(keys.shape[0] - 1, -1, -1) + after
    hidden = behind < torch.arange(q.shape[0] - 1, -1, -1).unsqueeze(1)
    scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    sums = scores.logsumexp(-1)
    weights = (scores - sums.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :LATENT]), sums


def _validate(at, a):
    q, kv, o = a["q"], a["kv_buffer"], a["o"]
    check(at, q.dtype in (torch.bfloat16, at.arch.fp8), f"unsupported query type {q.dtype}")
    check(at, kv.dim() == 4 and a["nhead_kv"] == 1, "kv_buffer is [pages, page, 1, 576]")
    check(at, kv.dtype in (torch.bfloat16, at.arch.fp8), f"unsupported cache type {kv.dtype}")
    check(at, q.shape[-1] == kv.shape[-1] == ENTRY, "heads and entries are 576 wide")
    check(at, a["logit_cap"] <= 0, "logit_cap is not supported")
    kind = heads.kinds(q.dtype, kv.dtype)
    check(at, q.dtype == torch.bfloat16 or kind == "fp8", "an fp8 query needs an fp8 cache")
    shape = heads.Shape(at, q.shape[1], a["max_seqlen_q"], kind)
    shape.check_supported()
    check(at, kind != "mixed" or q.shape[1] == 16, "bf16 query, fp8 cache: 16 heads only")
    assume(q.is_contiguous(), "the query is read as packed [T, H, 576]")
    assume(o.is_contiguous() and o.shape == (*q.shape[:2], LATENT), "o is packed [T, H, 512]")
    assume(o.dtype == torch.bfloat16, "the kernel writes bf16")
    assume(kv.is_contiguous(), "pages are read as dense")
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"):
        dense = a[name].dtype == torch.int32 and a[name].is_contiguous()
        check(at, dense, f"{name} is a dense int32 tensor")
    for name in ("q_scale", "kv_scale") if q.dtype == at.arch.fp8 else ():
        check(at, isinstance(a[name], torch.Tensor), f"an fp8 query needs {name}")
        assume(a[name].dtype == torch.float32, f"{name} is reinterpreted as fp32")
    qo, ends = a["qo_indptr"].tolist(), a["kv_indptr"].tolist()
    assume(len(qo) == len(ends), "qo_indptr and kv_indptr describe one batch")
    assume(qo[-1] <= q.shape[0], "queries behind the last row are read")
    assume(ends[-1] <= a["kv_indices"].numel(), "indices behind the last one are read")
    longest = max(after - at for at, after in itertools.pairwise(qo))
    assume(longest <= a["max_seqlen_q"], "a query is longer than max_seqlen_q")
    # The query is permuted as one of equal queries.
    even = {after - at for at, after in itertools.pairwise(qo)} == {a["max_seqlen_q"]}
    even = even and len(q) == qo[-1]
    assume(even or shape.folded == shape.heads or a["max_seqlen_q"] == 1,
           "drafts of folded heads are even")  # fmt: skip
    given = [name for name in PLAN if a[name] is not None]
    assume(len(given) in (0, len(PLAN)), f"all six buffers or none, not {given}")
    return shape


def _follow_plan(shape, a, piece, lse):
    """Run every work item, then merge the split tiles."""
    moved = [a["work_indptr"].data_ptr(), a["work_info_set"].data_ptr()]
    written = a["work_meta_data"].view(torch.int64).tolist()
    assume(written == moved, "the planner wrote other addresses: a buffer moved")
    o, run_heads = a["o"], shape.folded
    fold = shape.heads // run_heads
    works = a["work_info_set"][: int(a["work_indptr"][-1])].tolist()
    _check_plan(a, works, fold)
    partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    tiles: dict[int, slice] = {}
    for batch, row, q0, q1, first, until, after, _ in works:
        part = slice((batch % fold) * run_heads, (batch % fold + 1) * run_heads)
        out, weight = (x[:, part] for x in piece(q0, q1, first, until, after))
        if row < 0:
            o[q0:q1, part] = out.to(o.dtype)
            lse[q0:q1, part] = weight.float()
        else:
            partial[row] = out, weight
            tiles[batch] = part
    starts = a["reduce_indptr"].tolist()
    for batch, part in tiles.items():
        q0, q1 = a["reduce_final_map"][batch].tolist()
        rows = a["reduce_partial_map"][starts[batch] : starts[batch + 1]].tolist()
        out, total = merge([partial[row] for row in rows])
        o[q0:q1, part] = out.to(o.dtype)
        lse[q0:q1, part] = total.float()


def merge(pieces):
    """Flash-style merge of (normalized output, natural-log sum) of the pieces of one tile."""
    outs = torch.stack([out.double() for out, _ in pieces])
    sums = torch.stack([total.double() for _, total in pieces])
    total = sums.logsumexp(0)
    return (outs * (sums - total).exp().unsqueeze(-1)).sum(0), total


def _check_plan(a, works, fold):
    """A plan of another batch makes the kernel read and write elsewhere."""
    qo, kv = a["qo_indptr"].tolist(), a["kv_indptr"].tolist()
    seen: dict[int, list[tuple[int, int]]] = {}
    for batch, _, q0, q1, first, until, _, _ in works:
        real = batch // fold
        assume(real < len(qo) - 1 and [q0, q1] == qo[real : real + 2], "stale plan: other queries")
        seen.setdefault(batch, []).append((first, until))
    for batch in range((len(qo) - 1) * fold):
        at, end = kv[batch // fold], kv[batch // fold + 1]
        for first, until in sorted(seen.get(batch, [])):
            assume(first == at, "stale plan: it begins elsewhere")
            at = until
        assume(at == end, "stale plan: it ends elsewhere")


def gluon(at, a):
    """`mla_gluon` for fewer than 16 heads: [B, H, *] for one token, [B, n, H, *] for a draft."""
    q_nope, q_pe, o = a["q_nope"], a["q_pe"], a["o"]
    assert at.arch.name == "gfx950", "mla_gluon requires gfx950"
    check(at, q_nope.dtype == torch.bfloat16 == a["kv_c"].dtype, "bf16 query and cache")
    q = torch.cat((q_nope, q_pe), dim=-1).double()
    if q.dim() == 3:
        q, o = q.unsqueeze(1), o.unsqueeze(1)
    ends = a["seq_info"].tolist()
    for b in range(q.shape[0]):
        slots = a["page_table"][ends[b] : ends[b + 1]].long()
        assume(bool((slots >= 0).all()), "an index outside the cache reads other memory")
        keys = a["kv_c"][slots].double() * a["kv_scale"]
        o[b] = _attend(q[b], keys, 0, a["sm_scale"])[0].to(o.dtype)
