"""The Triton provider: a persistent decode kernel and a reduction, two launches.

`choice.py` says which decode kernel. All execute the same plan. Nothing is allocated here and
nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.attention.hopper import sparse_fp8_launch as triton_packed
from mla_fusion.attention.triton import epilogue as triton_epilogue
from mla_fusion.attention.triton.choice import Config, chosen, power_of_two
from mla_fusion.attention.triton.choice import plan_settings as plan_settings
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.triton import has_early_launch
from mla_fusion.kernels.triton import require as require

if TYPE_CHECKING:
    from mla_fusion.attention.plan.buffers import PlanBuffers
    from mla_fusion.attention.plan.inputs import Inputs
    from mla_fusion.attention.plan.layouts import CacheLayout

WIDE_DTYPES = (torch.bfloat16, torch.float16)
# The widest that were compiled, in multiples of 16, the least depth of a matrix instruction.
MOST_LATENTS, MOST_ROTATED = 1024, 128


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
    """What sparse decode adds: see `triton.decode_kernel.decode_kernel`.

    extra: the scope after the first one; lens: [B] int32, how many of the first scope's `first`
    columns count; sink: [H] fp32 or None.
    """

    extra: Scope
    first: int
    lens: torch.Tensor
    sink: torch.Tensor | None


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
    """The decode and what follows it; arguments are checked.

    `config` overrides the measured choice.
    """
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
    from mla_fusion.attention.triton import decode_kernel as triton_kernels

    plan = given.plan
    rows = plan.heads_per_work * plan.settings.max_query_len
    config = config or (
        chosen(given) if sparse is None else chosen(given, sparse.extra.kv_cache, sparse.first)
    )
    kernel: Any = triton_kernels.decode_kernel
    if config.hopper and given.layout is not None:
        from mla_fusion.attention.hopper import sparse_fp8 as hopper_packed

        kernel = hopper_packed.decode_kernel
    elif config.cdna:
        from mla_fusion.attention.cdna import decode as cdna_kernel

        kernel = cdna_kernel.decode_kernel
    elif config.specialized:
        from mla_fusion.attention.hopper import warp_specialized as hopper_specialized

        kernel = hopper_specialized.decode_kernel
    elif config.hopper:
        from mla_fusion.attention.hopper import decode as hopper_kernel

        kernel = hopper_kernel.decode_kernel
    args, options = decode_arguments(config, given, sparse)
    kernel[(plan.rules.workers, -(-rows // config.rows))](*args, **options)


def merge(given: Inputs, sparse: Sparse | None = None) -> None:
    """The launch of the reduction: the latents of sequences with several pieces."""
    from mla_fusion.attention.triton import decode_kernel as triton_kernels

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
    if config.specialized:
        from mla_fusion.attention.hopper import warp_specialized as hopper_specialized

        return hopper_specialized.arguments(given)
    if config.hopper and given.layout is not None:
        sink = None if sparse is None else sparse.sink
        return triton_packed.arguments(given, sink, config.rows, config.warps, config.stages)
    if config.cdna:
        from mla_fusion.attention.cdna import decode as cdna_kernel

        return cdna_kernel.arguments(given, config)
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
        *plan.of_decode,
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
        from mla_fusion.attention.hopper.copy import bulk_copy

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


def warm_up_batches(
    plan: PlanBuffers, values: int | None = None, quantization: str = "none"
) -> list[int]:
    """Numbers of sequences that compile, together, all that steps of `plan` launch, with an
    epilogue of `values` columns a head and this quantization if there is one."""
    batches: dict[Any, int] = {}
    settings = plan.settings
    layer = settings.num_heads, settings.v_head_dim
    for batch in range(1, settings.max_batch + 1):
        merged = reduction(batch * plan.fold, plan.heads_per_work)
        if values is None:
            batches.setdefault(merged, batch)
            continue
        for rows in range(1, settings.max_query_len + 1):
            shape = triton_epilogue.choose(batch * rows, *layer, values, quantization)
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
