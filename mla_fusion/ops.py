"""The torch custom ops that the passes put into a graph: their schemas and fakes.

`mla_fusion.runtime` has their bodies; patterns and passes do without vLLM.

    rope_mla_kv_cache_update                        RoPE of q and k_pe in place, the query's factor,
                                                    the KV-cache write: the one canonical spelling
    mla_decode_q_prep                               absorb, concatenate and quantize a rotated query
    fused_aiter_qk_rope_kvcache_q_concat_quant_mla  both in one: what a decode graph runs
    mla_attention_with_prepared_query               vLLM's MLA attention with that query
    mla_attention_with_group_quantized_output       the same, its output in fp8 for o_proj, with a
    mla_attention_with_tensor_quantized_output      scale for a token and group, or one given
    projection                                      products of up to 16 tokens
    rms_norm                                        one or two norms beside our launches
    qkv_a                                           vLLM's op of this product, launched early
    end_of_piece                                    marks where a graph is cut; never runs

The fused op and the three behind it write into buffers of the graph and return nothing: under
piecewise CUDA graphs they run between captured pieces, which read fixed addresses. `projection`,
`rms_norm` and `qkv_a` read no metadata and are captured like a linear layer, so they return their
results.

By `layer_name`, a string or, on some torch versions, an opaque object, an op finds the layer, its
KV cache and the batch's metadata in vLLM's forward context.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

NAMESPACE = "mla_fusion"
ROPE_UPDATE = "rope_mla_kv_cache_update"
Q_PREP = "mla_decode_q_prep"
FUSED = "fused_aiter_qk_rope_kvcache_q_concat_quant_mla"
ATTENTION = "mla_attention_with_prepared_query"
GROUP_ATTENTION = "mla_attention_with_group_quantized_output"
TENSOR_ATTENTION = "mla_attention_with_tensor_quantized_output"
PROJECTION = "projection"
NORM = "rms_norm"
QKV_A = "qkv_a"
CUT = "end_of_piece"


class Rope(StrEnum):
    """The rotation of the unfused graph, which a batch that is not decode-only runs too.
    `NATIVE` rounds the cosines and sines to the activation type; others use them as stored."""

    NONE = "none"
    NATIVE = "native"
    NATIVE_FP32 = "native_fp32"
    VLLM_C = "_C.rotary_embedding"
    FLASHINFER = "vllm.flashinfer_rotary_embedding"
    AITER_TRITON = "vllm.rocm_aiter_triton_rotary_embedding"
    CAT_FUSED = "vllm.fused_rope_unified_mla_kv_cache_update"


class Quantization(StrEnum):
    """The quantization of the attention's output in the unfused graph, which a batch that is not
    decode-only runs too: an op of vLLM, that op with a true argument, or the aten ops of vLLM's
    `QuantFP8`."""

    GROUP = "_C.per_token_group_fp8_quant"
    GROUP_UE8M0 = "_C.per_token_group_fp8_quant, scale_ue8m0"
    TENSOR = "_C.static_scaled_fp8_quant"
    TENSOR_NATIVE = "native"

    @property
    def kind(self) -> str:
        """`Epilogue.quantization` of mla_fusion.attention for this spelling."""
        return {"GROUP": "group", "GROUP_UE8M0": "group_ue8m0"}.get(self.name, "tensor")


@dataclass(frozen=True)
class Variant:
    """The properties of a fused op that its kernel is compiled for, before it is needed.
    Types are names in torch; those of cosines and of query factors are empty where none are, and
    epsilon is that of the norm of kv_c, if the op has it."""

    is_neox: bool
    rope_dim: int
    table_dtype: str
    query_dtype: str
    kv_cache_dtype: str
    factor_dtype: str = ""
    kv_norm_epsilon: float | None = None


@dataclass(frozen=True)
class Product:
    """The widths of a call of the op `projection`: of its input, and of its results. bits: of an
    element of the weights, which are fp32 (as the results), of the input's type, or block fp8."""

    k: int
    sizes: tuple[int, ...]
    bits: int = 16

    def __str__(self) -> str:
        kind = {32: " in fp32", 8: " in block fp8"}.get(self.bits, "")
        return f"{self.k} -> {' + '.join(map(str, self.sizes))}{kind}"


@dataclass(frozen=True)
class Norm:
    """The widths of a call of the op `rms_norm`, and the sum that it normalizes first: its terms,
    whether one of them is fp32, and whether the sum is kept in fp32."""

    sizes: tuple[int, ...]
    terms: int = 1
    one: bool = False
    kept: bool = False

    def __str__(self) -> str:
        said = " + ".join(map(str, self.sizes)) + f" of {self.terms} terms" * (self.terms > 1)
        return said + ", one in fp32" * self.one + ", kept in fp32" * self.kept


# What a splitting op of vLLM's attention is, these must be too: they read the batch's metadata.
ATTENTION_OPS = (ATTENTION, GROUP_ATTENTION, TENSOR_ATTENTION)
RUNTIME_OPS = tuple(f"{NAMESPACE}::{name}" for name in (FUSED, *ATTENTION_OPS))

_ATTENTION_ARGUMENTS = (
    "Tensor q, Tensor prepared_q, Tensor kv_c, Tensor k_pe, Tensor(a!) output, "
    "{layer_name} layer_name"
)
_UPDATE_ARGUMENTS = (
    "Tensor? positions, Tensor? cos_sin_cache, Tensor? q_factor, Tensor k_scale, "
    "{layer_name} layer_name, str kv_cache_dtype, str rope, bool is_neox"
)
_NORM_ARGUMENTS = "Tensor? kv_norm_weight=None, float kv_norm_epsilon=0.0"
_SCHEMAS = {
    ROPE_UPDATE: f"(Tensor(a!) q, Tensor kv_c, Tensor(b!) k_pe, {_UPDATE_ARGUMENTS}) -> Tensor",
    Q_PREP: (
        "(Tensor q, {layer_name} layer_name, int kv_lora_rank, int qk_rope_head_dim, "
        "ScalarType query_dtype) -> Tensor"
    ),
    FUSED: (
        "(Tensor(a!) q, Tensor kv_c, Tensor(b!) k_pe, Tensor(c!) prepared_q, "
        f"{_UPDATE_ARGUMENTS}, str provider, {_NORM_ARGUMENTS}) -> ()"
    ),
    ATTENTION: (
        f"({_ATTENTION_ARGUMENTS}, Tensor? kv_cache_dummy_dep=None, {_NORM_ARGUMENTS}) -> ()"
    ),
    GROUP_ATTENTION: (
        f"({_ATTENTION_ARGUMENTS}, Tensor(b!) quantized, Tensor(c!) scales, str quantization, "
        f"{_NORM_ARGUMENTS}) -> ()"
    ),
    TENSOR_ATTENTION: (
        f"({_ATTENTION_ARGUMENTS}, Tensor(b!) quantized, Tensor scale, str quantization, "
        f"{_NORM_ARGUMENTS}) -> ()"
    ),
    PROJECTION: (
        "(Tensor x, Tensor[] weights, Tensor? block_scales=None, bool e8m0=False) -> Tensor[]"
    ),
    NORM: (
        "(Tensor[] xs, Tensor[] added, Tensor[] norm_weights, float[] epsilons, "
        "float factor=1.0, bool wide=False) -> Tensor[]"
    ),
    QKV_A: "(Tensor x, Tensor weight) -> Tensor",
    CUT: "() -> ()",
}

_registered: tuple[str, torch.library.Library] | None = None  # kept: its ops go with a library


def register(layer_name_type: str, bodies: Mapping[str, Callable[..., Any]]) -> None:
    """Define the ops, once: RuntimeError if they exist with the other type of `layer_name`.

    layer_name_type: "str", or the name of an opaque class of torch.
    bodies: by op name; torch passes the arguments by position, in the order of the schema."""
    global _registered
    if _registered is not None:
        if _registered[0] == layer_name_type:
            return
        raise RuntimeError(
            f"the mla_fusion ops take layer_name as {_registered[0]}, and a torch op cannot be "
            f"redefined as {layer_name_type}: use one vLLM configuration per process"
        )
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in _SCHEMAS.items():
        # flexible_layout: these ops take any strides, so Inductor inserts no copies for them.
        schema = schema.format(layer_name=layer_name_type)
        library.define(name + schema, tags=(torch.Tag.flexible_layout,))
        for key in ("CPU", "CUDA") if name in bodies else ():
            library.impl(name, bodies[name], key)
        library._register_fake(name, _FAKES[name])
    _registered = layer_name_type, library


def get(name: str) -> torch._ops.OpOverload:
    """The registered overload of one of the op names above."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_FAKES: dict[str, Callable[..., Any]] = {
    ROPE_UPDATE: lambda q, kv_c, *_: kv_c.new_empty(0),
    Q_PREP: lambda q, _, latent, rope, kind: q.new_empty((*q.shape[:2], latent + rope), dtype=kind),
    PROJECTION: lambda x, weights, block_scales=None, e8m0=False: [
        (w if block_scales is None else x).new_empty((x.shape[0], w.shape[0])) for w in weights
    ],
    NORM: lambda xs, added, weights, epsilons, factor=1.0, wide=False: [
        *(x.new_empty(x.shape) for x in xs),
        *(xs[0].new_empty(x.shape, dtype=torch.float32 if wide else None) for x in added[:1]),
    ],
    QKV_A: lambda x, weight: x.new_empty((x.shape[0], weight.shape[0])),
    **dict.fromkeys((FUSED, *ATTENTION_OPS, CUT), lambda *_: None),
}
