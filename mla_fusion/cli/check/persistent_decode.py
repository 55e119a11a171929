"""Whether the persistent decode that `check --attention` names takes a model on a GPU.

An engine on a CPU cannot say: AITER and the kernels of Triton are not there.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mla_fusion.attention import triton
from mla_fusion.attention.aiter import selection
from mla_fusion.attention.triton import epilogue as triton_epilogue
from mla_fusion.report.reasons import Decline


def of_aiter(
    shape: Mapping[str, Any], query_len: int, cache: str, sequences: int
) -> tuple[list[str], list[Decline]]:
    """What attention=aiter does with a model on each architecture, and why on none.

    Args:
        shape: num_attention_heads of a rank, kv_lora_rank and qk_rope_head_dim.
        query_len: the most query tokens of a sequence.
        cache: as --kv-cache-dtype; with fp8 vLLM's ROCM_AITER_MLA takes the query in fp8 too.
        sequences: the most of a step.
    """
    if widths := selection.unsupported_widths(shape["kv_lora_rank"], shape["qk_rope_head_dim"]):
        return [], [Decline("aiter-attention", widths)]
    heads, taken, said = shape["num_attention_heads"], [], []
    for arch, fp8 in selection.FP8_OF.items():
        dtype = fp8 if cache.startswith("fp8") else torch.bfloat16
        verdict = selection.aiter_verdict_up_to(heads, query_len, dtype, dtype, arch)
        layout = verdict.layout
        taken += [] if verdict.unsupported else [arch]
        said.append(verdict.unsupported or f"{heads} heads as {layout.fold} x {layout.per_work}")
        _, slow = selection.slow_steps(heads, query_len, dtype, sequences, arch)
        said[-1] += f"; vLLM's backend for {slow}" if slow else ""
    notes = [f"  {arch}: {text}" for arch, text in zip(selection.FP8_OF, said, strict=True)]
    if taken:
        return notes, []
    return [], [Decline("aiter-attention", f"{heads} heads, {'; '.join(said)}")]


def of_triton(
    shape: Mapping[str, Any], cache: str, quantization: Mapping[str, Any]
) -> tuple[list[str], list[Decline]]:
    """What attention=portable does with a model on a GPU, and why not; arguments as `of_aiter`, and
    the model's quantization_config."""
    stored = torch.float8_e4m3fn if cache.startswith("fp8") else torch.bfloat16
    widths = shape["kv_lora_rank"], shape["qk_rope_head_dim"]
    if why := triton.unsupported(torch.bfloat16, stored, *widths):
        return [], [Decline("portable-attention", f"triton: {why}")]
    layer = shape["num_attention_heads"], shape["kv_lora_rank"], shape["v_head_dim"]
    measured = (row.slots for row in triton_epilogue.MEASURED)
    rows = max((n for n in measured if triton_epilogue.choose(n, *layer)), default=0)
    launch = f"with the merge in one launch for up to {rows} query rows" if rows else "on its own"
    notes = [f"  epilogue of the decode: product with W_UV, {launch}"]
    if quantization:
        notes.append(f"  quantization in front of o_proj: {_quantizes(quantization)}")
    return notes, []


def _quantizes(quantization: Mapping[str, Any]) -> str:
    """Whether the epilogue quantizes for o_proj, as far as a config says it."""
    if quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size"):
        return (
            "in the epilogue where vLLM has it in the graph, on Hopper with "
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=0"
        )
    if quantization.get("quant_method") == "fp8" and (
        quantization.get("activation_scheme") == "static"
    ):
        return "in the epilogue"
    return "the server's report says whether it is in the epilogue"
