"""The torch custom ops that the passes put into a graph: schema, fake and dispatch.

This file imports torch alone, so that patterns and passes can be read and tested without vLLM.
The bodies live in `mla_fusion.runtime` and are imported when an op first runs.

    rope_mla_kv_cache_update                        RoPE of q and k_pe in place, then the KV-cache
                                                    write: the one canonical spelling
    mla_decode_q_prep                               absorb, concatenate and quantize a rotated query
    fused_aiter_qk_rope_kvcache_q_concat_quant_mla  both in one: what a decode graph runs
    mla_attention_with_prepared_query               vLLM's MLA attention, query prepared by the above

An op that takes `layer_name` finds the layer, its KV cache and the batch's metadata in vLLM's
forward context. vLLM passes the name as an opaque object on some torch versions and as a string
on others, so the type of that argument is chosen at registration.
"""

from __future__ import annotations

from enum import StrEnum

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
        "(Tensor(a!) q, Tensor kv_c, Tensor(b!) k_pe, Tensor? positions, Tensor? cos_sin_cache, "
        "Tensor k_scale, {layer_name} layer_name, str kv_cache_dtype, str rope, bool is_neox, "
        "ScalarType query_dtype, str provider) -> Tensor"
    ),
    ATTENTION: (
        "(Tensor q, Tensor prepared_q, Tensor kv_c, Tensor k_pe, Tensor(a!) output, "
        "{layer_name} layer_name, Tensor? kv_cache_dummy_dep=None) -> ()"
    ),
}

_library: torch.library.Library | None = None
_registered_type: str | None = None


def register(layer_name_type: str) -> None:
    """Define the ops; `layer_name_type` is "str" or "PyObject" (an opaque type of torch).

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


def _rope_update(
    q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope, is_neox
):  # type: ignore[no-untyped-def]
    from mla_fusion import runtime

    runtime.rope_and_cache_update(
        q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope, is_neox
    )
    return kv_c.new_empty(0)


def _rope_update_fake(
    q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope, is_neox
):  # type: ignore[no-untyped-def]
    return kv_c.new_empty(0)


def _q_prep(q, layer_name, kv_lora_rank, qk_rope_head_dim, query_dtype):  # type: ignore[no-untyped-def]
    from mla_fusion import runtime

    out = _q_prep_fake(q, layer_name, kv_lora_rank, qk_rope_head_dim, query_dtype)
    return runtime.decode_q_prep(q, layer_name, out)


def _q_prep_fake(q, layer_name, kv_lora_rank, qk_rope_head_dim, query_dtype):  # type: ignore[no-untyped-def]
    return q.new_empty((q.shape[0], q.shape[1], kv_lora_rank + qk_rope_head_dim), dtype=query_dtype)


def _fused(
    q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope, is_neox,
    query_dtype, provider,
):  # type: ignore[no-untyped-def]  # fmt: skip
    from mla_fusion import runtime

    out = _fused_fake(
        q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope,
        is_neox, query_dtype, provider,
    )  # fmt: skip
    return runtime.fused_decode_prep(
        q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope,
        is_neox, provider, out,
    )  # fmt: skip


def _fused_fake(
    q, kv_c, k_pe, positions, cos_sin_cache, k_scale, layer_name, kv_cache_dtype, rope, is_neox,
    query_dtype, provider,
):  # type: ignore[no-untyped-def]  # fmt: skip
    width = kv_c.shape[-1] + k_pe.shape[-1]
    return q.new_empty((q.shape[0], q.shape[1], width), dtype=query_dtype)


def _attention(q, prepared_q, kv_c, k_pe, output, layer_name, kv_cache_dummy_dep=None):  # type: ignore[no-untyped-def]
    from mla_fusion import runtime

    # Positional: vLLM's KV-transfer hook finds layer_name by its place among the arguments.
    runtime.attention()(q, prepared_q, kv_c, k_pe, output, layer_name)


def _attention_fake(q, prepared_q, kv_c, k_pe, output, layer_name, kv_cache_dummy_dep=None):  # type: ignore[no-untyped-def]
    return None


_BODIES = {ROPE_UPDATE: _rope_update, Q_PREP: _q_prep, FUSED: _fused, ATTENTION: _attention}
_FAKES = {
    ROPE_UPDATE: _rope_update_fake,
    Q_PREP: _q_prep_fake,
    FUSED: _fused_fake,
    ATTENTION: _attention_fake,
}
