"""Models and engines for `benchmarks/engine.py`: shapes of real checkpoints, made-up weights.

vLLM's dummy weights make logits so flat that greedy tokens tie every few steps (norm weights are
random too). With these weights one token has the highest logit by far, as in a trained model, but
still depends on attention:

    embedding E         uniform, of variance 1
    norm weights        1
    lm_head             SPREAD / sqrt(hidden) * (G + PEAK * (E shifted by one token)), G like E
    all other weights   uniform between -SCALE and SCALE

The logits of the residual stream are then noise from G with one peak at the successor of the last
token. PEAK makes it about six standard deviations of that noise high: the largest of 4096 noise
terms exceeds it in one step of a hundred, and attention decides in which.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

from mla_fusion.cli import tiny_models

SCALE = 0.06
SPREAD = 3.0
# Down-projections are smaller by this factor, so that the MLPs do not mask attention.
DOWN = 0.1
# By hidden size, because the peak grows with its square root.
PEAK = {2048: 0.28, 7168: 0.21}

# Options of the engines with the fusion; `planted` also has an error, see `engine`.
OPTIONS = {
    "fused": {"provider": "triton"},
    "planted": {"provider": "triton"},
    "portable": {"provider": "triton", "attention": "portable"},
}

_SIZES = {
    "hidden_size": 7168,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 16384,
}
_V2 = {**tiny_models.MODELS["deepseek-v2-shaped"], **_SIZES}
_V3 = {**tiny_models.MODELS["deepseek-v3-shaped"], **_SIZES, "q_lora_rank": 1536}
_YARN = _V3["rope_scaling"]
MODELS: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite, whole
    "v2-lite": {
        **_V2,
        "hidden_size": 2048,
        "scoring_func": "sigmoid",
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # DeepSeek-R1, one rank of tensor parallel 8
    "r1-tp8": _V3,
    # Kimi-K2, one rank of tensor parallel 4
    "k2-tp4": {**_V3, "rope_theta": 50000.0, "rope_scaling": {**_YARN, "factor": 32}},
}


def initialize(model: Any) -> None:
    """Fill all parameters of a vLLM model, or of its MTP drafter, as described above."""
    import torch

    def uniform(weight: Any, name: str, limit: float) -> Any:
        """Random numbers that only depend on the name: drafter and target share two names."""
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
                # The drafter reads the token, and the target's hidden state with less weight.
                hidden = weight.shape[0]
                weight.zero_()
                weight[:, :hidden].fill_diagonal_(1)
                weight[:, hidden:].fill_diagonal_(0.3)
            else:
                small = DOWN if name.endswith("down_proj.weight") else 1
                weight.copy_(uniform(weight, name, SCALE * small))


def engine(job: dict[str, Any]) -> Any:
    """The vLLM engine of a job, in this process."""
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
            # Explicit: vLLM would measure memory that other engines of this run take.
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
    # vLLM's own fusion (#40392) does not match FlashInfer's op: `cat` would equal `default`.
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
    """Plant an error that the comparison must find: rotation for the next position."""
    from mla_fusion.kernels import triton as provider

    right = provider.launch_arguments

    def wrong(plan: Any, product: str, staged: Any, inputs: Any) -> Any:
        # padded rows do not use their positions
        return right(plan, product, staged, inputs._replace(positions=inputs.positions + 1))

    provider.launch_arguments = wrong
