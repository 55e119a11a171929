"""The Triton provider: a persistent decode kernel and a reduction, two launches.

On Hopper (sm_90) with query and cache of one type the kernel is `hopper_kernel.py`, over a cache of
bytes `hopper_packed.py`, everywhere else `triton_kernels.py`; all execute the same plan. Nothing is
allocated here and nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention import triton_epilogue, triton_packed
from mla_fusion.attention.buffers import HOPPER_TILE
from mla_fusion.attention.heads import layout as head_layout
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.triton import has_early_launch
from mla_fusion.kernels.triton import require as require

if TYPE_CHECKING:
    from mla_fusion.attention.buffers import PlanBuffers
    from mla_fusion.attention.layouts import CacheLayout
    from mla_fusion.attention.validate import Inputs

WIDE_DTYPES = (torch.bfloat16, torch.float16)
# Latent and rotated part of the kernel for Hopper. Its tiles in shared memory are powers of two
# wide, two of them have to fit beside 64 query rows, and each pair was compiled and checked.
HOPPER_WIDTHS = ((512, 64), (256, 64), (256, 32))
SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor of Hopper
# The widest that were compiled, in multiples of 16, the least depth of a matrix instruction.
MOST_LATENTS, MOST_ROTATED = 1024, 128


def power_of_two(size: int) -> int:
    """`size`, or the next power of two."""
    return 1 << (size - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class Config:
    """How one launch of the decode kernel is compiled.

    hopper: which kernel. rows: query rows (position x head) of a program. block_n: tokens of a
    tile. warps: of a program. stages: tiles in shared memory, of the kernel over byte caches.
    """

    hopper: bool
    rows: int
    block_n: int
    warps: int
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where the keys are: a cache [blocks, page_size, L + R] and, for each sequence, a row of
    `table` [B, n] int32: its blocks in order, or, in sparse decode, its slots, -1 for none.
    With a layout the cache is uint8 [blocks, page_size, layout.bytes], for sparse decode.
    """

    kv_cache: torch.Tensor
    table: torch.Tensor
    layout: CacheLayout | None = None


@dataclasses.dataclass(frozen=True)
class Sparse:
    """What sparse decode adds: see `triton_kernels.decode_kernel`.

    extra: the scope after the first one; lens: [B] int32, how many of the first scope's `first`
    columns count; sink: [H] fp32 or None.
    """

    extra: Scope
    first: int
    lens: torch.Tensor
    sink: torch.Tensor | None


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
        tile, stages = (16, 2) if rows <= triton_packed.ROWS else (32, 3)
        return Config(True, tile, HOPPER_TILE, tile // 4, stages)
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
    """What to allocate a plan with for the kernel for Hopper: keywords of `allocate`.

    width: of a cache entry, L + R. Sequences are cut at tiles of 64 tokens. With 16 query rows at
    most, two programs fit a multiprocessor if its shared memory holds their tiles, and hide each
    other's latency: with fp8 and 512 + 64, at batch 64 and 8192 tokens, that took 97 us, one
    program 136 (before tiles were copied by the copy engine: 89 us with two, one was not measured).
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    rows = head_layout(num_heads, max_query_len).per_work * max_query_len
    tiles = (2 * HOPPER_TILE + 16) * width * kv_dtype.itemsize  # two of keys, one of queries
    programs = 2 if rows <= 16 and 2 * tiles <= SHARED_MEMORY else 1
    return {"workers": programs * processors, "kv_granularity": HOPPER_TILE, "overhead": 4}


def is_hopper(q: torch.Tensor, caches: list[torch.Tensor], latent: int) -> bool:
    """Whether the kernel for Hopper takes these tensors: its copies move 16 aligned bytes."""
    if not triton_packed.is_sm90(q.device):
        return False
    strides = [stride for tensor in (q, *caches) for stride in tensor.stride()[:2]]
    return (
        (latent, q.shape[2] - latent) in HOPPER_WIDTHS
        and all(cache.dtype == q.dtype for cache in caches)
        and not any(stride * q.itemsize % 16 for stride in strides)
        and not any(tensor.data_ptr() % 16 for tensor in (q, *caches))
    )


def unsupported(q_dtype: torch.dtype, kv_dtype: torch.dtype, latent: int, rope: int) -> str:
    """Why this provider does not decode such queries over such a cache; empty if it does.

    Both are multiplied in one 16-bit type. Another pair of types would compile, and be rounded or
    overflow on the way there.
    """
    most = {"kv_lora_rank": (latent, MOST_LATENTS), "qk_rope_head_dim": (rope, MOST_ROTATED)}
    for name, (size, limit) in most.items():
        if size not in range(16, limit + 1, 16):
            return f"it takes a {name} that is a multiple of 16 up to {limit}, not {size}"
    if kv_dtype == q_dtype and q_dtype in (*WIDE_DTYPES, *FP8_DTYPES):
        return ""
    if kv_dtype in FP8_DTYPES and q_dtype in WIDE_DTYPES:
        return ""
    return (
        "it takes a bf16 or fp16 query over a cache of its type or of fp8 (e4m3), or an fp8 query "
        f"over a cache of its type, got {q_dtype} over {kv_dtype}"
    )


def check(q: torch.Tensor, kv_cache: torch.Tensor, latent: int) -> None:
    """Raise ValueError for what this provider does not support."""
    rope = kv_cache.shape[2] - latent
    if why := unsupported(q.dtype, kv_cache.dtype, latent, rope):
        raise ValueError(f"provider 'triton': {why}; convert, or use provider 'reference'")
    refuse_fnuz(q, kv_cache.dtype)


def refuse_fnuz(q: torch.Tensor, kv_dtype: torch.dtype) -> None:
    """Raise ValueError for AMD's own fp8 type on another GPU."""
    if torch.float8_e4m3fnuz in (q.dtype, kv_dtype) and q.is_cuda and not torch.version.hip:
        raise ValueError("float8_e4m3fnuz is a type of AMD GPUs; use float8_e4m3fn")


def persistent_mla_decode(
    given: Inputs,
) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`."""
    check(given.q, given.kv_cache, given.plan.settings.v_head_dim)
    launch(given)


def launch(given: Inputs, sparse: Sparse | None = None, config: Config | None = None) -> None:
    """The decode, by `config` or the measured one, and what follows it; arguments are checked."""
    decode(given, sparse, config)
    shape = triton_epilogue.chosen(given)
    if shape is not None:
        triton_epilogue.launch(given, shape)
    else:
        merge(given, sparse)
        if given.epilogue is not None:
            triton_epilogue.multiply(given)
    given.plan.fresh = False


def decode(given: Inputs, sparse: Sparse | None = None, config: Config | None = None) -> None:
    """The launch of the decode kernel: pieces, and the latents of sequences without any."""
    from mla_fusion.attention import triton_kernels

    plan = given.plan
    rows = plan.heads_per_work * plan.settings.max_query_len
    config = config or chosen(given, sparse, rows)
    if config.hopper and given.layout is not None:
        sink = None if sparse is None else sparse.sink
        triton_packed.launch(given, sink, config.rows, config.warps, config.stages)
        return
    kernel: Any = triton_kernels.decode_kernel
    if config.hopper:
        from mla_fusion.attention import hopper_kernel

        kernel = hopper_kernel.decode_kernel
    args, options = decode_arguments(config, given, sparse)
    kernel[(plan.rules.workers, -(-rows // config.rows))](*args, **options)


def chosen(given: Inputs, sparse: Sparse | None, rows: int) -> Config:
    """The measured configuration of a decode of `rows` query rows a work item."""
    latent = given.plan.settings.v_head_dim
    if given.layout is None:
        caches = [given.kv_cache, *([] if sparse is None else [sparse.extra.kv_cache])]
        hopper = is_hopper(given.q, caches, latent)
    else:
        first = 0 if sparse is None else sparse.first
        hopper = triton_packed.serves(given.q.device, given.layout, first)
    widths = latent, given.q.shape[2] - latent
    return choose(hopper, rows, *widths, 64 if torch.version.hip else 32, given.layout is not None)


def merge(given: Inputs, sparse: Sparse | None = None) -> None:
    """The launch of the reduction: the latents of sequences with several pieces."""
    from mla_fusion.attention import triton_kernels

    plan = given.plan
    assert plan.step is not None, "the caller has refreshed the plan"
    tiles = plan.step.batch * plan.fold
    args, options = reduce_arguments(plan, tiles, given.out, given.lse, sparse)
    rows = plan.heads_per_work * plan.settings.max_query_len
    grid = (tiles, -(-rows // options["ROWS"]), -(-options["L"] // options["COLUMNS"]))
    triton_kernels.reduce_kernel[grid](*args, **options)


def decode_arguments(
    config: Config, given: Inputs, sparse: Sparse | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of a decode kernel (also for compiling without a GPU)."""
    q, kv_cache, table = given.q, given.kv_cache, given.block_table
    plan, out, unused = given.plan, given.out, given.plan.partial_lse
    extra = Scope(kv_cache, table) if sparse is None else sparse.extra
    caches = [kv_cache, extra.kv_cache]
    if given.layout is not None:
        caches = [cache.view(plan.settings.kv_dtype) for cache in caches]

    def or_unused(tensor: torch.Tensor | None) -> torch.Tensor:
        return unused if tensor is None else tensor

    args: tuple[Any, ...] = (
        q,
        caches[0],
        table,
        caches[1],
        extra.table,
        plan.kv_indptr if sparse is None else sparse.lens,
        or_unused(sparse.sink if sparse else None),
        out,
        or_unused(given.lse),
        plan.partial_output,
        plan.partial_lse,
        plan.work_indptr,
        plan.work_info_set,
        plan.qo_indptr,
        plan.kv_indptr,
        or_unused(given.q_scale),
        or_unused(given.kv_scale),
        float(given.softmax_scale),
        q.shape[1],
        *q.stride()[:2],
        *out.stride()[:2],
        table.stride(0),
        kv_cache.stride(0),
        extra.table.stride(0),
        extra.kv_cache.stride(0),
    )
    options = decode_options(config, given, extra, sparse)
    if config.hopper:
        from mla_fusion.attention.hopper_copy import bulk_copy

        # The slots of a sparse sequence are scattered rows.
        latent = plan.settings.v_head_dim
        bulk = (kv_cache, kv_cache, 0) if sparse else bulk_copy(kv_cache, latent, config.block_n)
        args += (*bulk, int(plan.fresh))
        options |= {"BULK": bulk[2] > 0, "WARPS": config.warps, "PDL": True, "launch_pdl": True}
    else:
        import triton.language as tl

        half = torch.float16 in (q.dtype, kv_cache.dtype)
        padded = {f"{name}_PAD": power_of_two(options[name]) for name in ("L", "R")}
        options |= {"DOT": tl.float16 if half else tl.bfloat16, "num_stages": 1, **padded}
        packed = given.layout
        read = (0, 0, False) if packed is None else (packed.quantized, packed.group, packed.behind)
        options |= dict(zip(("CODES", "GROUP", "BEHIND"), read, strict=True))
    return args, options


def decode_options(
    config: Config, given: Inputs, extra: Scope, sparse: Sparse | None
) -> dict[str, Any]:
    """The keywords of both decode kernels: how they are compiled."""
    kv_cache, plan, layout = given.kv_cache, given.plan, given.layout

    def step(cache: torch.Tensor) -> int:
        return cache.stride(1) if layout is None else layout.step(cache)

    return {
        "ENTRY": step(kv_cache),
        "PAGE": kv_cache.shape[1],
        "EXTRA_ENTRY": step(extra.kv_cache),
        "EXTRA_PAGE": extra.kv_cache.shape[1],
        "FIRST": 0 if sparse is None else sparse.first,
        "SPARSE": sparse is not None,
        "SINK": sparse is not None and sparse.sink is not None,
        "L": plan.settings.v_head_dim,
        "R": given.q.shape[2] - plan.settings.v_head_dim,
        "HEADS": plan.heads_per_work,
        "FOLD": plan.fold,
        "ROWS": config.rows,
        "BLOCK_N": config.block_n,
        "LSE": given.lse is not None,
        "num_warps": config.warps,
    }


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


def warm_up_batches(plan: PlanBuffers, values: int | None = None) -> list[int]:
    """Numbers of sequences that compile, together, all that steps of `plan` launch, with an
    epilogue of `values` columns a head if there is one."""
    batches: dict[Any, int] = {}
    settings = plan.settings
    for batch in range(1, settings.max_batch + 1):
        merged = reduction(batch * plan.fold, plan.heads_per_work)
        if values is None:
            batches.setdefault(merged, batch)
            continue
        for rows in range(1, settings.max_query_len + 1):
            shape = triton_epilogue.choose(batch * rows, settings.num_heads, values)
            batches.setdefault((rows, shape or merged), batch)
    return sorted(set(batches.values()))


def reduce_arguments(
    plan: PlanBuffers,
    tiles: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sparse: Sparse | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and keywords of the reduction of the first `tiles` tiles."""
    latent, unused = plan.settings.v_head_dim, plan.partial_lse
    sink = None if sparse is None else sparse.sink
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
