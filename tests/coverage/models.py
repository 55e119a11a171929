"""The engines that show vLLM's compiled MLA classes.

A draft head is compiled beside its target, in one engine. A test compares the classes that the
engines had with those that `classes.py` finds.
"""

from tests.models import config_of


def _engine(model, method="", draft=None, imitate=(), label="", **arguments):
    """An engine as `engines.py` takes it, of a model of tests/models.

    method: of speculative decoding. draft: the changes of the model that make its draft.
    """
    name = "+".join(filter(None, (model, method, label)))
    if method:
        arguments["speculative_config"] = {"method": method, "num_speculative_tokens": 1}
    job = {"name": name, "model": config_of(model), "engine": arguments, "imitate": imitate}
    return job | ({"draft": config_of(model, **draft)} if draft else {})


# vLLM takes any other draft of DeepSeek-V3's type to be its MTP head.
_PLAIN = {"model_type": "deepseek_v2", "num_hidden_layers": 1}
_EAGLE_OF_MISTRAL = {**_PLAIN, "architectures": ["EagleMistralLarge3ForCausalLM"]}

ENGINES = [
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
