"""Every spelling of RoPE and cache write, every quantization in front of o_proj, and what no pass
reaches.

The graphs are traced from vLLM's own code (`tests/passes/graphs.py`), on a CPU, which stands in for
a GPU, and run before and after the passes of vLLM; others were recorded from an engine on a GPU
(`tests/passes/recorded.py`).
"""

import itertools

BOTH = (False, True)
# name -> what `Spec` has, `is_neox` of each graph, and whether vLLM's own fusion of RoPE and cache
# write is on, and must find it
SPELLINGS = {
    "native, NeoX": ({"rope": "native"}, (True,), False),
    "native, GPT-J": ({"rope": "native"}, (False,), False),
    "native, DeepSeek scaling": ({"rope": "deepseek"}, BOTH, False),
    "`_C.rotary_embedding`": ({"rope": "vllm_c"}, BOTH, False),
    "`vllm.flashinfer_rotary_embedding`": ({"rope": "flashinfer"}, BOTH, False),
    "`vllm.rocm_aiter_triton_rotary_embedding`": ({"rope": "aiter"}, BOTH, False),
    "vLLM's fused RoPE and cache write": ({"rope": "deepseek"}, BOTH, True),
    "no RoPE": ({"rope": "nope"}, (False,), False),
    "native, DeepSeek scaling, then a scaled query": (
        {"rope": "deepseek", "scaled": "in_place"}, BOTH, False
    ),
    "`vllm.flashinfer_rotary_embedding`, then a scaled query": (
        {"rope": "flashinfer", "scaled": "in_place"}, BOTH, False
    ),
}  # fmt: skip
# How the graph comes to the passes: with q_lora; `layer_name` as in `Spec`; and whether Inductor
# splits the graph at the attention, after the passes, or vLLM was told to split nowhere.
VARIANTS = list(itertools.product(BOTH, ("input", "constant"), (True, False)))

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
# As in `VARIANTS`.
OUTPUT_VARIANTS = list(itertools.product(("input", "constant"), (True, False)))

BREAKABLE, NO_GRAPH, SPARSE, SPARSE_MODEL = (
    "breakable-cudagraph", "no-graph", "sparse-attention", "sparse-model"
)  # fmt: skip
# Architectures with MLA layers that no pass reaches -> the code of a sparse attention, which holds
# in every release; with `SPARSE` the config has an index_topk. Of the others the sources say why.
UNREACHABLE = {
    "DeepseekV32ForCausalLM": SPARSE,
    "GlmMoeDsaForCausalLM": SPARSE,
    "DeepseekV32MTPModel": SPARSE,
    "HYV4ForCausalLM": SPARSE_MODEL,
    "HYV4MTPModel": SPARSE_MODEL,
    "DeepseekV4ForCausalLM": SPARSE,
    "DeepseekV4ForConditionalGeneration": SPARSE,
    "DeepSeekV4MTPModel": SPARSE,
    "DSparkDraftModel": "",
    "DeepseekV41ForCausalLM": SPARSE,
    "DSparkV41DraftModel": "",
    "Dots3NoteForCausalLM": SPARSE_MODEL,
    "Dots3NoteMTPModel": SPARSE_MODEL,
    "Glm5NextForCausalLM": SPARSE_MODEL,
    "Glm5NextForConditionalGeneration": SPARSE_MODEL,
    "Glm5NextMTPModel": SPARSE_MODEL,
    "KimiLinearForCausalLM": "",
    "KimiK3ForConditionalGeneration": "",
    "KimiK3MTPModel": "",
    "SarvamMLAForCausalLM": "",
    "Glm4MoeLiteMTPModel": "",
    "LongCatFlashMTPModel": "",
}
# (release, architecture) -> why no engine shows the compiled classes that it reaches.
NOT_SHOWN = {("0.26.0", "KimiLinearForCausalLM"): "compiled; read, not run"}
