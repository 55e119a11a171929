"""Which decode kernel the Triton provider launches, how it is compiled, and which plan suits it."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from mla_fusion.attention.aiter.selection import architecture
from mla_fusion.attention.plan.buffers import HOPPER_TILE
from mla_fusion.attention.plan.heads import layout as head_layout

if TYPE_CHECKING:
    from mla_fusion.attention.plan.inputs import Inputs
    from mla_fusion.attention.plan.layouts import CacheLayout

# Latent and rotated part of the kernel for Hopper. Its tiles in shared memory are powers of two
# wide, two of them have to fit beside 64 query rows, and each pair was compiled and checked.
HOPPER_WIDTHS = ((512, 64), (256, 64), (256, 32))
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor of Hopper
SPECIALIZED_WIDTHS = (512, 64)  # of the kernel for Hopper with warps of different work
SPECIALIZED_TYPES = ({torch.bfloat16}, {torch.float8_e4m3fn})
CDNA_WIDTHS = ((512, 64), (256, 64))  # of the kernel for CDNA 3 and 4: compiled and executed
CDNA_TILE = 64  # tokens
PAIRED_HEADS = 128  # of one query row: two row blocks of one item


def power_of_two(size: int) -> int:
    """`size`, or the next power of two."""
    return 1 << (size - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Config:
    """How one launch of the decode kernel is compiled.

    hopper: which kernel. rows: query rows (position x head) of a program. block_n: tokens of a
    tile. warps: of a program. specialized: Hopper's with warps of different work.
    stages: tiles in shared memory of Hopper's over a cache of bytes. cdna: 3 or 4 for the kernel of
    that generation of AMD's, and waves: of a SIMD, which the compiler may not fall short of.
    """

    hopper: bool
    rows: int
    block_n: int
    warps: int
    specialized: bool = False
    stages: int = 2
    cdna: int = 0
    waves: int = 0


PACKED_WIDE = Config(True, 32, HOPPER_TILE, 8, stages=3)
SPECIALIZED = Config(True, 64, HOPPER_TILE, 4, specialized=True)


def chosen(given: Inputs, extra: torch.Tensor | None = None, first: int = 0) -> Config:
    """The configuration for a decode: from shapes, strides, types, the scale of the scores and
    whether addresses are multiples of 16 bytes, which a captured graph keeps. extra: the last cache
    of sparse decode. first: columns of the first of its two scopes.
    """
    plan, latent = given.plan, given.plan.settings.v_head_dim
    widths = latent, given.q.shape[2] - latent
    caches = [given.kv_cache, *([] if extra is None else [extra])]
    warp, packed = 64 if torch.version.hip else 32, given.layout is not None
    if given.layout is None:
        hopper = is_hopper(given.q, caches, latent)
    else:
        hopper = reads_packed(given.q.device, given.layout, first)
    rows = plan.heads_per_work * plan.settings.max_query_len
    generation = cdna(given.q.device)
    if generation and extra is None and not why_not_cdna(given):
        page = given.kv_cache.shape[1]
        return choose_cdna(generation, rows, given.q.dtype, given.kv_cache.dtype, page)
    config = choose(hopper, rows, *widths, warp, packed)
    wide = config.rows == SPECIALIZED.rows and extra is None
    return SPECIALIZED if wide and not why_not_specialized(given) else config


def why_not_specialized(given: Inputs) -> str:
    """Why the kernel with warps of different work does not take a query and a cache; empty if it
    does. It copies both by the tensor copy engine only, 64 rows at a time.
    """
    q, kv_cache, plan = given.q, given.kv_cache, given.plan
    tokens, _, width = q.shape
    per_work, queries = plan.heads_per_work, plan.settings.max_query_len
    latent = plan.settings.v_head_dim
    types, widths = {q.dtype, kv_cache.dtype}, (latent, width - latent)
    if types not in SPECIALIZED_TYPES or widths != SPECIALIZED_WIDTHS:
        return (
            "it takes bf16 or e4m3, query and cache of one type, of 512 + 64, got "
            f"{q.dtype} over {kv_cache.dtype} of {latent} + {width - latent}"
        )
    if not given.softmax_scale > 0:
        # The largest product of a row has its largest score.
        return f"it takes a positive scale of the scores, got {given.softmax_scale}"
    page_size, (step, entry, _) = kv_cache.shape[1], kv_cache.stride()
    if page_size % HOPPER_TILE or step % entry:
        return (
            f"it copies {HOPPER_TILE} tokens of a page at once, from blocks that are whole entries "
            f"apart, got pages of {page_size} tokens, {step} and {entry} elements from one block "
            "and entry to the next"
        )
    rows = SPECIALIZED.rows
    # A box holds whole tokens of an item, or heads of one token.
    fits = queries == 1 or rows % per_work == 0 or per_work % rows == 0
    if tokens == 0 or not fits:
        return (
            f"it copies {rows} rows of the query at once, got {tokens} tokens, {per_work} heads of "
            f"an item and {queries} query rows"
        )
    return ""


def why_not_cdna(given: Inputs) -> str:
    """Why the kernel for CDNA does not take a query and a cache; empty if it does."""
    q, kv_cache, latent = given.q, given.kv_cache, given.plan.settings.v_head_dim
    widths = latent, q.shape[2] - latent
    if given.layout is not None or widths not in CDNA_WIDTHS:
        return f"it takes entries of {CDNA_WIDTHS} values of one type, got {widths}"
    if torch.float16 in (q.dtype, kv_cache.dtype):
        return f"it multiplies bf16 or fp8, got {q.dtype} over {kv_cache.dtype}"
    strides = [n * x.itemsize for x in (q, kv_cache) for n in x.stride()[:2]]
    if any(n % 16 for n in strides) or any(x.data_ptr() % 16 for x in (q, kv_cache)):
        return f"it reads 16 aligned bytes at once, got rows {strides} bytes apart"
    return ""


def choose_cdna(
    generation: int, rows: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, page: int
) -> Config:
    """The configuration for CDNA 3 or 4; page: tokens of a block.

    As many waves a SIMD as fit without spills: they hide each other's latency. With four waves of
    128 registers the loop over tiles spills.
    """
    tile = 16 if rows <= 16 else 32
    aligned = page % CDNA_TILE == 0 or page in (16, 32)
    if tile == 16:
        waves = 3 if q_dtype.itemsize == 1 and aligned else 2
    else:
        waves = 2 if kv_dtype.itemsize == 1 else 1
    if generation == 4 and kv_dtype.itemsize == 1 and not converts_e4m3fn():
        waves = 1
    return Config(False, tile, CDNA_TILE, 4, cdna=generation, waves=waves)


@functools.cache
def converts_e4m3fn() -> bool:
    """Whether Triton has the instructions of CDNA 4 for e4m3fn; its own code takes registers."""
    return triton_version() >= (3, 7)


def why_no_sparse_cdna() -> str:
    """Why sparse decode is not compiled for AMD GPUs; empty if it is."""
    if (found := triton_version()) >= (3, 7):
        return ""
    return "Triton {}.{} does not compile the sparse decode for AMD GPUs, 3.7 does".format(*found)


def triton_version() -> tuple[int, int]:
    """Of the installed Triton, major and minor."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def choose(
    hopper: bool, rows: int, latent: int, rope: int, warp: int = 32, packed: bool = False
) -> Config:
    """The configuration for work items of `rows` query rows on a GPU with warps of `warp` threads.

    Hopper's are measured with 512 + 64; the others are the largest that compile for gfx942, gfx950
    and sm_90 without spilling registers inside the loop over tiles. fp8 latents above 512 spill
    there on sm_90, whatever the tile. packed: over a cache of bytes, whose scales take registers
    too. There 32 query rows spill to memory on gfx942 and gfx950, and 4 warps on sm_90.
    """
    if packed and hopper:
        # 16 rows leave room for two programs on a multiprocessor.
        return Config(True, 16, HOPPER_TILE, 4) if rows <= 16 else PACKED_WIDE
    if packed:
        return Config(False, 16, 16, 4) if warp == 64 else Config(False, min(rows, 32), 16, 8)
    if hopper:
        tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
        return Config(True, tile, HOPPER_TILE, 4 if tile == 16 else 8)
    if rows <= 16 or power_of_two(latent) + power_of_two(rope) > 576:
        return Config(False, 16, 16, 4 if latent <= 512 else 256 // warp)
    return Config(False, 32, 16, 256 // warp)


def plan_settings(
    num_heads: int,
    max_query_len: int,
    kv_dtype: torch.dtype,
    width: int,
    device: torch.device | str,
) -> dict[str, int]:
    """What to allocate a plan with for a kernel with tiles of 64 tokens: keywords of `allocate`.

    width: of a cache entry, L + R. Sequences are cut at tiles of 64 tokens. With 16 query rows at
    most, two programs fit a multiprocessor if its shared memory holds their tiles, and hide each
    other's latency: with fp8 and 512 + 64, at batch 64 and 8192 tokens, that took 97 us, one
    program 136 (before tiles were copied by the copy engine: 89 us with two, one was not measured).

    Where an item has several blocks of 64 rows in bf16, workers are so few that the programs of all
    its blocks run at the same time, and read tiles of the cache together: with 128 heads and one
    query row, whose items hold both blocks for it, and with drafts.
    """
    common = {"kv_granularity": HOPPER_TILE, "overhead": 4}
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if generation := cdna(device):
        rows = head_layout(num_heads, max_query_len).per_work * max_query_len
        # Programs that run side by side, of all row blocks.
        config = choose_cdna(generation, rows, kv_dtype, kv_dtype, CDNA_TILE)
        blocks = -(-rows // config.rows)
        return {"workers": max(1, config.waves * processors // blocks), **common}
    rows = head_layout(num_heads, max_query_len).per_work * max_query_len
    bf16 = kv_dtype == torch.bfloat16 and width == sum(SPECIALIZED_WIDTHS)
    if bf16 and has_hopper(device):
        wide = {}
        if (num_heads, max_query_len) == (PAIRED_HEADS, 1):
            rows = wide["heads_per_work"] = PAIRED_HEADS
        blocks = -(-rows // SPECIALIZED.rows)
        return {"workers": max(1, processors // blocks), **wide, **common}
    tiles = (2 * HOPPER_TILE + 16) * width * kv_dtype.itemsize  # two of keys, one of queries
    programs = 2 if rows <= 16 and 2 * tiles <= SHARED_MEMORY else 1
    return {"workers": programs * processors, **common}


def packed_workers(
    num_heads: int, widths: tuple[int, ...], kv_dtype: torch.dtype, device: torch.device
) -> int | None:
    """Workers of a sparse plan over entries of bytes; None for the plan's default.

    All programs run at the same time: two of 16 rows on a multiprocessor, or one of 32. So blocks
    of rows of one item read its entries together.
    """
    if device.type != "cuda" or not has_hopper(device):
        return None
    if len(widths) > 1 or kv_dtype != torch.float8_e4m3fn:
        return None
    rows = head_layout(num_heads, 1).per_work
    blocks = -(-rows // PACKED_WIDE.rows)
    programs = 2 if rows <= 16 else 1
    return programs * torch.cuda.get_device_properties(device).multi_processor_count // blocks


def reads_packed(device: torch.device, layout: CacheLayout, first: int) -> bool:
    """Whether the kernel for Hopper reads entries of bytes: of one scope, their scales in them."""
    return device.type == "cuda" and has_hopper(device) and not layout.behind and first == 0


def cdna(device: torch.device | str) -> int:
    """3 for a GPU of gfx942, 4 for one of gfx950, 0 for any other device."""
    return {"gfx942": 3, "gfx950": 4}.get(architecture(torch.device(device)), 0)


def has_hopper(device: torch.device | str) -> bool:
    """Whether a GPU is of sm_90."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def is_hopper(q: torch.Tensor, caches: list[torch.Tensor], latent: int) -> bool:
    """Whether the kernel for Hopper takes these tensors: its copies move 16 aligned bytes."""
    if not q.is_cuda or not has_hopper(q.device):
        return False
    strides = [stride for tensor in (q, *caches) for stride in tensor.stride()[:2]]
    return (
        (latent, q.shape[2] - latent) in HOPPER_WIDTHS
        and all(cache.dtype == q.dtype for cache in caches)
        and not any(stride * q.itemsize % 16 for stride in strides)
        and not any(tensor.data_ptr() % 16 for tensor in (q, *caches))
    )
