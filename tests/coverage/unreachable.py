"""Architectures with MLA layers that no graph pass can reach."""

import copy
import dataclasses
from dataclasses import dataclass, field

from mla_fusion import config

BREAKABLE, NO_GRAPH = "breakable-cudagraph", "no-graph"
SPARSE, SPARSE_MODEL = "sparse-attention", "sparse-model"


@dataclass(frozen=True)
class Unreachable:
    """Why no pass reaches an architecture.

    compiled: by release, the reason where compiled classes are reached that no engine shows.
    sparse: the reason in every release, of the first kind if its config has an index_topk.
    """

    compiled: dict[str, str] = field(default_factory=dict)
    sparse: str = ""


OF_ARCHITECTURE = {
    "DeepseekV32ForCausalLM": Unreachable(sparse=SPARSE),
    "GlmMoeDsaForCausalLM": Unreachable(sparse=SPARSE),
    "DeepseekV32MTPModel": Unreachable(sparse=SPARSE),
    "HYV4ForCausalLM": Unreachable(sparse=SPARSE_MODEL),
    "HYV4MTPModel": Unreachable(sparse=SPARSE_MODEL),
    "DeepseekV4ForCausalLM": Unreachable(sparse=SPARSE),
    "DeepseekV4ForConditionalGeneration": Unreachable(sparse=SPARSE),
    "DeepSeekV4MTPModel": Unreachable(sparse=SPARSE),
    "DSparkDraftModel": Unreachable(),
    "DeepseekV41ForCausalLM": Unreachable(sparse=SPARSE),
    "DSparkV41DraftModel": Unreachable(),
    "Dots3NoteForCausalLM": Unreachable(sparse=SPARSE_MODEL),
    "Dots3NoteMTPModel": Unreachable(sparse=SPARSE_MODEL),
    "Glm5NextForCausalLM": Unreachable(sparse=SPARSE_MODEL),
    "Glm5NextForConditionalGeneration": Unreachable(sparse=SPARSE_MODEL),
    "Glm5NextMTPModel": Unreachable(sparse=SPARSE_MODEL),
    "KimiLinearForCausalLM": Unreachable({"0.26.0": "compiled; read, not run"}),
    "KimiK3ForConditionalGeneration": Unreachable(),
    "KimiK3MTPModel": Unreachable(),
    "SarvamMLAForCausalLM": Unreachable(),
    "Glm4MoeLiteMTPModel": Unreachable(),
    "LongCatFlashMTPModel": Unreachable(),
}


def make_config(architecture, model_config):
    """vLLM's config of an engine, with the flag on.

    `model_config` is of any MLA model: it is made with that, under this name.
    """
    from vllm.config import CompilationConfig, VllmConfig

    model = copy.copy(model_config)
    arch_config = model.model_arch_config
    model.model_arch_config = dataclasses.replace(arch_config, architectures=[architecture])
    model._architecture = architecture
    model.hf_text_config = copy.copy(model.hf_text_config)
    sparse = OF_ARCHITECTURE[architecture].sparse
    model.hf_text_config.index_topk = 2048 if sparse == SPARSE else None
    compilation = CompilationConfig(pass_config={config.FLAG: True})
    options = {config.OPTIONS_KEY: {"provider": "reference"}}
    VllmConfig(model_config=model, compilation_config=compilation, additional_config=options)
