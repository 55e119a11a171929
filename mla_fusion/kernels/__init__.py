"""The fused region of one MLA layer as a function, and the choice of who computes it.

This package knows torch and Triton, not vLLM: a kernel engineer can use it alone.
"""

import functools
import importlib
from collections.abc import Collection
from typing import Any

import torch

from mla_fusion.kernels.card import PROVIDERS as PROVIDERS
from mla_fusion.kernels.inputs import Inputs, check, validate


class ProviderUnavailable(RuntimeError):
    """The chosen provider cannot run here; the message says what to do."""


@functools.cache
def get_provider(name: str) -> Any:
    """The module that implements provider `name`, as `card.Card` describes it, after its
    `require()` found all it needs. Nothing falls back: who asked for a kernel gets that kernel or
    an error."""
    return load(__name__, PROVIDERS, name)


def why_unavailable(name: str) -> str:
    """Why provider `name` cannot run here; empty if it can."""
    try:
        get_provider(name)
    except ProviderUnavailable as error:
        return str(error)
    return ""


def load(package: str, providers: Collection[str], name: str) -> Any:
    """The module `name`, one of `providers` in a package, after its `require()`."""
    if name not in providers:
        raise ValueError(f"unknown provider {name!r}: choose one of {', '.join(providers)}")
    # Imported when chosen: each needs packages that the others do without.
    module = importlib.import_module(f"{package}.{name}")
    module.require()
    return module


def fused_mla_decode_prep(
    q: torch.Tensor, w_uk_t: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor,
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None, k_scale: torch.Tensor, q_scale: torch.Tensor,
    *, is_neox: bool, q_out: torch.Tensor, q_factor: torch.Tensor | None = None,
    context_parallel: bool = False, kv_norm_weight: torch.Tensor | None = None,
    kv_norm_epsilon: float = 0.0, batch_invariant: bool = False, provider: str,
) -> torch.Tensor:  # fmt: skip
    """Rotate, absorb, concatenate, quantize the query and write the latent KV cache.

    For every token t and head h, with P = qk_nope_head_dim, R = qk_rope_head_dim,
    L = kv_lora_rank, f = q_factor[t], or 1, and norm the RMSNorm with kv_norm_weight, if given:

        q_out[t, h]          = cast_q(f * q[t, h, :P] @ w_uk_t[h]  |
                                      f * rope(q[t, h, P:], positions[t]))
        kv_cache[slot_of(t)] = cast_k(norm(kv_c[t])  |  rope(k_pe[t], positions[t]))

    Only q_out and kv_cache are written. All tensors are on one device.

    Arguments:
        q: [T, H, P + R], activation type (bf16, fp16 or fp32); token and head strides are free,
            the last dimension is dense.
        w_uk_t: [H, P, L], activation type: W_UK of the layer, transposed as vLLM keeps it.
        kv_c: [T, L], activation type, normalized unless kv_norm_weight is given; rows may be
            strided.
        k_pe: [T, R], activation type; rows may be strided.
        kv_cache: [blocks, block_size, L + R], activation type, or fp8 (torch.uint8 is viewed as
            the fp8 type of the platform by the caller), dense in the last dimension. Blocks and
            entries may be strided.
        slot_mapping: [T], int64. A row with slot < 0 is padding: it writes no cache, and its
            query row is zero.
        positions: [T], int64. Positions of padded rows are never used as an index.
        cos_sin_cache: [max_position, R], the cosines then the sines of R / 2 angles, activation
            type or fp32; None for a model without RoPE in the attention.
        k_scale: one fp32 element on the device of q, the dequantization scale of the cache:
            stored = value / scale. Read only where the target is fp8.
        q_scale: that of the query.
        is_neox: pairs are (i, i + R / 2) if True (NeoX), (2 i, 2 i + 1) if False (GPT-J).
        q_out: [T, H, L + R], dense, activation type or fp8; written in full and returned.
        q_factor: [T], dense, activation type or fp32, as of `llama_4_scaling`.
        context_parallel: no row is padding. Under decode context parallelism a token that another
            rank keeps has slot -1 too: it writes no cache here, and its query is needed.
        kv_norm_weight: [L], dense, activation type: of the RMSNorm of kv_c. Provider `aiter` takes
            none.
        kv_norm_epsilon: what that norm adds to the mean of the squares, 0 to 1.
        batch_invariant: the bits of a row depend on its own arguments alone: the same tiles for any
            number of tokens. `triton` alone offers it.
        provider: one of `PROVIDERS`.

    Numerics: the product accumulates in fp32 and is rounded to the activation type; RoPE is in fp32
    from the stored cosines and sines; fp8 targets multiply by 1 / scale in fp32, clamp to the
    largest finite value (NaN stays NaN) and round to nearest even; every other target is rounded to
    nearest even once. With a factor the rotated part is first rounded to the activation type; then
    each part is multiplied in fp32 and rounded to it, before the product and before fp8. The norm
    is in fp32, and rounded to the activation type once.

    Raises ProviderUnavailable where the provider cannot run, ValueError for an argument that is not
    as above."""
    check("provider", isinstance(provider, str), "a string, such as 'triton'", provider)
    module = get_provider(provider)
    inputs = Inputs(
        q, w_uk_t, kv_c, k_pe, kv_cache, slot_mapping, positions, cos_sin_cache, k_scale, q_scale,
        is_neox, q_out, q_factor, context_parallel, kv_norm_weight=kv_norm_weight,
        kv_norm_epsilon=kv_norm_epsilon, batch_invariant=batch_invariant,
    )  # fmt: skip
    validate(inputs)
    offered = PROVIDERS[provider].batch_invariant
    want = f"False with provider {provider!r}, and may be True with 'triton'"
    check("batch_invariant", offered or not batch_invariant, want, batch_invariant)
    return module.fused_mla_decode_prep(inputs)
