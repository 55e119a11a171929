"""The Triton provider: which decode kernel it launches, and what follows; nothing is waited for."""

import importlib
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention.cdna import fits as for_cdna
from mla_fusion.attention.hopper import fits as for_hopper
from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.heads import layout as head_layout
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import CacheLayout
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.triton import refuse_fp8 as refuse_fp8
from mla_fusion.kernels.triton import require as require

# The decode kernels of each GPU, in order: the first that fits decodes. Each module has
# `fits(given) -> why not`, `arguments(given) -> Launch` and `kernel`.
KERNELS = {
    "sm_90": (
        "hopper.sparse_fp8", "hopper.sparse_specialized", "hopper.warp_specialized",
        "hopper.decode", "triton.decode_kernel",
    ),
    **dict.fromkeys(gpu.CDNA, ("cdna.decode", "triton.decode_kernel")),
    "other": ("triton.decode_kernel",),
}  # fmt: skip
PAIRED_HEADS = 128  # of one query row: two row blocks of one item
# Sequences from which two CTAs of up to 16 query rows in fp8 share an SM. On an H200 one CTA took
# 0.80 to 1.02 of the time with 1 and 4, and 1.10 at 64 x 8192.
SHARED_FROM = 5
# Fixed cost of a work item, in blocks of 64 tokens: less for tiles of 128 tokens, which splits of 3
# blocks would fill badly, and for fp8_ds_mla, whose blocks take longer.
OVERHEAD, WIDE_OVERHEAD, DS_MLA_OVERHEAD = 4, 3, 2
WIDE_DTYPES = (torch.bfloat16, torch.float16)
# The widest that were compiled, in multiples of 16, the least depth of a matrix instruction.
MOST_LATENTS, MOST_ROTATED = 1024, 128


def unsupported(q_dtype: torch.dtype, kv_dtype: torch.dtype, latent: int, rope: int) -> str:
    """Why this provider does not decode such queries over such a cache; empty if it does. Both are
    multiplied in one 16-bit type, on the way to which other pairs would be rounded or overflow."""
    most = {"kv_lora_rank": (latent, MOST_LATENTS), "qk_rope_head_dim": (rope, MOST_ROTATED)}
    for name, (size, limit) in most.items():
        if size not in range(16, limit + 1, 16):
            return f"it takes a {name} that is a multiple of 16 up to {limit}, not {size}"
    same = kv_dtype == q_dtype and q_dtype in (*WIDE_DTYPES, *FP8_DTYPES)
    if same or (kv_dtype in FP8_DTYPES and q_dtype in WIDE_DTYPES):
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
    refuse_fp8(q.device, q=q.dtype, kv_cache=kv_cache.dtype)


def persistent_mla_decode(given: Inputs) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`."""
    check(given.q, given.kv_cache, given.plan.settings.v_head_dim)
    launch(given)


def launch(given: Inputs) -> None:
    """The decode of checked arguments and what follows it."""
    decode(given)
    merge(given)
    if given.epilogue is not None:
        multiply(given)
    given.plan.fresh = False


def decode(given: Inputs) -> None:
    """The launch of the decode kernel: splits, and the latents of sequences without any."""
    _run(chosen(given), given)


def _run(module: Any, *given: Any) -> None:
    grid, args, options = module.arguments(*given)
    module.kernel[grid](*args, **options)


def merge(given: Inputs) -> None:
    """The launch of the reduction: the latents of sequences with several splits."""
    # Imported when launched: a kernel needs Triton.
    from mla_fusion.attention.triton import reduce_kernel

    _run(reduce_kernel, given)


def multiply(given: Inputs) -> None:
    """The product of the merged latents in `out` with W_UV, and a quantization: one launch on
    Hopper where it is not slower, else `torch.bmm`, as in vLLM, and a kernel that quantizes."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    if gpu.of(latents.device).arch in gpu.HOPPER and not for_hopper.product(given):
        from mla_fusion.attention.hopper import product as hopper_product

        _run(hopper_product, given)
        return
    (heads, _, values), product = epilogue.w_uv.shape, epilogue.out
    if epilogue.scale is not None:
        # torch.bmm cannot write fp8. Under capture this comes from the graph's own pool.
        product = latents.new_empty((len(latents), heads * values))
    target = product.view(-1, heads, values).transpose(0, 1)
    torch.bmm(latents.transpose(0, 1), epilogue.w_uv, out=target)
    if epilogue.scale is not None:
        quantize(product, epilogue)


def quantize(product: torch.Tensor, epilogue: Epilogue) -> None:
    """The quantization of a dense product [T, H * V]."""
    from mla_fusion.attention.triton import quantize_kernel

    _run(quantize_kernel, product, epilogue)


def warm_up_batches(plan: PlanBuffers, values: int | None) -> list[int]:
    """Numbers of sequences, as `attention.get_provider` has them."""
    from mla_fusion.attention.triton.reduce_kernel import reduction

    batches: dict[Any, int] = {}
    settings, layout = plan.settings, plan.layout
    for batch in range(1, settings.max_batch + 1):
        merged = reduction(batch * layout.fold, layout.per_work * settings.max_query_len)
        batches.setdefault((merged, batch < plan.rules.half_below), batch)
        for length in range(1, settings.max_query_len + 1) if values else ():
            tokens = batch * length
            size = for_hopper.product_size(tokens, settings.num_heads, values or 0)
            most, rows = for_hopper.PRODUCT_SIZE, for_hopper.product_rows(tokens)
            batches.setdefault((length, rows, size > most, size > 2 * most), batch)
    return sorted(set(batches.values()))


def kernels(device: torch.device) -> tuple[str, ...]:
    """Those of `KERNELS` for a device."""
    return KERNELS.get(gpu.of(device).arch, KERNELS["other"])


def chosen(given: Inputs) -> Any:
    """The kernel module for a decode, by what a captured graph keeps: shapes, strides, types, the
    scale of the scores and whether addresses are multiples of 16 bytes."""
    # Imported where it may be launched: Gluon's modules take a while.
    names = (f"mla_fusion.attention.{name}" for name in kernels(given.q.device))
    return next(each for each in map(importlib.import_module, names) if not each.fits(given))


def plan_settings(
    num_heads: int, max_query_len: int, kv_dtype: torch.dtype, width: int,
    device: torch.device | str,
) -> dict[str, int]:  # fmt: skip
    """What to allocate a plan with for a kernel with tiles of 64 tokens: keywords of `allocate`.

    With 16 query rows at most, two CTAs fit an SM if its shared memory holds their tiles, and hide
    each other's latency: with fp8 and 512 + 64, at batch 64 and 8192 tokens, that took 97 us, one
    CTA 136. The blocks of 64 rows of an item run at the same time and read tiles of the cache
    together, so the plan has fewer CTAs: with drafts, and in bf16 with 128 heads and one query row,
    whose items hold both blocks for it."""
    settings = {"kv_granularity": for_hopper.TILE, "overhead": OVERHEAD}
    here, tile = gpu.of(device), for_hopper.WARP_SPECIALIZED_ROWS
    sms = here.sms
    rows = head_layout(num_heads, max_query_len).per_work * max_query_len
    specialized = width == sum(for_hopper.WARP_SPECIALIZED_WIDTHS) and here.arch in gpu.HOPPER
    if here.arch in gpu.CDNA:
        tile, waves = for_cdna.rows_and_waves(here.arch, rows, kv_dtype, kv_dtype, for_cdna.TILE)
        ctas = waves * sms // -(-rows // tile)
    elif specialized and (kv_dtype == torch.bfloat16 or rows > tile):
        if (num_heads, max_query_len) == (PAIRED_HEADS, 1):
            rows = settings["heads_per_work"] = PAIRED_HEADS
        ctas = sms // -(-rows // tile)
    else:
        # Two tiles of keys, and one of queries.
        tiles = (2 * for_hopper.TILE + 16) * width * kv_dtype.itemsize
        shared = rows <= 16 and 2 * tiles <= here.shared_memory
        ctas = sms * (2 if shared else 1)
        if specialized and shared:
            settings["half_below"] = SHARED_FROM
        if specialized and 16 < rows <= 32 and kv_dtype.itemsize == 1:
            settings["overhead"] = WIDE_OVERHEAD
    return {"ctas": max(1, ctas), **settings}


def sparse_settings(
    num_heads: int, scopes: int, layout: CacheLayout | None, device: torch.device
) -> dict[str, int]:
    """The same of a sparse plan. layout: of its caches' bytes. Two CTAs of up to 16 heads over one
    scope of entries with scales in them share an SM; the two blocks of 128 heads are as above."""
    settings = {"kv_granularity": for_hopper.TILE, "overhead": OVERHEAD}
    here = gpu.of(device)
    if here.arch in gpu.HOPPER and layout is not None:
        sms = here.sms
        if not layout.behind:
            settings["overhead"] = DS_MLA_OVERHEAD
        few = num_heads <= for_hopper.SPARSE_FP8_ROWS and scopes == 1 and not layout.behind
        settings["ctas"] = 2 * sms if few else sms
        if num_heads == PAIRED_HEADS:
            settings |= {"ctas": sms // 2, "heads_per_work": PAIRED_HEADS}
    return settings
