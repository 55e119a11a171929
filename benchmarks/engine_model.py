"""Models and engines for `benchmarks/engine.py`: shapes of real checkpoints, made-up weights.

vLLM's dummy weights make logits so flat that greedy tokens meet a tie every few steps (it fills
norm weights with random numbers too). The weights here make one token stand out, as in a trained
model, without making it independent of attention:

    embedding E         uniform, of variance 1
    norm weights        1
    lm_head             SPREAD / sqrt(hidden) * (G + PEAK * (E shifted by one token)), G like E
    all other weights   uniform between -SCALE and SCALE

The logits of the residual stream are then noise from G with one peak at the successor of the last
token. PEAK puts it about six standard deviations of that noise high: the largest of 4096 noise
terms passes it in one step of a hundred, and what attention adds decides which steps these are.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

SCALE = 0.06
SPREAD = 3.0
# Down-projections are made smaller by this factor, or the MLPs would drown out attention.
DOWN = 0.1
# By hidden size, because the peak grows with its square root.
PEAK = {2048: 0.28, 7168: 0.21}

# What engines with the fusion are told: `planted` has an error besides, see `engine`.
OPTIONS = {
    "fused": {"provider": "triton"},
    "planted": {"provider": "triton"},
    "portable": {"provider": "triton", "attention": "portable"},
}

COMMON = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite, whole
    "v2-lite": {
        **COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "max_position_embeddings": 16384,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # DeepSeek-R1, one rank of tensor parallel 8
    "r1-tp8": {
        **COMMON,
        "hidden_size": 7168,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
        "max_position_embeddings": 16384,
        "rope_scaling": YARN,
    },
    # Kimi-K2, one rank of tensor parallel 4
    "k2-tp4": {
        **COMMON,
        "hidden_size": 7168,
        "num_attention_heads": 16,
        "q_lora_rank": 1536,
        "max_position_embeddings": 16384,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "factor": 32},
    },
}


def initialize(model: Any) -> None:
    """Fill all parameters of a vLLM model, or of its MTP drafter, as the module says."""
    import torch

    def uniform(weight: Any, name: str, limit: float) -> Any:
        """Random numbers that depend on the name alone: drafter and target share two names."""
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty_like(weight).uniform_(-limit, limit, generator=generator)

    unit = 3**0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            elif name.endswith("embed_tokens.weight"):
                weight.copy_(uniform(weight, "embedding", unit))
            elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
                peak = PEAK[weight.shape[1]] * uniform(weight, "embedding", unit).roll(1, 0)
                spread = SPREAD / weight.shape[1] ** 0.5
                weight.copy_(spread * (uniform(weight, "head", unit) + peak))
            elif name.endswith("eh_proj.weight"):
                # A drafter that looks at the token, and a little at the target's hidden state.
                hidden = weight.shape[0]
                weight.zero_()
                weight[:, :hidden].fill_diagonal_(1)
                weight[:, hidden:].fill_diagonal_(0.3)
            else:
                small = DOWN if name.endswith("down_proj.weight") else 1
                weight.copy_(uniform(weight, name, SCALE * small))


def engine(job: dict[str, Any]) -> Any:
    """The vLLM engine of a job, in this process."""
    # Caches of its own: a graph from Inductor's cache would not meet the passes.
    cache = tempfile.mkdtemp()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_DISABLE_COMPILE_CACHE="1",
        VLLM_CACHE_ROOT=cache,
        TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor",
        HF_HUB_OFFLINE="1",
    )
    import mla_fusion

    mla_fusion.register()
    import vllm
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: initialize(model)
    if job["arm"] == "planted":
        _plant_wrong_positions()
    with tempfile.TemporaryDirectory() as folder:
        model = {**MODELS[job["model"]], "num_hidden_layers": job["layers"]}
        model["first_k_dense_replace"] = job["layers"] + 1
        model["num_key_value_heads"] = model["num_attention_heads"]
        model["num_nextn_predict_layers"] = 1
        (Path(folder) / "config.json").write_text(json.dumps(model))
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_seqs=job["seqs"],
            max_num_batched_tokens=2048,
            kv_cache_dtype=job["cache"],
            gpu_memory_utilization=0.04,
            # Set, so that vLLM does not measure memory that other engines of this run take.
            kv_cache_memory_bytes=job["cache_bytes"],
            enable_prefix_caching=False,
            seed=0,
            **_configs(job),
        )


def _configs(job: dict[str, Any]) -> dict[str, Any]:
    """Compilation, plugin and speculation as the job asks for."""
    passes: dict[str, Any] = {}
    compilation: dict[str, Any] = {
        "cudagraph_mode": job["cudagraph_mode"],
        "cudagraph_capture_sizes": job["capture"],
        "pass_config": passes,
    }
    configs: dict[str, Any] = {"compilation_config": compilation}
    # #40392 does not match FlashInfer's op: with it `cat` would be `default` once more.
    if job["rope"] == "custom" and job["arm"] != "cat":
        compilation["custom_ops"] = ["+rotary_embedding"]
    if job["arm"] == "cat":
        compilation["use_inductor_graph_partition"] = True
        passes["fuse_rope_kvcache_cat_mla"] = True
    if job["arm"] in OPTIONS:
        passes["fuse_aiter_qk_rope_kvcache_mla"] = True
        configs["additional_config"] = {"mla_fusion": OPTIONS[job["arm"]]}
    if job["drafts"]:
        configs["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": job["drafts"],
        }
    return configs


def _plant_wrong_positions() -> None:
    """An error for the comparison to find: the Triton provider rotates for the next position."""
    from mla_fusion.kernels import triton as provider

    right = provider.launch_arguments

    def wrong(plan: Any, product: str, staged: Any, inputs: Any) -> Any:
        # padded rows do not use their positions
        return right(plan, product, staged, inputs._replace(positions=inputs.positions + 1))

    provider.launch_arguments = wrong
