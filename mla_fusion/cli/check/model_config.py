"""Read a model's config.json, or Mistral's params.json, and refuse values that no model has; cut a
config to a few small layers with the same attention. What decides about fusion is kept: class,
latent, rope and head sizes, heads of a rank, rope scaling, q_lora."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_fusion.cli import UserError, short
from mla_fusion.cli.check import language_part, sizes
from mla_fusion.config import models
from mla_fusion.files import read_bounded

LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layers")
_LONGEST_NAME = 80  # of a class or a type
_QUANTIZATION = "hf_quant_config.json"  # of modelopt up to 0.29, beside the config
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
        ("n_shared_experts num_shared_experts", 0, 2**10),
    )
    for key in keys.split()
}
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
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    # Of a hybrid, only the MLA layers are built: a CPU lacks the kernels of the others.
    **dict.fromkeys(("n_group", "topk_group", "layer_group_size"), 1),
    **{"vocab_size": _VOCABULARY, "num_nextn_predict_layers": 0},
}
_ALIGNMENT = 32  # of the hidden size, for vLLM's CPU kernels
# They describe weights that are not read and Python files that are not run.
_DROPPED = ("quantization_config", "compression_config", "auto_map")


@dataclass(frozen=True)
class Model:
    """The language model's part of the config at `path`, in the words of config.json."""

    path: Path
    config: dict[str, Any]
    architecture: str  # the class that vLLM runs for it
    name: str  # the class that the config names; `architecture` in brackets if it is another
    kinds: tuple[str, ...]  # model types of whole and part: vLLM may know the whole's alone
    cache: str = "auto"  # the type of the KV cache that vLLM takes from the checkpoint

    @property
    def facts(self) -> models.Facts:
        """The facts of the class that vLLM's config does not give."""
        return models.facts(self.architecture)


@dataclass(frozen=True)
class Cut:
    """A cut model."""

    config: dict[str, Any]
    head_size: int  # width of a cache entry
    draft: bool  # whether it is a draft head: `config` is then that of a target with this head
    changed: str  # a line on what was changed
    quantization: Mapping[str, Any]  # the model's quantization_config, which the cut model lacks
    large: str  # a line if the weights of the whole are too large for the ranks; else empty


def read(model: Path) -> Model:
    """Read a config, a file or its folder; a UserError if no model has it, or one of its values."""
    files = (model / name for name in ("config.json", "params.json"))
    path = next((file for file in files if file.exists()), model)
    content, quantization = _load(path), path.with_name(_QUANTIZATION)
    if content.get("quantization_config") is None and quantization.exists():
        content["quantization_config"] = {"quant_method": "modelopt", **_load(quantization)}
    if "model_type" not in content and {"dim", "n_layers"} <= set(content):
        content = _translate(content, path)
    _refuse_odd(content, path)
    part = language_part.find(content)
    if part is not content:
        # The code and the quantization of both are named once.
        shared = {key: content[key] for key in _DROPPED if content.get(key) is not None}
        part = {**part, **shared}
        _refuse_odd(part, path)
    kind = part.get("model_type")
    if not isinstance(kind, str) or not 0 < len(kind) <= _LONGEST_NAME:
        says = "has no" if kind is None else f"has {short(json.dumps(kind))} as"
        raise UserError(f'{path} {says} "model_type", which names the kind of a model')
    whole, *_ = content.get("architectures") or [""]
    architecture, *_ = part.get("architectures") or [whole or kind]
    name = architecture if whole in ("", architecture) else f"{whole} ({architecture})"
    kinds = tuple({kind, str(content.get("model_type", kind))})
    return Model(path, part, architecture, name, kinds, _cache(content, path))


def _cache(content: dict[str, Any], path: Path) -> str:
    """The type of the KV cache for --kv-cache-dtype auto, as vLLM reads it: from modelopt's
    checkpoints, and not for an MLA layer from those of compressed-tensors."""
    quantization = content.get("quantization_config") or {}
    if not str(quantization.get("quant_method", "")).startswith("modelopt"):
        return "auto"
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    try:
        return get_kv_cache_quant_algo_string(quantization) or "auto"
    except Exception as error:  # noqa: BLE001  (it takes every field to be what it expects)
        why = short(f"{type(error).__name__}: {error}")
        raise UserError(f"vLLM refuses the quantization_config of {path}: {why}") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(
            f"no config.json or params.json at {path}: give the folder of a downloaded Hugging "
            "Face model (its config.json is enough)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error  # an OSError names the path too
        raise UserError(f"cannot read {path}: {why}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} describes no model: it holds no JSON object")
    return content


def _translate(params: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a config.json that says what `params`, Mistral's params.json, says."""
    from vllm.transformers_utils.configs.mistral import adapt_config_dict

    try:
        read = adapt_config_dict(params, defaults={})
        language = getattr(read, "text_config", read)
        # `to_dict` takes the type from the class, which has none.
        return {**language.to_dict(), "model_type": language.model_type}
    except Exception as error:  # noqa: BLE001  (it asserts, indexes, converts and keeps odd parts)
        why = short(f"{type(error).__name__}: {error}")
        raise UserError(f"vLLM's reader of params.json refuses {path}: {why}") from None


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


def cut(model: Model, layers: int, ranks: int) -> Cut:
    """`model`, cut to `layers` layers and the heads of one of `ranks`, or else a UserError."""
    whole = model.config
    layer_key = next((key for key in LAYER_KEYS if whole.get(key) is not None), LAYER_KEYS[0])
    missing = [key for key in (*_REQUIRED, layer_key) if whole.get(key) is None]
    if missing:
        raise UserError(f"{model.path} has no {', '.join(map(repr, missing))}, which MLA needs")
    all_layers, heads = whole[layer_key], whole["num_attention_heads"]
    if heads % ranks:
        raise UserError(f"--tensor-parallel-size {ranks} does not divide {heads} attention heads")
    target = model.facts.target  # vLLM runs a draft head beside one
    draft = bool(target)
    needs_experts = models.facts(target[1] if draft else whole["model_type"]).needs_experts
    layers = 1 if draft else min(layers, all_layers)
    small = {key: value for key, value in whole.items() if key not in _DROPPED}
    small[layer_key] = layers
    for key in ("num_attention_heads", "num_key_value_heads"):
        if small.get(key) is not None:
            small[key] = max(small[key] // ranks, 1)
    for key, limit in _LIMITS.items():
        if small.get(key) is not None:
            small[key] = min(small[key], limit)
    # Transformers refuses a hidden size that is no multiple of the heads.
    step = math.lcm(small["num_attention_heads"], _ALIGNMENT)
    small["hidden_size"] = -(-small["hidden_size"] // step) * step
    if why := sizes.refusal(whole, small):
        raise UserError(f"{model.path}: {why}")
    # The config of a draft head tells the sizes of its target.
    large = "" if draft else sizes.too_large(whole, layer_key, ranks)
    if draft:
        name, small["model_type"] = target
        small |= {"architectures": [name], "num_nextn_predict_layers": 1}
    has_experts = whole.keys() & {"n_routed_experts", "num_experts", "first_k_dense_replace"}
    if has_experts:
        # No experts, not even in the draft head: attention does not read them.
        small["first_k_dense_replace"] = layers - 1 if needs_experts else layers + draft
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
        f"{small['num_attention_heads']} heads" + f" (one rank of {ranks})" * (ranks > 1),
        f"hidden size {small['hidden_size']}",
        "no experts" if has_experts and not needs_experts else f"at most {_EXPERTS} experts",
        "dummy weights in bfloat16",
        *(f"no {key}" for key in _DROPPED if key in whole),
    ]
    head_size = whole["kv_lora_rank"] + whole["qk_rope_head_dim"]
    quantization = whole.get("quantization_config") or {}
    return Cut(small, head_size, draft, ", ".join(notes), quantization, large)
