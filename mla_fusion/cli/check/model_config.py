"""Read a model's config.json, or Mistral's params.json, and refuse values that no model has."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError, require, short
from mla_fusion.report.files import read_bounded

LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")
_LONGEST_NAME = 80  # of a class or a type
_OBJECTS = ("auto_map", "quantization_config", "text_config")
# Key -> the smallest and the largest whole number that it may hold.
_WHOLE = {
    key: (least, most)
    for keys, least, most in (
        # `mla-fusion check` builds the attention with its own sizes: these bound its memory.
        ("kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim", 1, 8192),
        ("num_attention_heads num_key_value_heads", 1, 1024),
        (f"{' '.join(LAYER_KEYS)} hidden_size intermediate_size ffn_hidden_size", 1, 2**24),
        ("vocab_size max_position_embeddings expert_ffn_hidden_size", 1, 2**24),
        ("first_k_dense_replace index_topk layer_group_size moe_intermediate_size", 0, 2**24),
        ("moe_topk n_group n_routed_experts num_experts num_experts_per_tok topk_group", 0, 2**24),
        ("num_nextn_predict_layers zero_expert_num", 0, 2**24),
    )
    for key in keys.split()
}


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
    """Read a config; `model` is the file or its folder. A UserError says that there is no file,
    that it is none of a model, or that a value is one of no model."""
    files = (model / name for name in ("config.json", "params.json"))
    path = next((file for file in files if file.exists()), model)
    content = _load(path)
    if "model_type" not in content and {"dim", "n_layers"} <= set(content):
        content = _translate(content, path)
    _refuse_odd(content, path)
    part = content
    if "kv_lora_rank" not in content and content.get("text_config"):
        # A multimodal model: its language part. The code of both is named once.
        shared = {"auto_map": content["auto_map"]} if "auto_map" in content else {}
        part = {**shared, **content["text_config"]}
        _refuse_odd(part, path)
    kind = part.get("model_type")
    if not isinstance(kind, str) or not 0 < len(kind) <= _LONGEST_NAME:
        says = "has no" if kind is None else f"has {short(json.dumps(kind))} as"
        raise UserError(f'{path} {says} "model_type", which names the kind of a model')
    whole, *_ = content.get("architectures") or [""]
    architecture, *_ = part.get("architectures") or [whole or kind]
    name = architecture if whole in ("", architecture) else f"{whole} ({architecture})"
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


def _refuse_odd(config: dict[str, Any], path: Path) -> None:
    """Refuse a value that no model has under a key that is read here; null counts as absent."""
    for key in ("architectures", *_OBJECTS, *_WHOLE):
        value = config.get(key)
        if key in _WHOLE:
            least, most = _WHOLE[key]
            fits = type(value) is int and least <= value <= most
            what = f"a whole number from {least} to {most}"
        elif key in _OBJECTS:
            fits, what = isinstance(value, dict), "a JSON object"
        else:
            what = "a list of names of classes"
            fits = isinstance(value, list) and all(
                isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_NAME
                for name in value
            )
        if value is not None and not fits:
            said = short(json.dumps(value, default=str))
            raise UserError(f"{path}: {key} must be {what}, not {said}")
