"""What a provider is called with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Inputs(NamedTuple):
    """The arguments of `mla_fusion.kernels.fused_mla_decode_prep`, which describes them.

    derived: an engine's `mla_fusion.runtime.tables`, where a provider keeps what it makes of the
    cosines and sines; without it each call makes them.
    A NamedTuple: every layer of a step makes one, and a frozen dataclass takes four times as long.
    """

    q: torch.Tensor
    w_uk_t: Any  # a tensor; provider `aiter` also takes its PackedWeight
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor | None
    k_scale: torch.Tensor
    q_scale: torch.Tensor
    is_neox: bool
    q_out: torch.Tensor
    q_factor: torch.Tensor | None = None
    context_parallel: bool = False
    derived: dict[Any, Any] | None = None


def padded_batch(
    tokens: int,
    *,
    w_uk_t: Any,
    kv_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    k_scale: torch.Tensor,
    q_scale: torch.Tensor,
    rope_dim: int,
    is_neox: bool,
    q_dtype: torch.dtype,
    factor_dtype: torch.dtype | None = None,
    context_parallel: bool = False,
) -> Inputs:
    """A batch of `tokens` padded rows for one layer: it writes nothing into the layer's cache.

    rope_dim is R, q_dtype the type of q_out, factor_dtype that of q_factor, if the layer has one,
    context_parallel as in `Inputs`; the activations are dense zeros.
    """
    heads, nope, latent = w_uk_t.shape
    act: dict[str, Any] = {"dtype": w_uk_t.dtype, "device": w_uk_t.device}
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=w_uk_t.device)
    factor = None if factor_dtype is None else slots.new_ones(tokens, dtype=factor_dtype)
    return Inputs(
        q=torch.zeros((tokens, heads, nope + rope_dim), **act),
        w_uk_t=w_uk_t,
        kv_c=torch.zeros((tokens, latent), **act),
        k_pe=torch.zeros((tokens, rope_dim), **act),
        kv_cache=kv_cache,
        slot_mapping=slots,
        positions=torch.zeros_like(slots),
        cos_sin_cache=cos_sin_cache,
        k_scale=k_scale,
        q_scale=q_scale,
        is_neox=is_neox,
        q_out=torch.empty((tokens, heads, latent + rope_dim), dtype=q_dtype, device=w_uk_t.device),
        q_factor=factor,
        context_parallel=context_parallel,
    )
