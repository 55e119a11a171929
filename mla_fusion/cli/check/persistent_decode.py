"""Whether the persistent decode that `check --attention` names takes a model on a GPU: an engine on
a CPU, without AITER and the kernels of Triton, cannot say."""

import torch

from mla_fusion import config
from mla_fusion.attention import cards, triton
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.card import Decodes
from mla_fusion.cli.check.answer import Settings
from mla_fusion.cli.check.model_config import Cut
from mla_fusion.gpu import Gpu
from mla_fusion.report.reasons import Declined

_SHARED = (
    "  decode context parallelism was not part of this check: the graph is the same, and vLLM "
    "gathers the heads after the fused op. Two ranks were right on two H200s and on a CPU."
)


def ask(settings: Settings, cut: Cut) -> list[str]:
    """Lines on the persistent decode of a GPU; raises Declined if it does not take the model."""
    if settings.decode_context_parallel_size > 1:
        if settings.attention in config.PLANNED:
            raise Declined("context-parallel", f"attention={settings.attention}")
        return [_SHARED]
    if settings.attention == "aiter":
        return _of_aiter(settings, cut)
    return _of_triton(settings, cut) if settings.attention == "portable" else []


def _of_aiter(settings: Settings, cut: Cut) -> list[str]:
    """For each architecture; with an fp8 cache vLLM's ROCM_AITER_MLA takes the query in fp8 too."""
    widths = cut.config["kv_lora_rank"], cut.config["qk_rope_head_dim"]
    if unsupported := selection.unsupported_widths(*widths):
        raise Declined("aiter-attention", unsupported)
    heads, query_len = cut.config["num_attention_heads"], 1 + settings.speculative_tokens
    said, taken = {}, False
    for arch, fp8 in selection.FP8_OF.items():
        dtype = fp8 if settings.cache.startswith("fp8") else torch.bfloat16
        _, slow = selection.slow_steps(heads, query_len, dtype, settings.requests, arch)
        verdict = selection.aiter_verdict_up_to(heads, query_len, dtype, dtype, arch)
        layout, taken = verdict.layout, taken or not verdict.unsupported
        said[arch] = verdict.unsupported or f"{heads} heads as {layout.fold} x {layout.per_work}"
        said[arch] += f"; vLLM's backend for {slow}" if slow else ""
    if not taken:
        raise Declined("aiter-attention", f"{heads} heads, {'; '.join(said.values())}")
    return [f"  {arch}: {text}" for arch, text in said.items()]


def _of_triton(settings: Settings, cut: Cut) -> list[str]:
    fp8 = settings.cache.startswith("fp8")
    stored = torch.float8_e4m3fn if fp8 else torch.bfloat16
    latent, rope = cut.config["kv_lora_rank"], cut.config["qk_rope_head_dim"]
    if why := triton.unsupported(torch.bfloat16, stored, latent, rope):
        raise Declined("portable-attention", f"triton: {why}")
    heads, rows = cut.config["num_attention_heads"], 1 + settings.speculative_tokens
    decodes = Decodes(heads, rows, stored, latent + rope)
    archs = dict.fromkeys(arch for card in cards.CARDS for arch in card.archs)
    plans = [f"{cards.planned(Gpu(arch=arch), decodes).name} on {arch}" for arch in archs]
    notes = [f"  plan for the kernel {', '.join(plans)}, {cards.PORTABLE.name} elsewhere"]
    notes.append("  epilogue of the decode: product with W_UV")
    if given := cut.quantization:
        where = "the server's report says whether it is in the epilogue"
        if given.get("quant_method") == "fp8" and given.get("weight_block_size"):
            where = "in the epilogue where vLLM has it in the graph, on Hopper with "
            where += "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0"
        elif given.get("quant_method") == "fp8" and given.get("activation_scheme") == "static":
            where = "in the epilogue"
        notes.append(f"  quantization in front of o_proj: {where}")
    return notes
