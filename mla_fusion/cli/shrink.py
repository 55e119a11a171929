"""Read a model's config.json and cut it to a few small layers with the same attention.

The cut model keeps what decides about fusion: the model class, the latent, rope and head sizes, the
head count of one tensor-parallel rank, the rope scaling, q_lora. Everything else is made small.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_fusion.cli.arguments import UserError

if TYPE_CHECKING:
    from pathlib import Path

_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")
_HEAD_KEYS = ("num_attention_heads", "num_key_value_heads")
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
}
# vLLM refuses these without one layer of experts.
_NEED_AN_EXPERT_LAYER = ("glm4_moe_lite",)
# They describe weights that are not read and Python files that are not run.
_DROPPED = ("quantization_config", "compression_config", "auto_map")


@dataclass(frozen=True)
class Cut:
    """A model cut to `layers`; `found` and `changed` say what was read and what was changed."""

    config: dict[str, Any]
    layers: int
    head_size: int
    found: str
    changed: str


def read(model: Path) -> tuple[dict[str, Any], str]:
    """(language model's part of a config.json, architecture); `model` is that file or its folder.

    Raises:
        UserError: there is no such file, or it is no JSON object of a model.
    """
    path = model / "config.json" if model.is_dir() else model
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"no config.json at {path}: give the folder of a downloaded Hugging Face model "
            "(its config.json is enough)"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a model's config.json: it holds no JSON object")
    part = content
    if "kv_lora_rank" not in content and isinstance(content.get("text_config"), dict):
        part = {**content["text_config"]}  # a multimodal model: its language part
    if not part.get("model_type"):
        raise UserError(f'{path} is not a model\'s config.json: it has no "model_type"')
    return part, _architecture(part) or _architecture(content) or str(part["model_type"])


def cut(model: dict[str, Any], layers: int, tensor_parallel_size: int) -> Cut:
    """`model` cut to `layers` layers with the heads of one rank.

    Raises:
        UserError: a key is missing, or the heads do not divide.
    """
    layer_key = next((key for key in _LAYER_KEYS if isinstance(model.get(key), int)), None)
    missing = [k for k in ("num_attention_heads", "qk_rope_head_dim") if k not in model]
    missing += [] if layer_key else [_LAYER_KEYS[0]]
    if layer_key is None or missing:
        raise UserError(f"config.json has no {', '.join(map(repr, missing))}, which MLA needs")
    all_layers, heads = model[layer_key], model["num_attention_heads"]
    if heads % tensor_parallel_size:
        raise UserError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the model's "
            f"{heads} attention heads"
        )
    layers = min(layers, all_layers)
    small = {key: value for key, value in model.items() if key not in _DROPPED}
    small[layer_key] = layers
    needs_experts = model.get("model_type") in _NEED_AN_EXPERT_LAYER
    if "n_routed_experts" in model or "first_k_dense_replace" in model:
        # No experts: attention does not read them.
        small["first_k_dense_replace"] = layers - 1 if needs_experts else layers
    for key in _HEAD_KEYS:
        if isinstance(model.get(key), int):
            small[key] = max(model[key] // tensor_parallel_size, 1)
    for key, limit in _LIMITS.items():
        if isinstance(model.get(key), int):
            small[key] = min(model[key], limit)
    for key, value in small.items():
        if isinstance(value, list) and len(value) == all_layers:
            small[key] = value[:layers]  # one entry a layer
        if key.endswith("_token_id") and isinstance(value, int) and value >= _VOCABULARY:
            small[key] = 0
    limit = _LIMITS["n_routed_experts"]
    dense = "first_k_dense_replace" in small and not needs_experts
    experts = "no experts" if dense else f"at most {limit} experts"
    dropped = "".join(f", no {key}" for key in _DROPPED if key in model)
    return Cut(
        config=small,
        layers=layers,
        head_size=model["kv_lora_rank"] + model["qk_rope_head_dim"],
        found=f"{all_layers} layers, {heads} heads",
        changed=(
            f"{layers} layers, {small['num_attention_heads']} heads (one rank of "
            f"{tensor_parallel_size}), hidden size {small.get('hidden_size')}, {experts}, dummy "
            f"weights in bfloat16{dropped}"
        ),
    )


def _architecture(model: dict[str, Any]) -> str:
    named = model.get("architectures") or [""]
    return str(named[0])
