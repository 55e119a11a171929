"""Why a kernel for Hopper does not take a decode, or an empty string; without importing Gluon."""

import torch

from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.arithmetic import next_power_of_two

TILE = 64  # tokens that are copied and multiplied at once
# Latent and rotated part. Tiles in shared memory are powers of two wide, two of them have to fit
# beside 64 query rows, and each pair was compiled and checked.
WIDTHS = ((512, 64), (256, 64), (256, 32))
WARP_SPECIALIZED_WIDTHS = (512, 64)
WARP_SPECIALIZED_TYPES = ({torch.bfloat16}, {torch.float8_e4m3fn})
WARP_SPECIALIZED_ROWS = 64  # of a CTA
FEW_ROWS = 32  # query rows that a CTA of another kernel decodes faster
SPARSE_FP8_ROWS = 16  # of a CTA, two of which share an SM
PRODUCT_COLUMNS, PRODUCT_ROWS = 128, 64  # of a CTA of `product.py`
# Tokens times blocks of columns, rows and heads. On an H200 a decode and `torch.bmm` took 1.00 to
# 1.20 of the time of a decode and this product up to here, 0.95 to 1.02 at twice as much, where a
# quantization would be one more launch.
PRODUCT_SIZE = 4096


def decode(given: Inputs) -> str:
    """Why `decode.py` does not take these inputs: its copies move 16 aligned bytes."""
    q, caches = given.q, [given.kv_cache]
    if given.sparse is not None:
        caches.append(given.sparse.extra.kv_cache)
    if given.widths not in WIDTHS:
        return f"it takes entries of {WIDTHS} values, got {given.widths}"
    if types := [cache.dtype for cache in caches if cache.dtype != q.dtype]:
        return f"it takes query and cache of one type, got {q.dtype} over {types[0]}"
    strides = [stride * q.itemsize for tensor in (q, *caches) for stride in tensor.stride()[:2]]
    if any(n % 16 for n in strides) or any(tensor.data_ptr() % 16 for tensor in (q, *caches)):
        return f"it copies 16 aligned bytes at once, got rows {strides} bytes apart"
    return ""


def warp_specialized(given: Inputs) -> str:
    """Why `warp_specialized.py` does not: the tensor copy engine copies all, 64 rows at a time."""
    q, kv_cache, per_work = given.q, given.kv_cache, given.plan.layout.per_work
    if given.sparse is not None or given.rows <= FEW_ROWS:
        return f"it takes blocks of more than {FEW_ROWS} query rows, no lists of slots"
    types = {q.dtype, kv_cache.dtype}
    if types not in WARP_SPECIALIZED_TYPES or given.widths != WARP_SPECIALIZED_WIDTHS:
        return (
            "it takes bf16 or e4m3, query and cache of one type, of 512 + 64, got "
            "{} over {} of {} + {}".format(q.dtype, kv_cache.dtype, *given.widths)
        )
    if why := decode(given) or _of_scale(given):
        return why
    page_size, (block_stride, entry, _) = kv_cache.shape[1], kv_cache.stride()
    if page_size % TILE or block_stride % entry:
        return (
            f"it copies {TILE} tokens of a page at once, from blocks that are whole entries apart, "
            f"got pages of {page_size} tokens, {block_stride} and {entry} elements from one block "
            "and entry to the next"
        )
    # A box holds whole tokens of an item, or heads of one token.
    rows, queries = WARP_SPECIALIZED_ROWS, given.plan.settings.max_query_len
    if not q.shape[0] or not (queries == 1 or rows % per_work == 0 or per_work % rows == 0):
        return (
            f"it copies {rows} rows of the query at once, got {q.shape[0]} tokens, {per_work} "
            f"heads of an item and {queries} query rows"
        )
    return ""


def sparse_fp8(given: Inputs) -> str:
    """Why `sparse_fp8.py` does not take these inputs."""
    if given.layout is None or given.layout.behind:
        return "it reads entries of bytes with their scales in them"
    if given.sparse is None or given.sparse.first:
        return "it reads one scope"
    if given.rows > SPARSE_FP8_ROWS:
        return f"it takes up to {SPARSE_FP8_ROWS} query rows, got {given.rows}"
    return ""


def sparse_specialized(given: Inputs) -> str:
    """Why `sparse_specialized.py` does not: the tensor copy engine copies the query."""
    q, sparse = given.q, given.sparse
    if given.layout is None or sparse is None:
        return "it reads lists of entries of bytes"
    entries = [given.entry(cache) for cache in (given.kv_cache, sparse.extra.kv_cache)]
    if entries[0] != entries[1]:
        return f"it reads entries of both scopes that are as far apart, got {entries} bytes"
    if not q.shape[0] or any(n * q.itemsize % 16 for n in q.stride()[:2]) or q.data_ptr() % 16:
        return f"it copies rows of the query that are multiples of 16 bytes apart, got {q.stride()}"
    return _of_scale(given)


def _of_scale(given: Inputs) -> str:
    """Where it is positive, the largest product of a row has its largest score."""
    scale = given.softmax_scale
    return "" if scale > 0 else f"it takes a positive scale of the scores, got {scale}"


def product_rows(tokens: int) -> int:
    """Tokens of a CTA of `product.py`."""
    return min(PRODUCT_ROWS, max(8, next_power_of_two(tokens)))


def product_size(tokens: int, heads: int, values: int) -> int:
    """Rows of all CTAs of `product.py`."""
    return tokens * -(-tokens // PRODUCT_ROWS) * heads * (values // PRODUCT_COLUMNS)


def product(given: Inputs) -> str:
    """Why `product.py` does not take these inputs, or where `torch.bmm` was as fast."""
    assert given.epilogue is not None
    w, latents, out = given.epilogue.w_uv, given.out, given.epilogue.out
    tokens, (heads, latent, values) = len(latents), w.shape
    if latent not in (256, 512) or values % PRODUCT_COLUMNS:
        return f"it takes 256 or 512 latents and multiples of {PRODUCT_COLUMNS} columns"
    most = PRODUCT_SIZE if given.epilogue.scale is None else 2 * PRODUCT_SIZE
    if (size := product_size(tokens, heads, values)) > most:
        return f"it takes up to {most} rows of its CTAs, got {size}"
    head, row, column = w.stride()
    step = max(row, column)
    if (row == 1 and head % column) or any(n % 8 for n in (head, step)):
        return f"it takes heads of W_UV that are whole rows of 16 bytes apart, got {w.stride()}"
    strides = [*latents.stride()[:2], out.stride(0)]
    if any(n % 8 for n in strides) or any(t.data_ptr() % 16 for t in (w, latents, out)):
        return f"it copies 16 aligned bytes at once, got rows {strides} elements apart"
    return ""
