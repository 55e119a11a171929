"""Architectures with MLA layers that no graph pass can reach, and what the user is told.

What is told comes out of the library: `said` asks the code that an engine would run.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch

from mla_fusion import eligibility, reasons, report

SPARSE, NO_GRAPH = "sparse-attention", "no-graph"

# architecture -> (code, which of its classes)
OF_ARCHITECTURE: dict[str, tuple[str, str]] = {
    "DeepseekV32ForCausalLM": (SPARSE, "compiled on a CPU alone; on GPUs there is no graph either"),
    "GlmMoeDsaForCausalLM": (SPARSE, "as DeepSeek-V3.2"),
    "DeepseekV32MTPModel": (SPARSE, "as DeepSeek-V3.2"),
    "HYV4ForCausalLM": (SPARSE, "compiled on ROCm alone; on NVIDIA there is no graph either"),
    "HYV4MTPModel": (NO_GRAPH, "draft head"),
    "DeepseekV4ForCausalLM": (NO_GRAPH, "attention of its own, sparse"),
    "DeepseekV4ForConditionalGeneration": (NO_GRAPH, "as DeepSeek-V4"),
    "DeepSeekV4MTPModel": (NO_GRAPH, "draft head"),
    "DSparkDraftModel": (NO_GRAPH, "draft head"),
    "DeepseekV41ForCausalLM": (NO_GRAPH, "attention of its own, sparse"),
    "DSparkV41DraftModel": (NO_GRAPH, "draft head"),
    "Dots3NoteForCausalLM": (NO_GRAPH, "sparse, and dense with a sliding window"),
    "Dots3NoteMTPModel": (NO_GRAPH, "draft head"),
    "Glm5NextForCausalLM": (NO_GRAPH, "attention of its own, sparse"),
    "Glm5NextForConditionalGeneration": (NO_GRAPH, "as GLM-5-Next"),
    "Glm5NextMTPModel": (NO_GRAPH, "draft head"),
    "KimiLinearForCausalLM": (NO_GRAPH, "fused by hand in the model"),
    "KimiK3ForConditionalGeneration": (NO_GRAPH, "fused by hand in the model"),
    "KimiK3MTPModel": (NO_GRAPH, "draft head"),
    "Glm4MoeLiteMTPModel": (NO_GRAPH, "draft head; its target is compiled and fuses"),
    "LongCatFlashMTPModel": (NO_GRAPH, "draft head; its target is compiled and fuses"),
}
# Found by name: they inherit from a class with MLA layers and build others, or none.
NO_MLA = {"GlmOcrMTPModel"}


def said(architecture: str) -> str:
    """The line the user reads when this model is served with the flag on."""
    code, _ = OF_ARCHITECTURE[architecture]
    if code == SPARSE:
        layer = SimpleNamespace(
            impl=SimpleNamespace(is_sparse=True, supports_quant_query_input=False),
            kv_cache_dtype="auto",
        )
        facts = eligibility.facts(layer, "reference", torch.bfloat16)
        return reasons.explain(facts.decline, architecture)
    lines: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    logger = logging.getLogger("vllm.mla_fusion")
    logger.addFilter(keep)
    try:
        report.publish(None, architecture, cached=False)
    finally:
        logger.removeFilter(keep)
    return " ".join(lines)
