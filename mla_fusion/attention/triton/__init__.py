"""The Triton provider: a persistent decode kernel, as `choice.py` says, and a reduction.

All execute the same plan. Nothing is allocated here and nothing waits for the device.
"""

from typing import Any

import torch

from mla_fusion.attention.hopper.fits import product_rows
from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.attention.triton import epilogue as triton_epilogue
from mla_fusion.attention.triton.choice import chosen
from mla_fusion.attention.triton.choice import plan_settings as plan_settings
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.triton import refuse_fp8 as refuse_fp8
from mla_fusion.kernels.triton import require as require

WIDE_DTYPES = (torch.bfloat16, torch.float16)
# The widest that were compiled, in multiples of 16, the least depth of a matrix instruction.
MOST_LATENTS, MOST_ROTATED = 1024, 128


def unsupported(q_dtype: torch.dtype, kv_dtype: torch.dtype, latent: int, rope: int) -> str:
    """Why this provider does not decode such queries over such a cache; empty if it does. Both are
    multiplied in one 16-bit type, on the way to which other pairs would be rounded or overflow.
    """
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
    """The decode and what follows it; arguments are checked."""
    decode(given)
    if (shape := triton_epilogue.chosen(given)) is not None:
        triton_epilogue.launch(given, shape)
    else:
        merge(given)
        if given.epilogue is not None:
            triton_epilogue.multiply(given)
    given.plan.fresh = False


def decode(given: Inputs) -> None:
    """The launch of the decode kernel: splits, and the latents of sequences without any."""
    module = chosen(given)
    grid, args, options = module.arguments(given)
    module.kernel[grid](*args, **options)


def merge(given: Inputs) -> None:
    """The launch of the reduction: the latents of sequences with several splits."""
    # Imported when launched: a kernel needs Triton.
    from mla_fusion.attention.triton import reduce_kernel

    grid, args, options = reduce_kernel.arguments(given)
    reduce_kernel.kernel[grid](*args, **options)


def warm_up_batches(plan: PlanBuffers, values: int | None, quantization: str) -> list[int]:
    """Numbers of sequences that compile, together, all that steps of `plan` launch, with an
    epilogue of `values` columns a head and this quantization if there is one."""
    batches: dict[Any, int] = {}
    from mla_fusion.attention.triton.reduce_kernel import reduction

    settings = plan.settings
    layer = settings.num_heads, settings.v_head_dim
    of_work = plan.layout.per_work * settings.max_query_len
    for batch in range(1, settings.max_batch + 1):
        merged = reduction(batch * plan.layout.fold, of_work), batch < plan.rules.half_below
        if values is None:
            batches.setdefault(merged, batch)
            continue
        for rows in range(1, settings.max_query_len + 1):
            tokens = batch * rows
            shape = triton_epilogue.choose(tokens, *layer, values, quantization)
            separate = merged[0], product_rows(tokens)
            batches.setdefault((rows, shape or separate, merged[1]), batch)
    return sorted(set(batches.values()))
