"""The Triton provider: which decode kernel it launches, and what follows; nothing is waited for."""

from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.attention import cards
from mla_fusion.attention.card import Card, Decodes
from mla_fusion.attention.plan.buffers import PlanBuffers
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.triton import refuse_fp8 as refuse_fp8
from mla_fusion.kernels.triton import require as require

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


def check_types(q: torch.Tensor, kv_cache: torch.Tensor, latent: int) -> None:
    """Raise ValueError for types and widths that this provider does not support."""
    rope = kv_cache.shape[2] - latent
    if why := unsupported(q.dtype, kv_cache.dtype, latent, rope):
        raise ValueError(f"provider 'triton': {why}; convert, or use provider 'reference'")
    refuse_fp8(q.device, q=q.dtype, kv_cache=kv_cache.dtype)


def persistent_mla_decode(given: Inputs) -> None:
    """See `mla_fusion.attention.persistent_mla_decode`."""
    check_types(given.q, given.kv_cache, given.plan.settings.v_head_dim)
    if (
        given.epilogue is not None
        and given.plan.settings.batch_invariant
        and not product_card(given)
    ):
        raise ValueError(
            "provider 'triton': no kernel for this GPU, or for these strides, multiplies with W_UV "
            "in an order that the batch does not change; leave out the epilogue of this plan"
        )
    launch(given)


def launch(given: Inputs) -> None:
    """The decode of checked arguments and what follows it."""
    decode(given)
    follow(given)
    given.plan.fresh = False


def follow(given: Inputs) -> None:
    """The launches behind a decode: the reduction, unless the product merges the splits too, and
    an epilogue."""
    card = product_card(given)
    if not is_whole(given) and (card is None or not card.merges(given)):
        merge(given)
    if given.epilogue is not None:
        multiply(given)


def is_whole(given: Inputs) -> bool:
    """Whether no sequence can have splits: one scope, of one block of the plan."""
    one = given.sparse is not None and given.sparse.first == 0
    return one and given.block_table.shape[1] <= given.plan.settings.kv_granularity


def decode(given: Inputs) -> None:
    """The launch of the decode kernel: splits, and the latents of sequences without any."""
    cards.chosen(gpu.of(given.q.device), given).module.launch_of(given).start(given.kept)


def merge(given: Inputs) -> None:
    """The launch of the reduction: the latents of sequences with several splits."""
    # Imported when launched: a kernel needs Triton.
    from mla_fusion.attention.triton import reduce_kernel

    reduce_kernel.launch_of(given).start(given.kept)


def product_card(given: Inputs) -> Card | None:
    """The card of the product with W_UV; None without one, and where `torch.bmm` computes it."""
    if given.epilogue is None:
        return None
    here = gpu.of(given.out.device)
    return next((card for card in cards.PRODUCTS if card.takes(here, given)), None)


def multiply(given: Inputs) -> None:
    """The product of the merged latents in `out` with W_UV, and a quantization: one launch where a
    card takes it, else `torch.bmm`, as in vLLM, and a kernel that quantizes."""
    epilogue, latents = given.epilogue, given.out
    assert epilogue is not None
    if card := product_card(given):
        return card.module.launch_of(given).start(given.kept)
    if given.kept is not None:
        given.kept.clear()  # torch's launch is not among them
    (heads, _, values), product = epilogue.w_uv.shape, epilogue.out
    if epilogue.scale is not None:
        # torch.bmm cannot write fp8. Under capture this comes from the graph's own pool.
        product = latents.new_empty((len(latents), heads * values))
    target = product.view(-1, heads, values).transpose(0, 1)
    torch.bmm(latents.transpose(0, 1), epilogue.w_uv, out=target)
    if epilogue.scale is not None:
        from mla_fusion.attention.triton import quantize_kernel

        quantize_kernel.launch_of(product, epilogue).start()


def warm_up_batches(plan: PlanBuffers, values: int | None) -> list[int]:
    """Numbers of sequences, as `attention.get_provider` has them."""
    from mla_fusion.attention.triton.reduce_kernel import reduction

    batches: dict[Any, int] = {}
    settings, layout = plan.settings, plan.layout
    for batch in range(1, settings.max_batch + 1):
        rows = layout.per_work * settings.max_query_len
        merged = reduction(batch * layout.fold, rows, settings.batch_invariant)
        batches.setdefault(merged, batch)
        for length in range(1, settings.max_query_len + 1) if values else ():
            tiles = batch * layout.fold
            product = tiles, batch * length, settings.num_heads, values or 0
            variants = (card.variant(*product) for card in cards.PRODUCTS)
            batches.setdefault((length, *variants), batch)
    return sorted(set(batches.values()))


def plan_settings(
    num_heads: int, max_query_len: int, kv_dtype: torch.dtype, width: int,
    device: torch.device | str,
) -> dict[str, int]:  # fmt: skip
    """Keyword arguments of `allocate` for the kernel that runs such decodes."""
    decodes = Decodes(num_heads, max_query_len, kv_dtype, width)
    return cards.settings(gpu.of(device), decodes)
