"""Every quantization in front of o_proj, in every variant, among the passes of vLLM.

The graphs are traced from vLLM's own `QuantFP8` (`tests/passes/linears.py`) on a CPU, which stands
in for a GPU: a CPU build of vLLM has no linear layer that quantizes its input in the graph.
"""

import torch

from tests.coverage import vllm_passes
from tests.passes import linears
from tests.passes.graphs import Spec

GROUPS = "`_C.per_token_group_fp8_quant`, scales"
# The name of `linears.project`, what has it in vLLM 0.26, 0.32 and 0.33, and why it is not fused.
OUTPUTS = {
    f"{GROUPS} in rows": ("group", "Triton", ""),
    f"{GROUPS} in columns": ("group_columns", "CUTLASS", ""),
    f"{GROUPS} in aligned columns": (
        "group_tma", "DeepGEMM with `VLLM_USE_DEEP_GEMM_E8M0=0`", ""),
    f"{GROUPS} in aligned columns, powers of two": ("group_ue8m0", "DeepGEMM on Hopper", ""),
    "`_C.static_scaled_fp8_quant`": ("tensor", "given scales, with `+quant_fp8`", ""),
    "aten ops, one given scale": ("tensor_native", "given scales, the default", ""),
    "`_C.per_token_group_fp8_quant_packed`": (
        "group_packed", "DeepGEMM on Blackwell", "output-quantization"),
    "inside the op of o_proj": (
        "opaque", "FlashInfer with DeepGEMM: vLLM's first choice on Hopper", "output-opaque"),
    "aten ops, groups of 128": (
        "group_native", "groups, with `-quant_fp8`", "output-quantization"),
    "an op with a scale for each token": (
        "per_token", "dynamic scales of tokens", "output-quantization"),
    "none": ("", "weights in bf16 or fp16, or quantized alone", "output-unquantized"),
}  # fmt: skip
# Nothing here runs them; their graphs are compared after passes 2 to 4 as they are declined.
NOT_RUN = ("opaque", "group_packed")
# How the graph comes to the passes, as in `spellings.VARIANTS`.
VARIANTS = [(name, partition) for name in ("input", "constant") for partition in (True, False)]


def outcome(name, variant):
    """Nothing if it is fused, or the code of the reason against it."""
    layer_name, partition = variant
    quantized, *_ = OUTPUTS[name]
    spec = Spec("nope", dtype=torch.bfloat16, quantized=quantized, layer_name=layer_name)
    runs = quantized not in NOT_RUN
    made = vllm_passes.compare(spec, partition, attention="portable", runs=runs)
    assert (made.fused, made.declined) == (1, {})
    [kind] = made.outputs
    if kind != "none":
        assert quantized in linears.FUSED
        return ""
    [reason] = made.plain_outputs
    return reason.code
