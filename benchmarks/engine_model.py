"""Models and engines for `benchmarks/engine.py`: shapes of real checkpoints, made-up weights.

vLLM's dummy weights make logits so flat that greedy tokens tie every few steps (norm weights are
random too). With these weights one token has the highest logit by far, as in a trained model, but
still depends on attention:

    embedding E         uniform, of variance 1
    norm weights        1
    lm_head             SPREAD / sqrt(hidden) * (G + PEAK * (E shifted by one token)), G like E
    all other weights   uniform between -SCALE and SCALE

Logits are then noise from G with a peak at the successor of the last token. PEAK makes it about six
standard deviations high: the largest of 4096 noise terms exceeds it in one step of a hundred, and
attention decides in which. Beyond four layers, what each adds is scaled down to the sum of four.

A block fp8 weight is stored FP8_UNIT times as large, with the scale 1 / FP8_UNIT.
"""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.multiprocessing.reductions import reduce_tensor

from mla_fusion import config
from mla_fusion.cli.demo import tiny_models

SCALE = 0.06
SPREAD = 3.0
# Down-projections are smaller by this factor, so that the MLPs do not mask attention.
DOWN = 0.1
FP8_UNIT = 256
SMALLEST = 1 << 20  # bytes of a weight that is worth sharing
# Rows that o_proj adds up: with more, its weights are smaller, so that attention does not hide the
# token.
ADDED_UP = 5120
# By hidden size, because the peak grows with its square root.
PEAK = {2048: 0.28, 7168: 0.21}

# Options of engines with the fusion: `auto` is what the flag alone does, `region` the same with
# vLLM's products; `planted` has an error.
OPTIONS: dict[str, dict[str, str]] = {
    "fused": {"attention": "vllm"}, "portable": {"attention": "portable"}, "auto": {},
    "region": {"projections": "vllm"},
    "planted": {"attention": "vllm"},
}  # fmt: skip
# Attention backends that arms ask for; else vLLM chooses.
BACKENDS = {"other": "FLASHMLA_SPARSE", "custom": "CUSTOM", "ours": "CUSTOM", "shifted": "CUSTOM"}

_CONFIGS = Path(__file__).parent.parent / "tests" / "configs"
_SIZES = {
    "hidden_size": 7168, "intermediate_size": 2304, "moe_intermediate_size": 256,
    "routed_scaling_factor": 2.5, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_nextn_predict_layers": 1, "vocab_size": 4096, "max_position_embeddings": 16384,
    "first_k_dense_replace": 1000,  # every layer dense, the drafter's too
}  # fmt: skip
_V2 = {**tiny_models.MODELS["deepseek-v2-shaped"], **_SIZES}
_V3 = {**tiny_models.MODELS["deepseek-v3-shaped"], **_SIZES, "q_lora_rank": 1536}
_YARN = _V3["rope_scaling"]
_V32 = {
    **_V3, "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
_HEADS = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 128)


def _checkpoint(name: str) -> dict[str, Any]:
    """The config of a checkpoint, as it is published."""
    return dict(json.loads((_CONFIGS / f"{name}.json").read_text()))


MODELS: dict[str, dict[str, Any]] = {
    # The attention of DeepSeek-V2-Lite
    "v2-lite": {
        **_V2, "hidden_size": 2048, "scoring_func": "sigmoid",
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    # DeepSeek-R1, one rank of tensor parallel 8
    "r1-tp8": _V3,
    # The same with its weights in block fp8, as the checkpoint has them
    "r1-tp8-block": {
        **_V3, "quantization_config": _checkpoint("deepseek-v3")["quantization_config"]
    },
    # DeepSeek-R1, one rank of data-parallel attention: all heads; its MLP is that of the rank above
    "r1-dp": {**_V3, **_HEADS, "max_position_embeddings": 163840},
    # The same with a few experts after the first layer, which ranks of data parallelism share
    "r1-ep": {
        **_V3, **_HEADS, "max_position_embeddings": 163840, "first_k_dense_replace": 1,
        "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 512, "scoring_func": "sigmoid",
    },
    # The attention of Mistral-Large-3, one rank of tensor parallel 8. The checkpoint scales the
    # query from position 8192 on: here from 32 on.
    "large3-tp8": {
        **_V3,
        "rope_scaling": {**_YARN, "factor": 36, "original_max_position_embeddings": 8192},
        "llama_4_scaling": {"original_max_position_embeddings": 32, "beta": 0.1},
    },
    # Kimi-K2, one rank of tensor parallel 4
    "k2-tp4": {**_V3, "rope_theta": 50000.0, "rope_scaling": {**_YARN, "factor": 32}},
    # DeepSeek-V3.2, one rank of tensor parallel 8, and one of data-parallel attention
    "v3.2-tp8": _V32,
    "v3.2-dp": {**_V32, **_HEADS},
    "deepseek-v2-lite": _checkpoint("deepseek-v2-lite"),
    "glm-4.7-flash": _checkpoint("glm-4.7-flash"),
    # DeepSeek-R1 as its checkpoint is, in block fp8, one rank of tensor parallel 8
    "deepseek-r1-tp8": {
        **_checkpoint("deepseek-v3"), "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 2304, "moe_intermediate_size": 256, "vocab_size": 16160,
    },
}  # fmt: skip
# The same in bf16, without quantization
MODELS["deepseek-r1-bf16"] = {
    name: of for name, of in MODELS["deepseek-r1-tp8"].items() if name != "quantization_config"
}
# All layers of R1 in bf16, with 8 of its 256 experts, so that they fit a GPU.
MODELS["deepseek-r1-deep"] = {
    **MODELS["deepseek-r1-bf16"], "n_routed_experts": 8, "n_group": 1, "topk_group": 1
}  # fmt: skip
# What tensor parallelism divides: a model of one rank has this N times for N ranks.
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size",
            "moe_intermediate_size", "vocab_size")  # fmt: skip
# Random weights that every rank of tensor parallelism has whole.
_REPLICATED = ("a_proj", "gate.")


def is_sparse(name: str) -> bool:
    """Whether the layers of a model attend to chosen tokens."""
    return "index_topk" in MODELS[name]


def is_rank(name: str) -> bool:
    """Whether a model is that of one rank of tensor parallelism: R1 and Kimi-K2 have more heads."""
    model = MODELS[name]
    return model["hidden_size"] == 7168 and model["num_attention_heads"] == 16


def shape(name: str, layers: int, tp: int) -> dict[str, Any]:
    """The config of a model with so many layers, for `tp` ranks."""
    model = {**MODELS[name], "num_hidden_layers": layers}
    if is_rank(name):
        model |= {size: model[size] * tp for size in _DIVIDED}
    return model


def initialize(model: Any, rank: int = 0) -> None:
    """Fill all parameters of a vLLM model, or of its MTP drafter, as described above."""

    def uniform(weight: Any, name: str, limit: float) -> Any:
        """Random numbers that only depend on name and rank: drafter and target share two names."""
        seed = zlib.crc32(name.encode()) + rank * all(part not in name for part in _REPLICATED)
        generator = torch.Generator(weight.device).manual_seed(seed)
        dtype = torch.bfloat16 if weight.dtype.itemsize == 1 else weight.dtype
        numbers = torch.empty(weight.shape, device=weight.device, dtype=dtype)
        return numbers.uniform_(-limit, limit, generator=generator)

    unit = 3**0.5
    named = dict(model.named_parameters())
    layers = sum(name.endswith("o_proj.weight") for name in named)
    added = min(1.0, (4 / max(layers, 1)) ** 0.5)
    with torch.no_grad():
        for name, weight in named.items():
            if not weight.dim():
                continue  # a scale of query or cache, which no checkpoint here has
            if "norm" in name:
                weight.fill_(1)
            elif name.endswith("weight_scale_inv"):
                weight.fill_(1 / FP8_UNIT)
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
                limit = SCALE * (FP8_UNIT if weight.dtype.itemsize == 1 else 1)
                if name.endswith(("down_proj.weight", "w2_weight")):
                    limit *= DOWN * added
                elif name.endswith("o_proj.weight"):
                    limit *= added * min(1.0, (ADDED_UP / weight.shape[1]) ** 0.5)
                weight.copy_(uniform(weight, name, limit))


def share(model: torch.nn.Module, file: BinaryIO) -> None:
    """Write the handles of all large weights into an empty file, or take those of a written one.

    Engines on a GPU that name this file then have one copy, and must live until the last one ends.
    Every engine loads by itself first, so what vLLM derives from the weights is its own.

    Raises:
        RuntimeError: a weight differs from the one it would be replaced by.
    """
    large = {n: w for n, w in model.named_parameters() if w.nbytes >= SMALLEST}
    file.seek(0)
    if not (written := file.read()):
        torch.cuda.synchronize()
        pickle.dump({name: reduce_tensor(weight.data) for name, weight in large.items()}, file)
        return
    handles = pickle.loads(written)
    for name, weight in large.items():
        rebuild, arguments = handles[name]
        first = rebuild(*arguments)
        # torch compares no fp8.
        dtype = torch.uint8 if weight.dtype.itemsize == 1 else weight.dtype
        if not torch.equal(weight.data.view(dtype), first.view(dtype)):
            raise RuntimeError(
                f"weight {name} differs between two arms, so they cannot share it: vLLM processed "
                "it in two ways. Run these arms with --arms one at a time beside `default`"
            )
        weight.data = first
    torch.cuda.empty_cache()


def arguments(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """vLLM's engine arguments for a job; the config of its model is written into `folder`."""
    model = shape(job["model"], job["layers"], job["tp"])
    (folder / "config.json").write_text(json.dumps(model))
    return {
        "model": str(folder),
        "load_format": "dummy",
        "model_loader_extra_config": {name: job[name] for name in ("arm", "shared_weights")},
        "worker_extension_cls": "engine_worker.Worker",
        "max_model_len": job["max_len"],
        "max_num_seqs": job["seqs"],
        "max_num_batched_tokens": job["max_tokens"],
        "kv_cache_dtype": job["cache"],
        "gpu_memory_utilization": 0.01,
        # Explicit: vLLM would measure memory that other engines of this run take.
        "kv_cache_memory_bytes": job["cache_bytes"],
        "kernel_config": {"enable_flashinfer_autotune": False},
        "tensor_parallel_size": job["tp"],
        "decode_context_parallel_size": job["dcp"],
        "enable_expert_parallel": job["dp"] > 1,
        "enable_prefix_caching": job["prefix_caching"],
        "seed": 0,
        **_configs(job),
    }


def _configs(job: dict[str, Any]) -> dict[str, Any]:
    """Compilation, plugin and speculation as the job asks for."""
    # vLLM's fused all-reduce needs NVLink multicast, which a machine may not have.
    fusable = job["tp"] == 1 or job["multicast"]
    passes: dict[str, Any] = {} if fusable else {"fuse_allreduce_rms": False}
    compilation = {name: job[name] for name in ("mode", "cudagraph_mode")}
    compilation |= {"pass_config": passes}
    if job["capture"]:  # else vLLM chooses
        compilation["cudagraph_capture_sizes"] = job["capture"]
    configs: dict[str, Any] = {"compilation_config": compilation}
    # vLLM's own fusion (#40392) does not match FlashInfer's op: `cat` would equal `default`.
    if job["rope"] == "custom" and job["arm"] not in ("cat", "stored"):
        compilation["custom_ops"] = ["+rotary_embedding"]
    if job["arm"] == "native":
        compilation.setdefault("custom_ops", []).append("-quant_fp8")
    if job["arm"] in ("cat", "stored"):
        compilation["use_inductor_graph_partition"] = True
        passes["fuse_rope_kvcache_cat_mla"] = True
    if job["arm"] == "stored":
        compilation["inductor_compile_config"] = {config.REALIZE: 1}
    if job["arm"] in OPTIONS:
        passes["fuse_aiter_qk_rope_kvcache_mla"] = True
        configs["additional_config"] = {"mla_fusion": OPTIONS[job["arm"]]}
    if job["arm"] in BACKENDS:
        configs["attention_backend"] = BACKENDS[job["arm"]]
    if job["drafts"]:
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        drafter = {"method": job["drafter"], "num_speculative_tokens": job["drafts"]}
        configs["speculative_config"] = drafter | (lookup if job["drafter"] == "ngram" else {})
    return configs
