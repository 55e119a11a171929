"""Read a model's config.json, or Mistral's params.json, and refuse values that no model has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_fusion.cli.arguments import UserError, require, short
from mla_fusion.report.files import read_bounded

if TYPE_CHECKING:
    from pathlib import Path

LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")
# Keys, and the smallest and the largest whole number that they may hold; null counts as absent.
_RANGES = (
    # `mla-fusion check` builds the attention with its own sizes: these bound its memory.
    ("kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim", 1, 8192),
    ("num_attention_heads num_key_value_heads", 1, 1024),
    (f"{' '.join(LAYER_KEYS)} hidden_size intermediate_size ffn_hidden_size", 1, 2**24),
    ("vocab_size max_position_embeddings expert_ffn_hidden_size", 1, 2**24),
    ("first_k_dense_replace index_topk layer_group_size moe_intermediate_size", 0, 2**24),
    ("moe_topk n_group n_routed_experts num_experts num_experts_per_tok topk_group", 0, 2**24),
    ("num_nextn_predict_layers zero_expert_num", 0, 2**24),
)


@dataclass(frozen=True)
class Model:
    """The language model's part of the config at `path`, in the words of config.json.

    `architecture` is the class that vLLM runs for it, and `name` the class that the config names,
    with the former in brackets if it is another. `kinds` are the model types of the whole and of
    the part; vLLM may know the whole's alone.
    """

    path: Path
    config: dict[str, Any]
    architecture: str
    name: str
    kinds: tuple[str, ...]


def read(model: Path) -> Model:
    """Read a config; `model` is the file or its folder.

    Raises:
        UserError: there is no such file, it is none of a model, or a value is one of no model.
    """
    path = model
    if model.is_dir():
        path = next((p for p in (model / "config.json", model / "params.json") if p.exists()), path)
    content = _load(path)
    if "model_type" not in content and {"dim", "n_layers"} <= set(content):
        content = _translate(content, path)
    part = content
    if "kv_lora_rank" not in content and isinstance(content.get("text_config"), dict):
        # A multimodal model: its language part. The code of both is named once.
        shared = {"auto_map": content["auto_map"]} if "auto_map" in content else {}
        part = {**shared, **content["text_config"]}
    kind = part.get("model_type")
    if not isinstance(kind, str) or not kind:
        says = "has no" if kind is None else f"has {short(json.dumps(kind))} as"
        raise UserError(f'{path} {says} "model_type", which names the kind of a model')
    whole = _architecture(content, path)
    architecture = _architecture(part, path) or whole or kind
    name = architecture if whole in ("", architecture) else f"{whole} ({architecture})"
    for keys, least, most in _RANGES:
        for key in keys.split():
            value = part.get(key)
            if value is not None and (type(value) is not int or not least <= value <= most):
                raise UserError(
                    f"{path}: {key} must be a whole number from {least} to {most}, "
                    f"not {short(json.dumps(value))}"
                )
    kinds = tuple({kind, str(content.get("model_type", kind))})
    return Model(path, part, architecture, name, kinds)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(
            f"no config.json or params.json at {path}: give the folder of a downloaded Hugging "
            "Face model (its config.json is enough)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} describes no model: it holds no JSON object")
    return content


def _translate(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a config.json that says what `params`, Mistral's params.json, says."""
    require("vllm", purpose="a params.json")
    from vllm.transformers_utils.configs.mistral import adapt_config_dict

    try:
        read = adapt_config_dict(params, defaults={})
    except Exception as error:  # noqa: BLE001  (it asserts, indexes and converts)
        why = short(f"{type(error).__name__}: {error}")
        raise UserError(f"vLLM's reader of params.json refuses {path}: {why}") from None
    language = getattr(read, "text_config", read)
    # `to_dict` takes the type from the class, which has none.
    return {**language.to_dict(), "model_type": language.model_type}


def _architecture(model: dict[str, Any], path: Path) -> str:
    """The model class that a config names, or an empty string."""
    named = model.get("architectures") or [""]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise UserError(f"{path}: architectures must be a list of names, not {short(str(named))}")
    if named[0] and not named[0].isidentifier():
        raise UserError(f"{path}: architectures names no class: {short(ascii(named[0]))}")
    return str(named[0])
