"""Cut a model's config to a few small layers with the same attention.

The cut model keeps what decides about fusion: the model class, the latent, rope and head sizes, the
head count of one tensor-parallel rank, the rope scaling, q_lora. Everything else is made small.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mla_fusion.cli import UserError
from mla_fusion.cli.check.model_config import LAYER_KEYS, Model

_REQUIRED = (
    *("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim"),
    *("qk_nope_head_dim", "v_head_dim", "hidden_size"),
)
_VOCABULARY, _EXPERTS = 1024, 8
# Key -> the largest value the cut model has.
_LIMITS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "ffn_hidden_size"), 512),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 256),
    **dict.fromkeys(("n_routed_experts", "num_experts"), _EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "zero_expert_num"), 2),
    # Of a hybrid, only the MLA layers are built: a CPU lacks the kernels of the others.
    **dict.fromkeys(("n_group", "topk_group", "layer_group_size"), 1),
    **{"vocab_size": _VOCABULARY, "num_nextn_predict_layers": 0},
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
    """A cut model."""

    config: dict[str, Any]
    head_size: int  # width of a cache entry
    draft: bool  # whether it is a draft head: `config` is then that of a target with this head
    changed: str  # a line on what was changed
    quantization: Mapping[str, Any]  # the model's quantization_config, which the cut model lacks


def cut(model: Model, layers: int, tensor_parallel_size: int) -> Cut:
    """`model`, cut to `layers` layers with the heads of one rank; a UserError if a key is missing
    or the heads do not divide."""
    whole = model.config
    layer_key = next((key for key in LAYER_KEYS if whole.get(key) is not None), LAYER_KEYS[0])
    missing = [key for key in (*_REQUIRED, layer_key) if whole.get(key) is None]
    if missing:
        raise UserError(f"{model.path} has no {', '.join(map(repr, missing))}, which MLA needs")
    all_layers, heads = whole[layer_key], whole["num_attention_heads"]
    if heads % tensor_parallel_size:
        raise UserError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the model's "
            f"{heads} attention heads"
        )
    draft = model.architecture in _TARGETS
    layers = 1 if draft else min(layers, all_layers)
    small = {key: value for key, value in whole.items() if key not in _DROPPED}
    small[layer_key] = layers
    for key in ("num_attention_heads", "num_key_value_heads"):
        if small.get(key) is not None:
            small[key] = max(small[key] // tensor_parallel_size, 1)
    for key, limit in _LIMITS.items():
        if small.get(key) is not None:
            small[key] = min(small[key], limit)
    # Transformers refuses a hidden size that is no multiple of the heads.
    step = math.lcm(small["num_attention_heads"], _ALIGNMENT)
    small["hidden_size"] = -(-small["hidden_size"] // step) * step
    if draft:
        name, small["model_type"] = _TARGETS[model.architecture]
        small |= {"architectures": [name], "num_nextn_predict_layers": 1}
    has_experts = whole.keys() & {"n_routed_experts", "num_experts", "first_k_dense_replace"}
    needs_experts = small["model_type"] in _NEED_AN_EXPERT_LAYER
    if has_experts:
        # No experts, not even in the draft head: attention does not read them.
        small["first_k_dense_replace"] = layers - 1 if needs_experts else layers + draft
    no_experts = has_experts and not needs_experts
    for key, value in small.items():
        if isinstance(value, list) and len(value) == all_layers:
            small[key] = value[:layers]  # one entry a layer
        if key.endswith("_token_id") and isinstance(value, int) and value >= _VOCABULARY:
            small[key] = 0
    kept, group = f"{layers} of {all_layers} layers", whole.get("layer_group_size") or 1
    if group != 1:
        kept = f"{layers} MLA layers, the kind of one in {group} of its {all_layers} layers"
    notes = [
        *([kept, "the draft head beside them"] if draft else [kept]),
        f"{small['num_attention_heads']} heads (one rank of {tensor_parallel_size})",
        f"hidden size {small['hidden_size']}",
        "no experts" if no_experts else f"at most {_EXPERTS} experts",
        "dummy weights in bfloat16",
        *(f"no {key}" for key in _DROPPED if key in whole),
    ]
    return Cut(
        config=small,
        head_size=whole["kv_lora_rank"] + whole["qk_rope_head_dim"],
        draft=draft,
        changed=", ".join(notes),
        quantization=whole.get("quantization_config") or {},
    )
