"""The torch custom ops that the passes put into a graph: schema, fake and dispatch.

This file imports torch alone, so that patterns and passes can be read and tested without vLLM.
The bodies live in `mla_fusion.runtime` and are imported when an op first runs.

    rope_mla_kv_cache_update                        RoPE of q and k_pe in place, then the KV-cache
                                                    write: the one canonical spelling
    mla_decode_q_prep                               absorb, concatenate and quantize a rotated query
    fused_aiter_qk_rope_kvcache_q_concat_quant_mla  both in one: what a decode graph runs
    mla_attention_with_prepared_query               vLLM's MLA attention with that query

The last two are what runs. They write into buffers of the graph and return nothing: under
piecewise CUDA graphs they run between captured pieces, which read fixed addresses, and Inductor
hands a returned tensor on through such a piece.

An op that takes `layer_name` finds the layer, its KV cache and the batch's metadata in vLLM's
forward context. vLLM passes the name as an opaque object on some torch versions and as a string
on others, so the type of that argument is chosen at registration.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

NAMESPACE = "mla_fusion"
ROPE_UPDATE = "rope_mla_kv_cache_update"
Q_PREP = "mla_decode_q_prep"
FUSED = "fused_aiter_qk_rope_kvcache_q_concat_quant_mla"
ATTENTION = "mla_attention_with_prepared_query"


class Rope(StrEnum):
    """How the unfused graph rotates: a batch that is not decode-only is rotated the same way.

    The cosines and sines are rounded to the activation type in `NATIVE`; every other spelling
    uses the table as it is stored.
    """

    NONE = "none"
    NATIVE = "native"
    NATIVE_FP32 = "native_fp32"
    VLLM_C = "_C.rotary_embedding"
    FLASHINFER = "vllm.flashinfer_rotary_embedding"
    AITER_TRITON = "vllm.rocm_aiter_triton_rotary_embedding"
    CAT_FUSED = "vllm.fused_rope_unified_mla_kv_cache_update"


# What a splitting op of vLLM's attention is, these must be too: they read the batch's metadata.
RUNTIME_OPS = (f"{NAMESPACE}::{FUSED}", f"{NAMESPACE}::{ATTENTION}")

_SCHEMAS = {
    ROPE_UPDATE: (
        "(Tensor(a!) q, Tensor kv_c, Tensor(b!) k_pe, Tensor? positions, Tensor? cos_sin_cache, "
        "Tensor k_scale, {layer_name} layer_name, str kv_cache_dtype, str rope, bool is_neox"
        ") -> Tensor"
    ),
    Q_PREP: (
        "(Tensor q, {layer_name} layer_name, int kv_lora_rank, int qk_rope_head_dim, "
        "ScalarType query_dtype) -> Tensor"
    ),
    FUSED: (
        "(Tensor(a!) q, Tensor kv_c, Tensor(b!) k_pe, Tensor(c!) prepared_q, Tensor? positions, "
        "Tensor? cos_sin_cache, Tensor k_scale, {layer_name} layer_name, str kv_cache_dtype, "
        "str rope, bool is_neox, str provider) -> ()"
    ),
    ATTENTION: (
        "(Tensor q, Tensor prepared_q, Tensor kv_c, Tensor k_pe, Tensor(a!) output, "
        "{layer_name} layer_name, Tensor? kv_cache_dummy_dep=None) -> ()"
    ),
}

_library: torch.library.Library | None = None
_registered_type: str | None = None


def register(layer_name_type: str) -> None:
    """Define the ops; `layer_name_type` is "str" or the name of an opaque class of torch.

    Calling it again with the same type does nothing.

    Raises:
        RuntimeError: the ops exist with the other type.
    """
    global _library, _registered_type
    if _registered_type == layer_name_type:
        return
    if _registered_type is not None:
        raise RuntimeError(
            f"the mla_fusion ops take layer_name as {_registered_type}, and a torch op cannot be "
            f"redefined as {layer_name_type}: use one vLLM configuration per process"
        )
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in _SCHEMAS.items():
        # flexible_layout: these ops take any strides, so Inductor inserts no copies for them.
        library.define(
            name + schema.format(layer_name=layer_name_type), tags=(torch.Tag.flexible_layout,)
        )
        body, fake = _BODIES[name], _FAKES[name]
        for key in ("CPU", "CUDA"):
            library.impl(name, body, key)
        library._register_fake(name, fake)
    _library, _registered_type = library, layer_name_type


def get(name: str) -> torch._ops.OpOverload:
    """The registered overload of one of the op names above."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# torch hands the arguments over by position, in the order of the schema.


def _rope_update(*args: Any) -> torch.Tensor:
    from mla_fusion import runtime

    runtime.rope_and_cache_update(*args)
    return _rope_update_fake(*args)


def _rope_update_fake(q: torch.Tensor, kv_c: torch.Tensor, *rest: Any) -> torch.Tensor:
    return kv_c.new_empty(0)


def _q_prep(*args: Any) -> torch.Tensor:
    from mla_fusion import runtime

    return runtime.decode_q_prep(args[0], args[1], _q_prep_fake(*args))


def _q_prep_fake(
    q: torch.Tensor,
    layer_name: Any,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    query_dtype: torch.dtype,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:2], kv_lora_rank + qk_rope_head_dim), dtype=query_dtype)


def _fused(*args: Any) -> None:
    from mla_fusion import runtime

    runtime.fused_decode_prep(*args)


def _no_output(*args: Any) -> None:
    return None


def _attention(*args: Any) -> None:
    from mla_fusion import runtime

    # The last one only orders; vLLM's KV-transfer hook finds layer_name by its position.
    runtime.attention()(*args[:6])


_BODIES = {ROPE_UPDATE: _rope_update, Q_PREP: _q_prep, FUSED: _fused, ATTENTION: _attention}
_FAKES = {
    ROPE_UPDATE: _rope_update_fake,
    Q_PREP: _q_prep_fake,
    FUSED: _no_output,
    ATTENTION: _no_output,
}
