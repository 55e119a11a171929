"""Which decode kernel the Triton provider launches, and which plan suits it."""

import importlib
from typing import Any

import torch

from mla_fusion.attention.cdna import fits as for_cdna
from mla_fusion.attention.hopper import fits as for_hopper
from mla_fusion.attention.plan.device import cdna, has_hopper, sm_count
from mla_fusion.attention.plan.heads import layout as head_layout
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.plan.layouts import CacheLayout

# The decode kernels of each GPU, in order: the first that fits decodes. Each module has
# `fits(given) -> why not`, `arguments(given) -> Launch` and `kernel`.
KERNELS = {
    "Hopper": (
        "hopper.sparse_fp8", "hopper.sparse_specialized", "hopper.warp_specialized",
        "hopper.decode", "triton.decode_kernel",
    ),
    "CDNA": ("cdna.decode", "triton.decode_kernel"),
    "other": ("triton.decode_kernel",),
}  # fmt: skip
PAIRED_HEADS = 128  # of one query row: two row blocks of one item
# Sequences from which two CTAs of up to 16 query rows in fp8 share an SM. On an H200 one CTA took
# 0.80 to 1.02 of the time with 1 and 4, and 1.10 at 64 x 8192.
SHARED_FROM = 5
# Fixed cost of a work item, in blocks of 64 tokens: less for tiles of 128 tokens, which splits of 3
# blocks would fill badly, and for fp8_ds_mla, whose blocks take longer.
OVERHEAD, WIDE_OVERHEAD, DS_MLA_OVERHEAD = 4, 3, 2


def kernels(device: torch.device) -> tuple[str, ...]:
    """Those of `KERNELS` for a device."""
    return KERNELS["CDNA" if cdna(device) else "Hopper" if has_hopper(device) else "other"]


def chosen(given: Inputs) -> Any:
    """The kernel module for a decode, by what a captured graph keeps: shapes, strides, types, the
    scale of the scores and whether addresses are multiples of 16 bytes."""
    for name in kernels(given.q.device):
        # Imported where it may be launched: Gluon's modules take a while.
        module = importlib.import_module(f"mla_fusion.attention.{name}")
        if not module.fits(given):
            return module
    raise AssertionError("the last kernel takes all")


def plan_settings(
    num_heads: int,
    max_query_len: int,
    kv_dtype: torch.dtype,
    width: int,
    device: torch.device | str,
) -> dict[str, int]:
    """What to allocate a plan with for a kernel with tiles of 64 tokens: keywords of `allocate`.

    width: of a cache entry, L + R. With 16 query rows at most, two CTAs fit an SM if its shared
    memory holds their tiles, and hide each other's latency: with fp8 and 512 + 64, at batch 64 and
    8192 tokens, that took 97 us, one CTA 136. The blocks of 64 rows of an item run at the same time
    and read tiles of the cache together: with drafts, and in bf16 with 128 heads and one query row,
    whose items hold both blocks for it. So the plan has fewer CTAs.
    """
    settings = {"kv_granularity": for_hopper.TILE, "overhead": OVERHEAD}
    sms, tile = sm_count(device), for_hopper.WARP_SPECIALIZED_ROWS
    rows = head_layout(num_heads, max_query_len).per_work * max_query_len
    specialized = width == sum(for_hopper.WARP_SPECIALIZED_WIDTHS) and has_hopper(device)
    if generation := cdna(device):
        tile, waves = for_cdna.rows_and_waves(generation, rows, kv_dtype, kv_dtype, for_cdna.TILE)
        ctas = waves * sms // -(-rows // tile)
    elif specialized and (kv_dtype == torch.bfloat16 or rows > tile):
        if (num_heads, max_query_len) == (PAIRED_HEADS, 1):
            rows = settings["heads_per_work"] = PAIRED_HEADS
        ctas = sms // -(-rows // tile)
    else:
        # Two tiles of keys, and one of queries.
        tiles = (2 * for_hopper.TILE + 16) * width * kv_dtype.itemsize
        shared = rows <= 16 and 2 * tiles <= for_hopper.SHARED_MEMORY
        ctas = sms * (2 if shared else 1)
        if specialized and shared:
            settings["half_below"] = SHARED_FROM
        if specialized and 16 < rows <= 32 and kv_dtype.itemsize == 1:
            settings["overhead"] = WIDE_OVERHEAD
    return {"ctas": max(1, ctas), **settings}


def sparse_settings(
    num_heads: int, scopes: int, layout: CacheLayout | None, device: torch.device
) -> dict[str, int]:
    """The same of a sparse plan. layout: of its caches' bytes. Up to 16 heads over one scope of
    entries with scales in them: two CTAs share an SM. The two blocks of 128 heads run at the same
    time, and read the entries of their item together.
    """
    settings = {"kv_granularity": for_hopper.TILE, "overhead": OVERHEAD}
    if has_hopper(device) and layout is not None:
        sms = sm_count(device)
        if not layout.behind:
            settings["overhead"] = DS_MLA_OVERHEAD
        few = num_heads <= for_hopper.SPARSE_FP8_ROWS and scopes == 1 and not layout.behind
        settings["ctas"] = 2 * sms if few else sms
        if num_heads == PAIRED_HEADS:
            settings |= {"ctas": sms // 2, "heads_per_work": PAIRED_HEADS}
    return settings
