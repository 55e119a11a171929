"""The engines that are run, as `engines.py` takes them.

`MODELS` show vLLM's compiled MLA classes, `NEIGHBOURS` other features of vLLM, each in an engine
with the fusion off and in one with it on. The weights of the latter have unit gain
(`mla_fusion.cli.demo.tiny_models`), so that a wrong value changes tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_fusion.cli.demo import tiny_models
from tests.coverage.engines import ARRIVALS, NEW_TOKENS
from tests.models import config_of


def _engine(model, method="", draft=None, imitate=(), label="", **arguments):
    """An engine of a model of tests/models.

    method: of speculative decoding. draft: the changes of the model that make its draft.
    """
    name = "+".join(filter(None, (model, method, label)))
    if method:
        arguments["speculative_config"] = {"method": method, "num_speculative_tokens": 1}
    imitate = (*imitate, "faster_products")
    job = {"name": name, "model": config_of(model), "engine": arguments, "imitate": imitate}
    return job | ({"draft": config_of(model, **draft)} if draft else {})


# vLLM takes any other draft of DeepSeek-V3's type to be its MTP head.
_PLAIN = {"model_type": "deepseek_v2", "num_hidden_layers": 1}
_EAGLE_OF_MISTRAL = {**_PLAIN, "architectures": ["EagleMistralLarge3ForCausalLM"]}

# A draft head is compiled beside its target, in one engine.
MODELS = [
    _engine("deepseek_v2_lite"),
    _engine("deepseek_v2"),
    _engine("deepseek_v3", "mtp"),
    _engine("deepseek_v3", "eagle", {"architectures": ["DeepSeekMTPModel"]}),
    _engine("deepseek_v3", "eagle3", {**_PLAIN, "architectures": ["DeepseekV2ForCausalLM"]}),
    _engine("kimi_k2"),
    _engine("mistral_large_3", "eagle", _EAGLE_OF_MISTRAL),
    _engine("glm4_moe_lite", "mtp"),
    _engine("longcat_flash", "mtp"),
    _engine("openpangu", "mtp", imitate=("pangu_draft_attribute",)),
    _engine("bailing_moe_linear", "mtp"),
    _engine("bailing_moe_v3", "mtp"),
    _engine("sarvam"),
    _engine("axk1"),
    _engine("deepseek_v2_lite", label="transformers", model_impl="transformers"),
]

MODEL = "deepseek-v3-shaped"
_LAYERS = 3


@dataclass(frozen=True)
class Neighbour:
    """`engine` are arguments of EngineArgs, `imitate` functions of imitations.py.

    `signs` say that the feature did something: the least number that a path in the result of each
    engine, with the flag off and on, leads to.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    imitate: tuple[str, ...] = ()
    refused: str = ""  # part of vLLM's own error on a CPU
    model: str = ""  # a folder below that of the model all others run
    signs: dict[str, int] = field(default_factory=dict)
    times: int = 1  # how often it is given the prompts

    def jobs(self, folder):
        """The engine with the flag off, and on."""
        return [
            {"name": f"{self.name} ({name})", "flag": name == "on", "prompts": self.times,
             "folder": str(Path(folder, self.model)), "engine": self.engine,
             "imitate": self.imitate}
            for name in ("off", "on")
        ]  # fmt: skip


TERSE = "terse"
NARROW = "narrow"
_SEVERAL = ("several_tokens_per_decode",)
_ANY_WIDTH = ("latents_of_any_width",)
# The kernel of the CPU in fp32 beside the specification of the portable decode: equal tokens.
_PORTABLE = {
    "dtype": "float32",
    "additional_config": {"mla_fusion": {"provider": "reference", "attention": "portable"}},
}


def _drafts(count):
    method = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 3}
    return Neighbour(
        f"draft tokens: {count}",
        {"speculative_config": {**method, "prompt_lookup_min": 1}},
        imitate=_SEVERAL,
        model=TERSE,
        # The token that every step makes, and the most drafts that are ever right.
        signs={"drafts": count, "burst": 1 + min(count, 3)},
    )


_CONNECTOR = {
    "kv_connector": "Connector",
    "kv_connector_module_path": "tests.coverage.connector",
    "kv_role": "kv_both",
}

# The last token of a request is never computed with.
_LOADED = sum(len(prompt) - 1 for _, prompt in ARRIVALS)
_COMPUTED = _LOADED + 2 * len(ARRIVALS) * NEW_TOKENS

NEIGHBOURS = (
    Neighbour("none"),
    # vLLM then runs one graph with the attention in it, without graph partition.
    Neighbour("empty splitting_ops", {"compilation_config": {"splitting_ops": []}}),
    Neighbour(
        "prefix caching", {"enable_prefix_caching": True}, imitate=_SEVERAL, signs={"cached": 1}
    ),
    Neighbour(
        "chunked prefill",
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
        imitate=_SEVERAL,
        signs={"split": 2},
    ),
    *(_drafts(count) for count in range(1, 8)),
    Neighbour("latents of 256 + 64", imitate=_ANY_WIDTH, model=NARROW),
    Neighbour("latents of 256 + 64, attention=portable", _PORTABLE, _ANY_WIDTH, model=NARROW),
    Neighbour("LoRA", {"enable_lora": True, "max_lora_rank": 8}),
    Neighbour("tensor parallel 2", {"tensor_parallel_size": 2}),
    Neighbour(
        "KV-transfer connector",
        # In fp32: a decode step must give the token that a prefill gave, on any CPU.
        {"kv_transfer_config": _CONNECTOR, "dtype": "float32"},
        # Every prompt comes twice: the second one loads the entries that the first one saved.
        signs={"kv.saved": _LAYERS * _COMPUTED, "kv.loaded": _LAYERS * _LOADED},
        times=2,
    ),
    Neighbour(
        "decode context parallel 2",
        {
            "tensor_parallel_size": 2,
            "decode_context_parallel_size": 2,
            "kernel_config": {"enable_jit_warmup": False},
            # Each rank is a process, and imitates `imitations.parts_of_a_cache` by itself.
            "worker_extension_cls": "tests.coverage.parts_worker.Worker",
        },
    ),
    Neighbour(
        "prefill context parallel 2",
        {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
        refused="Model Runner V1 does not support: prefill context parallel",
    ),
)


def of_neighbours(folder):
    """The jobs of all neighbours, on models that it writes into `folder`: one, below it, in
    `TERSE`, one with only eight distinct tokens, and in `NARROW` one with the widths of
    Mistral-Small-4.

    Drafts from the prompt are often right with eight tokens; else there is hardly a draft.
    """
    from safetensors.torch import load_file, save_file

    terse = tiny_models.write(MODEL, folder / TERSE) / "model.safetensors"
    tensors = load_file(terse)
    tensors["lm_head.weight"][8:] = 0
    save_file(tensors, terse, metadata={"format": "pt"})
    tiny_models.write(MODEL, folder / NARROW, kv_lora_rank=256, qk_nope_head_dim=64)
    model = tiny_models.write(MODEL, folder)
    return [job for neighbour in NEIGHBOURS for job in neighbour.jobs(model)]
