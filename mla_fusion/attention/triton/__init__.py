"""The Triton provider: a persistent decode kernel, as `choice.py` says, a reduction, and the
product with W_UV where there is an epilogue.

All execute the same plan. Nothing waits for the device.
"""

from typing import Any

import torch

from mla_fusion.attention.hopper import fits as for_hopper
from mla_fusion.attention.hopper.fits import PRODUCT_SIZE, product_rows, product_size
from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.attention.plan.device import has_hopper
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.inputs import Inputs
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
    merge(given)
    if given.epilogue is not None:
        multiply(given)
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


def multiply(given: Inputs) -> None:
    """The product of the merged latents in `out` with W_UV, and a quantization: one launch on
    Hopper where it is not slower, else `torch.bmm`, as in vLLM, and a kernel that quantizes."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    if has_hopper(latents.device) and not for_hopper.product(given):
        from mla_fusion.attention.hopper import product as hopper_product

        grid, args, options = hopper_product.arguments(given)
        hopper_product.kernel[grid](*args, **options)
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

    grid, args, options = quantize_kernel.arguments(product, epilogue)
    quantize_kernel.kernel[grid](*args, **options)


def warm_up_batches(plan: PlanBuffers, values: int | None) -> list[int]:
    """Numbers of sequences that compile, together, all that steps of `plan` launch, with an
    epilogue of `values` columns a head if there is one."""
    batches: dict[Any, int] = {}
    from mla_fusion.attention.triton.reduce_kernel import reduction

    settings = plan.settings
    of_work = plan.layout.per_work * settings.max_query_len
    for batch in range(1, settings.max_batch + 1):
        merged = reduction(batch * plan.layout.fold, of_work), batch < plan.rules.half_below
        batches.setdefault(merged, batch)
        for length in range(1, settings.max_query_len + 1) if values else ():
            tokens = batch * length
            size = product_size(tokens, settings.num_heads, values or 0) / PRODUCT_SIZE
            batches.setdefault((length, product_rows(tokens), size > 1, size > 2), batch)
    return sorted(set(batches.values()))
