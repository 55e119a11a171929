"""Small DeepSeek-V2- and V3-shaped models with random weights of unit gain, as vLLM reads them.
With its dummy weights, of 1e-3, scores are nearly zero: no wrong rotation would change a token."""

import json
from pathlib import Path
from typing import Any

import torch

_COMMON = {
    "hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024, "torch_dtype": "bfloat16",
    "num_hidden_layers": 3, "first_k_dense_replace": 3,  # every layer dense: no experts are built
    "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 128, "v_head_dim": 128,
    # Those of DeepSeek's models; vLLM's CPU attention takes no other latent and rope sizes.
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-shaped": _COMMON | {
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None, "max_position_embeddings": 4096,
    },
    "deepseek-v3-shaped": _COMMON | {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 128, "max_position_embeddings": 163840, "rope_scaling": _YARN,
    },
}  # fmt: skip


def write(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write `MODELS[name]` with `changes` into `folder`, and return the folder."""
    from safetensors.torch import save_file

    model = {**MODELS[name], **changes}
    # A tokenizer with the words w0, w1, ...: a server takes text.
    words = {f"w{token}": token for token in range(model["vocab_size"])}
    kind = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "model": kind, "pre_tokenizer": {"type": "Whitespace"}}
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in {
        "config.json": model,
        "tokenizer.json": tokenizer | {"added_tokens": []},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
    }.items():
        (folder / file).write_text(json.dumps(content))
    save_file(weights(model, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights(model: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All weights of a dense model by checkpoint name; a seed always gives the same ones."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    latent, rope = model["kv_lora_rank"], model["qk_rope_head_dim"]
    nope, value = model["qk_nope_head_dim"], model["v_head_dim"]

    def linear(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        random = torch.randn(out, into, generator=generator)
        return (random * gain * into**-0.5).to(torch.bfloat16)

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(size, generator=generator)).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": linear(model["vocab_size"], hidden, hidden**0.5)}
    for layer in range(model["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        # Peaked attention: a token depends on the position and the content of its keys.
        query, sharp = heads * (nope + rope), 2.0
        if (rank := model["q_lora_rank"]) is None:
            tensors[f"{at}self_attn.q_proj.weight"] = linear(query, hidden, sharp)
        else:
            tensors[f"{at}self_attn.q_a_proj.weight"] = linear(rank, hidden)
            tensors[f"{at}self_attn.q_a_layernorm.weight"] = norm(rank)
            tensors[f"{at}self_attn.q_b_proj.weight"] = linear(query, rank, sharp)
        tensors |= {
            f"{at}input_layernorm.weight": norm(hidden),
            f"{at}post_attention_layernorm.weight": norm(hidden),
            f"{at}self_attn.kv_a_proj_with_mqa.weight": linear(latent + rope, hidden),
            f"{at}self_attn.kv_a_layernorm.weight": norm(latent),
            f"{at}self_attn.kv_b_proj.weight": linear(heads * (nope + value), latent),
            f"{at}self_attn.o_proj.weight": linear(hidden, heads * value),
            f"{at}mlp.gate_proj.weight": linear(model["intermediate_size"], hidden),
            f"{at}mlp.up_proj.weight": linear(model["intermediate_size"], hidden),
            f"{at}mlp.down_proj.weight": linear(hidden, model["intermediate_size"]),
        }
    tensors["model.norm.weight"] = norm(hidden)
    tensors["lm_head.weight"] = linear(model["vocab_size"], hidden, 4.0)
    return tensors
