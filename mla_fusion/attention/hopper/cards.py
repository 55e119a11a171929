"""The cards of the kernels for Hopper, and why each does not take a decode."""

import torch

from mla_fusion import gpu
from mla_fusion.attention.card import BLOCKS, FEW, NEWEST_TRITON, Card, Decodes, Shape, refused
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.report.reasons import Decline

TILE = 64  # tokens that are multiplied at once
SMALLEST_BOX = 16  # tokens of a copy for `few_rows.py`
# Latent and rotated part. Tiles in shared memory are powers of two wide, two of them have to fit
# beside 64 query rows, and each pair was compiled and checked.
WIDTHS = ((512, 64), (256, 64), (256, 32))
WARP_SPECIALIZED_WIDTHS, WIDE = (512, 64), 576  # and their sum
WARP_SPECIALIZED_TYPES = ({torch.bfloat16}, {torch.float8_e4m3fn})
WARP_SPECIALIZED_ROWS = 64  # of a CTA
FEW_ROWS = 32  # query rows that a CTA of another kernel decodes faster
OF_FEW = {1: range(1, FEW_ROWS + 1), 2: range(17, FEW_ROWS + 1)}  # of `few_rows.py`, by bytes
SPARSE_FP8_ROWS = 16  # of a CTA, two of which share an SM
PAIRED_HEADS = 128  # of one query row: two row blocks of one item
# Less than in `BLOCKS` for 17 to 32 rows in fp8, and for fp8_ds_mla, whose blocks take longer.
WIDE_OVERHEAD, DS_MLA_OVERHEAD = 3, 2
PRODUCT_COLUMNS, PRODUCT_ROWS, PRODUCT_CTAS = 128, 64, 132  # of a CTA of `product.py`; at once
# A product that merges splits needs so many tiles, since fewer have more splits each, and so many
# tokens times blocks of columns, so that most SMs read splits: with 16 heads in fp8 on an H200 it
# took 1.03 of the time at 32 x 1024 and 1.21 at ragged 17 x 8192, 0.96 at 64 x 1024. A CTA has at
# most so many rows, since its registers hold as many rows of splits.
MERGED_TILES, MERGED_SIZE, MERGED_ROWS = 32, 1024, 32
# Tokens times blocks of columns, rows and heads. On an H200 a decode and `torch.bmm` took 1.00 to
# 1.20 of the time of a decode and this product up to here, 0.95 to 1.02 at twice as much, where a
# quantization would be one more launch. A product that merges has no such limit: at 256 x 1024 in
# fp8 with 16 heads it and its decode took 47.9 us, and 52.5 in two launches behind the decode.
PRODUCT_SIZE = 4096


def decode(given: Inputs) -> Decline | None:
    """Why `decode.py` does not take these inputs: its copies move 16 aligned bytes."""
    q, caches = given.q, [given.kv_cache]
    if given.sparse is not None:
        caches.append(given.sparse.extra.kv_cache)
    if given.widths not in WIDTHS:
        return refused(f"it takes entries of {WIDTHS} values, got {given.widths}")
    if types := [cache.dtype for cache in caches if cache.dtype != q.dtype]:
        return refused(f"it takes query and cache of one type, got {q.dtype} over {types[0]}")
    strides = [stride * q.itemsize for tensor in (q, *caches) for stride in tensor.stride()[:2]]
    if any(n % 16 for n in strides) or any(tensor.data_ptr() % 16 for tensor in (q, *caches)):
        return refused(f"it copies 16 aligned bytes at once, got rows {strides} bytes apart")
    return None


def few_rows(given: Inputs) -> Decline | None:
    """Why `few_rows.py` does not: the tensor copy engine copies boxes of one page."""
    taken = OF_FEW[given.kv_cache.itemsize]
    if given.sparse is not None or given.rows not in taken:
        of = f"blocks of {taken.start} to {FEW_ROWS} query rows over {given.kv_cache.dtype}"
        return refused(f"it takes {of}, no lists of slots")
    page_size, (block_stride, entry, _) = given.kv_cache.shape[1], given.kv_cache.stride()
    if page_size % SMALLEST_BOX or block_stride % entry:
        return refused(f"it copies {SMALLEST_BOX} tokens of a page or more, got {page_size}")
    return decode(given)


def warp_specialized(given: Inputs) -> Decline | None:
    """Why `warp_specialized.py` does not: the tensor copy engine copies all, 64 rows at a time."""
    q, kv_cache, per_work = given.q, given.kv_cache, given.plan.layout.per_work
    if given.sparse is not None or given.rows <= FEW_ROWS:
        return refused(f"it takes blocks of more than {FEW_ROWS} query rows, no lists of slots")
    types = {q.dtype, kv_cache.dtype}
    if types not in WARP_SPECIALIZED_TYPES or given.widths != WARP_SPECIALIZED_WIDTHS:
        return refused(
            "it takes bf16 or e4m3, query and cache of one type, of 512 + 64, got "
            "{} over {} of {} + {}".format(q.dtype, kv_cache.dtype, *given.widths)
        )
    if why := decode(given) or _of_scale(given):
        return why
    page_size, (block_stride, entry, _) = kv_cache.shape[1], kv_cache.stride()
    if page_size % TILE or block_stride % entry:
        return refused(
            f"it copies {TILE} tokens of a page at once, from blocks that are whole entries apart, "
            f"got pages of {page_size} tokens, {block_stride} and {entry} elements from one block "
            "and entry to the next"
        )
    # A box holds whole tokens of an item, or heads of one token.
    rows, queries = WARP_SPECIALIZED_ROWS, given.plan.settings.max_query_len
    if not q.shape[0] or not (queries == 1 or rows % per_work == 0 or per_work % rows == 0):
        return refused(
            f"it copies {rows} rows of the query at once, got {q.shape[0]} tokens, {per_work} "
            f"heads of an item and {queries} query rows"
        )
    return None


def sparse_fp8(given: Inputs) -> Decline | None:
    """Why `sparse_fp8.py` does not take these inputs."""
    if given.layout is None or given.layout.behind:
        return refused("it reads entries of bytes with their scales in them")
    if given.sparse is None or given.sparse.first:
        return refused("it reads one scope")
    if given.rows > SPARSE_FP8_ROWS:
        return refused(f"it takes up to {SPARSE_FP8_ROWS} query rows, got {given.rows}")
    return None


def sparse_specialized(given: Inputs) -> Decline | None:
    """Why `sparse_specialized.py` does not: the tensor copy engine copies the query."""
    q, sparse = given.q, given.sparse
    if given.layout is None or sparse is None:
        return refused("it reads lists of entries of bytes")
    entries = [given.entry(cache) for cache in (given.kv_cache, sparse.extra.kv_cache)]
    if entries[0] != entries[1]:
        why = f"it reads entries of both scopes that are as far apart, got {entries} bytes"
        return refused(why)
    if not q.shape[0] or any(n * q.itemsize % 16 for n in q.stride()[:2]) or q.data_ptr() % 16:
        why = f"it copies rows of the query that are multiples of 16 bytes apart, got {q.stride()}"
        return refused(why)
    return _of_scale(given)


def _of_scale(given: Inputs) -> Decline | None:
    """The scale must be positive: then the largest product of a row has its largest score."""
    scale = given.softmax_scale
    why = f"it takes a positive scale of the scores, got {scale}"
    return None if scale > 0 else refused(why)


def product_rows(tokens: int, heads: int, values: int, batch_invariant: bool = False) -> int:
    """Tokens of a CTA of `product.py`: up to 32, if so all CTAs run at once; the same for every
    step of a batch-invariant plan."""
    if batch_invariant:
        return PRODUCT_ROWS
    ctas = heads * (values // PRODUCT_COLUMNS) * -(-tokens // 32)
    most = 32 if ctas <= PRODUCT_CTAS else PRODUCT_ROWS
    return min(most, max(8, next_power_of_two(tokens)))


def merged_rows(tiles: int, tokens: int, heads: int, values: int) -> int:
    """Tokens of a CTA of `product.py` that merges splits: the fewest with which all CTAs run at
    once; 0 where it does not."""
    rows, blocks = 8, heads * (values // PRODUCT_COLUMNS)
    while rows < MERGED_ROWS and blocks * -(-tokens // rows) > PRODUCT_CTAS:
        rows *= 2
    is_large = tiles >= MERGED_TILES and tokens * blocks >= MERGED_SIZE
    return rows if is_large and blocks * -(-tokens // rows) <= PRODUCT_CTAS else 0


def merges(given: Inputs) -> bool:
    """Whether `product.py` merges the splits of a dense decode too, in place of the reduction."""
    plan, step, epilogue = given.plan, given.plan.step, given.epilogue
    if epilogue is None or step is None or plan.settings.batch_invariant or given.sparse:
        return False
    heads, _, values = epilogue.w_uv.shape
    return merged_rows(step.batch * plan.layout.fold, len(given.out), heads, values) > 0


def product_size(tokens: int, heads: int, values: int) -> int:
    """Rows of all CTAs of `product.py`."""
    return tokens * -(-tokens // PRODUCT_ROWS) * heads * (values // PRODUCT_COLUMNS)


def _variant(tiles: int, tokens: int, heads: int, values: int) -> tuple[int, int, bool, bool]:
    of = tokens, heads, values
    size, merged = product_size(*of), merged_rows(tiles, *of)
    return product_rows(*of), merged, size > PRODUCT_SIZE, size > 2 * PRODUCT_SIZE


def product(given: Inputs) -> Decline | None:
    """Why `product.py` does not take these inputs, or where `torch.bmm` was as fast."""
    assert given.epilogue is not None
    w, latents, out = given.epilogue.w_uv, given.out, given.epilogue.out
    tokens, (heads, latent, values) = len(latents), w.shape
    if latent not in (256, 512) or values % PRODUCT_COLUMNS:
        return refused(f"it takes 256 or 512 latents and multiples of {PRODUCT_COLUMNS} columns")
    most = PRODUCT_SIZE if given.epilogue.scale is None else 2 * PRODUCT_SIZE
    size = product_size(tokens, heads, values)
    if size > most and not given.plan.settings.batch_invariant and not merges(given):
        return refused(f"it takes up to {most} rows of its CTAs, got {size}")
    head, row, column = w.stride()
    step = max(row, column)
    if (row == 1 and head % column) or any(n % 8 for n in (head, step)):
        why = f"it takes heads of W_UV that are whole rows of 16 bytes apart, got {w.stride()}"
        return refused(why)
    strides = [*latents.stride()[:2], out.stride(0)]
    if any(n % 8 for n in strides) or any(t.data_ptr() % 16 for t in (w, latents, out)):
        return refused(f"it copies 16 aligned bytes at once, got rows {strides} elements apart")
    return None


def _blocks_at_once(here: gpu.Gpu, of: Decodes, rows: int, pairs: bool) -> dict[str, int]:
    """The blocks of 64 rows of an item run at the same time and read tiles of the cache together,
    so the plan has fewer CTAs. pairs: 128 heads of one query row have both blocks in an item."""
    plan = {**BLOCKS}
    if pairs and (of.heads, of.max_query_len) == (PAIRED_HEADS, 1):
        rows = plan["heads_per_work"] = PAIRED_HEADS
    return {"ctas": max(1, here.sms // -(-rows // WARP_SPECIALIZED_ROWS)), **plan}


def _of_decode(here: gpu.Gpu, of: Decodes) -> dict[str, int]:
    """One CTA an SM; two for up to 16 rows of 16 bits, if its shared memory holds tiles of both."""
    ctas, overhead = here.sms, BLOCKS["overhead"]
    if of.kv_dtype.itemsize == 1:
        overhead = WIDE_OVERHEAD if of.width == WIDE and 16 < of.rows <= FEW_ROWS else overhead
    elif of.rows <= 16 and 4 * (2 * TILE + 16) * of.width <= here.shared_memory:
        ctas *= 2
    return {**BLOCKS, "ctas": ctas, "overhead": overhead}


def _of_sparse_specialized(here: gpu.Gpu, of: Decodes) -> dict[str, int]:
    plan = _blocks_at_once(here, of, min(of.heads, WARP_SPECIALIZED_ROWS), pairs=True)
    return plan if of.layout and of.layout.behind else plan | {"overhead": DS_MLA_OVERHEAD}


PRODUCTS = (Card("hopper.product", gpu.HOPPER, product, variant=_variant, merges=merges),)
CARDS = (
    Card(
        "hopper.sparse_fp8", gpu.HOPPER, sparse_fp8,
        lambda of: (of.layout, of.scopes) == (FP8_DS_MLA, 1) and of.heads <= SPARSE_FP8_ROWS,
        # Two CTAs of up to 16 heads over one scope of entries with scales in them share an SM.
        lambda here, _: {"ctas": 2 * here.sms, **BLOCKS, "overhead": DS_MLA_OVERHEAD}, rounds=False,
    ),
    Card("hopper.sparse_specialized", gpu.HOPPER, sparse_specialized,
         lambda of: of.layout is not None, _of_sparse_specialized),
    Card(
        "hopper.warp_specialized", gpu.HOPPER, warp_specialized,
        lambda of: not of.scopes and of.rows > FEW_ROWS and of.width == WIDE,
        lambda here, of: _blocks_at_once(here, of, of.rows, of.kv_dtype == torch.bfloat16),
        (Shape(64, 1, 64), Shape(128, 1, 64, huge=True), Shape(16, 4, 128, gap=64),
         Shape(16, 8, 64), Shape(40, 1, 128)),
        (Shape(8, 8, 64), Shape(32, 8, 64), Shape(128, 2, 64)),
        page=TILE, newest_triton=NEWEST_TRITON,
    ),
    Card(
        "hopper.few_rows", gpu.HOPPER, few_rows,
        lambda of: not of.scopes and of.rows in OF_FEW[of.kv_dtype.itemsize], _of_decode,
        (Shape(16, 1, 64), Shape(8, 4, 16, huge=True), Shape(20, 1, 64, batch=40),
         Shape(16, 2, 128, gap=64)),
        (Shape(32, 1, 64, 256, 64), Shape(8, 3, 96), Shape(16, 1, 32, 256, 32)),
        page=SMALLEST_BOX, newest_triton=NEWEST_TRITON,
    ),
    Card(
        "hopper.decode", gpu.HOPPER, decode, lambda of: not of.scopes, _of_decode,
        (*FEW, Shape(32, 1, 64, 256, 64), Shape(20, 1, 64, batch=40)),
        (Shape(64, 2, 32), Shape(20, 3, 64), Shape(40, 1, 16, 256, 32)),
    ),
)  # fmt: skip
