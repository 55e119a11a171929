"""Cut a model's config to a few small layers with the same attention.

The cut model keeps what decides about fusion: the model class, the latent, rope and head sizes, the
head count of one tensor-parallel rank, the rope scaling, q_lora. Everything else is made small.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError

LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")
_REQUIRED = (
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "hidden_size",
)
_HEAD_KEYS = ("num_attention_heads", "num_key_value_heads")
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "first_k_dense_replace")
_VOCABULARY = 1024
# Key -> the largest value the cut model has.
_LIMITS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "ffn_hidden_size": 512,
    "moe_intermediate_size": 256,
    "expert_ffn_hidden_size": 256,
    "vocab_size": _VOCABULARY,
    "n_routed_experts": 8,
    "num_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "num_nextn_predict_layers": 0,
    # Of a hybrid, only the MLA layers are built: a CPU lacks the kernels of the others.
    "layer_group_size": 1,
}
_ALIGNMENT = 32  # of the hidden size, for vLLM's CPU kernels
# vLLM refuses these without one layer of experts.
_NEED_AN_EXPERT_LAYER = ("glm4_moe_lite", "pangu_ultra_moe", "sarvam_mla")
# They describe weights that are not read and Python files that are not run.
_DROPPED = ("quantization_config", "compression_config", "auto_map")
# Draft head -> the class and the type of a target: vLLM runs it beside one.
_TARGETS = {"DeepSeekMTPModel": ("DeepseekV3ForCausalLM", "deepseek_v3")}


@dataclass(frozen=True)
class Cut:
    """A cut model: its config, its width of a cache entry, and a line on what was changed.

    `draft` is whether it is a draft head: `config` is then that of a target with this head.
    `quantization` is the model's quantization_config, which the cut model does not have.
    """

    config: dict[str, Any]
    head_size: int
    draft: bool
    changed: str
    quantization: Mapping[str, Any]


def cut(
    model: dict[str, Any],
    architecture: str,
    layers: int,
    tensor_parallel_size: int,
    path: Path | str = "the config",
) -> Cut:
    """`model`, which is read from `path`, cut to `layers` layers with the heads of one rank.

    Raises:
        UserError: a key is missing, or the heads do not divide.
    """
    layer_key = next((key for key in LAYER_KEYS if model.get(key) is not None), None)
    missing = [key for key in _REQUIRED if model.get(key) is None]
    missing += [] if layer_key else [LAYER_KEYS[0]]
    if layer_key is None or missing:
        raise UserError(f"{path} has no {', '.join(map(repr, missing))}, which MLA needs")
    all_layers, heads = model[layer_key], model["num_attention_heads"]
    if heads % tensor_parallel_size:
        raise UserError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the model's "
            f"{heads} attention heads"
        )
    draft = architecture in _TARGETS
    layers = 1 if draft else min(layers, all_layers)
    small = {key: value for key, value in model.items() if key not in _DROPPED}
    small[layer_key] = layers
    for key in _HEAD_KEYS:
        if small.get(key) is not None:
            small[key] = max(small[key] // tensor_parallel_size, 1)
    for key, limit in _LIMITS.items():
        if small.get(key) is not None:
            small[key] = min(small[key], limit)
    # Transformers refuses a hidden size that is no multiple of the heads.
    step = math.lcm(small["num_attention_heads"], _ALIGNMENT)
    small["hidden_size"] = -(-small["hidden_size"] // step) * step
    if draft:
        name, small["model_type"] = _TARGETS[architecture]
        small |= {"architectures": [name], "num_nextn_predict_layers": 1}
    needs_experts = small["model_type"] in _NEED_AN_EXPERT_LAYER
    has_experts = any(key in model for key in _EXPERT_KEYS)
    if has_experts:
        # No experts, not even in the draft head: attention does not read them.
        small["first_k_dense_replace"] = layers - 1 if needs_experts else layers + draft
    for key, value in small.items():
        if isinstance(value, list) and len(value) == all_layers:
            small[key] = value[:layers]  # one entry a layer
        if key.endswith("_token_id") and isinstance(value, int) and value >= _VOCABULARY:
            small[key] = 0
    limit = _LIMITS["n_routed_experts"]
    experts = f"at most {limit} experts" if needs_experts or not has_experts else "no experts"
    group = model.get("layer_group_size") or 1
    notes = [
        f"{layers} of {all_layers} layers"
        if group == 1
        else f"{layers} MLA layers, the kind of one in {group} of its {all_layers} layers",
        *(["the draft head beside them"] if draft else []),
        f"{small['num_attention_heads']} heads (one rank of {tensor_parallel_size})",
        f"hidden size {small['hidden_size']}",
        experts,
        "dummy weights in bfloat16",
        *(f"no {key}" for key in _DROPPED if key in model),
    ]
    return Cut(
        config=small,
        head_size=model["kv_lora_rank"] + model["qk_rope_head_dim"],
        draft=draft,
        changed=", ".join(notes),
        quantization=model.get("quantization_config") or {},
    )
