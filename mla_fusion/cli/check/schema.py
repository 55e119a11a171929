"""What a model's config may hold under the keys that this library reads; null counts as absent.

It imports pydantic, which vLLM brings, so `model_config` imports it when there is a config to read.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, ValidationError, create_model

from mla_fusion.cli import UserError, short
from mla_fusion.cli.check.shrink import LAYER_KEYS

# Keys, and the smallest and the largest whole number that they may hold.
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
_OBJECTS = ("auto_map", "quantization_config", "text_config")


def _must(be: str, holds: Callable[[Any], bool]) -> Any:
    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise ValueError(f"must be {be}, not {short(json.dumps(value, default=str))}")
        return value

    return Annotated[Any, AfterValidator(check)], None


def _whole(least: int, most: int) -> Any:
    return _must(
        f"a whole number from {least} to {most}",
        lambda value: type(value) is int and least <= value <= most,
    )


def _are_classes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, str) and n.isidentifier() for n in value)


_Config = create_model(
    "_Config",
    __config__=ConfigDict(extra="allow"),
    architectures=_must("a list of names of classes", _are_classes),
    **{name: _must("a JSON object", lambda value: isinstance(value, dict)) for name in _OBJECTS},
    **{key: _whole(least, most) for keys, least, most in _RANGES for key in keys.split()},
)


def check(config: dict[str, Any], path: Path) -> None:
    """Refuse what no model has.

    Raises:
        UserError: it names the key.
    """
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {first['loc'][0]} {why}") from None
