"""Sizes that follow from a config: those of the cut model, which decide the memory of `check` and
are bounded as products, and that of the whole model's weights."""

import math
from collections.abc import Mapping
from typing import Any

from mla_fusion.cli import short

_TABLE = 2**28  # bytes: 2^20 positions of 64 in fp32, the longest context of a model of today
_ATTENTION = 2**28  # bytes of a layer's projections in bf16; DeepSeek-V3's have half
# Of the GPUs of today: AMD's MI355X and NVIDIA's B300.
_LARGEST_GPU = 288 * 10**9
_LONG = "max_position_embeddings"


def refusal(whole: Mapping[str, Any], small: Mapping[str, Any]) -> str:
    """Why an engine with the cut model `small` would take too much memory; empty if it would not.

    Every field that is read here is null or a whole number in its own range, but those of RoPE.
    """
    heads, latent, rope = (
        small[key] for key in ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, hidden = (small[key] for key in ("qk_nope_head_dim", "v_head_dim", "hidden_size"))
    query = hidden if small.get("q_lora_rank") is None else small["q_lora_rank"]
    numbers = heads * (latent * (nope + value) + query * (nope + rope) + hidden * value)
    if 2 * numbers > _ATTENTION:
        return (
            f"{heads} heads with its widths make {2 * numbers >> 20} MiB of attention weights a "
            f"layer, and check takes {_ATTENTION >> 20} MiB"
        )
    for key in ("rope_scaling", "rope_parameters"):
        scaling = whole.get(key) or {}
        if not isinstance(scaling, dict):
            return f"{key} must be a JSON object, not {short(repr(scaling))}"
        for name in ("factor", f"original_{_LONG}"):
            value = scaling.get(name, 1)
            number = type(value) in (int, float) and math.isfinite(value) and value > 0
            if value is not None and not number:
                return f"{key}.{name} must be a positive number, not {short(repr(value))}"
        rows = _rows(whole.get(_LONG) or 1, scaling)
        if rows * rope * 4 > _TABLE:
            return (
                f"{key}.factor and its positions make a table of {rows:.3g} rows of {rope} in fp32,"
                f" and check takes {_TABLE >> 20} MiB"
            )
    return ""


def _rows(positions: int, scaling: Mapping[str, Any]) -> float:
    """Rows of the table of cosines: YaRN stretches the positions it was trained with."""
    factor = max(scaling.get("factor") or 1, 1)
    trained = scaling.get(f"original_{_LONG}")
    yarn = "yarn" in str(scaling.get("rope_type") or scaling.get("type"))
    return max(positions, (trained if yarn and trained else positions) * factor)


def weights(config: Mapping[str, Any], layer_key: str) -> float:
    """An estimate of the bytes of a model's weights, from the sizes in its config."""

    def size(*keys: str) -> int:
        return next((int(config[key]) for key in keys if config.get(key) is not None), 0)

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size(layer_key)
    nope, rope, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
    latent, narrow = size("kv_lora_rank"), size("q_lora_rank")
    attention = hidden * (latent + rope + heads * value) + heads * latent * (nope + value)
    attention += (hidden + heads * (nope + rope)) * narrow or hidden * heads * (nope + rope)
    experts = size("n_routed_experts", "num_experts") + size("n_shared_experts")
    dense = min(size("first_k_dense_replace"), layers) if experts else layers
    wide = size("moe_intermediate_size", "expert_ffn_hidden_size")
    inner = dense * size("intermediate_size", "ffn_hidden_size") + (layers - dense) * experts * wide
    numbers = layers * attention + 3 * hidden * inner + 2 * hidden * size("vocab_size")
    return numbers * _bits(config.get("quantization_config") or {}) / 8


def _bits(quantization: Mapping[str, Any]) -> int:
    """Bits of a weight: those that the quantization names, or 16."""
    said = str(quantization).lower()
    if any(name in said for name in ("fp4", "int4", "w4a", "'bits': 4", "'num_bits': 4")):
        return 4
    return 8 if quantization else 16


def too_large(config: Mapping[str, Any], layer_key: str, ranks: int) -> str:
    """A line for a model whose weights no single GPU of today holds on each of `ranks`."""
    total, heads = weights(config, layer_key), config["num_attention_heads"]
    if total / ranks <= _LARGEST_GPU:
        return ""
    fit = (n for n in range(ranks + 1, heads + 1) if heads % n == 0 and total / n < _LARGEST_GPU)
    least = next(fit, None)
    text = f"about {total / 1e9:,.0f} GB by the config"
    text += f", on {ranks} GPUs more than" if ranks > 1 else ", more than"
    text += f" one GPU of today holds ({_LARGEST_GPU // 10**9})"
    return f"{text}: --tensor-parallel-size {least} at least" if least else text
