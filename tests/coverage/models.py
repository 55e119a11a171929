"""The engines that show vLLM's compiled MLA classes.

A draft head is compiled beside its target, in one engine. A test compares the classes that the
engines had with those that `classes.py` finds.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.models import config_of

_FOLDER = "vllm.model_executor.models"


@dataclass(frozen=True)
class Engine:
    """One engine: a model of tests/models, perhaps with a draft head."""

    model: str
    method: str = ""  # of speculative decoding
    draft: dict[str, Any] = field(default_factory=dict)  # changes of `model` that make its draft
    engine: dict[str, Any] = field(default_factory=dict)
    imitate: tuple[str, ...] = ()
    label: str = ""

    def job(self):
        """As `engines.py` takes it."""
        arguments = dict(self.engine)
        job: dict[str, Any] = {"name": self.name, "model": config_of(self.model)}
        if self.method:
            arguments["speculative_config"] = {"method": self.method, "num_speculative_tokens": 1}
        if self.draft:
            job["draft"] = config_of(self.model, **self.draft)
        return job | {"engine": arguments, "imitate": self.imitate}

    @property
    def name(self):
        return "+".join(filter(None, (self.model, self.method, self.label)))


# vLLM takes any other draft of DeepSeek-V3's type to be its MTP head.
_PLAIN = {"model_type": "deepseek_v2", "num_hidden_layers": 1}

ENGINES = (
    Engine("deepseek_v2_lite"),
    Engine("deepseek_v2"),
    Engine("deepseek_v3", "mtp"),
    Engine("deepseek_v3", "eagle", {"architectures": ["DeepSeekMTPModel"]}),
    Engine("deepseek_v3", "eagle3", {**_PLAIN, "architectures": ["DeepseekV2ForCausalLM"]}),
    Engine("kimi_k2"),
    Engine(
        "mistral_large_3", "eagle", {**_PLAIN, "architectures": ["EagleMistralLarge3ForCausalLM"]}
    ),
    Engine("glm4_moe_lite", "mtp"),
    Engine("longcat_flash", "mtp"),
    Engine("openpangu", "mtp", imitate=("pangu_draft_attribute",)),
    Engine("bailing_moe_linear", "mtp"),
    Engine("bailing_moe_v3", "mtp"),
    Engine("sarvam"),
    Engine("axk1"),
    Engine("deepseek_v2_lite", engine={"model_impl": "transformers"}, label="transformers"),
)
