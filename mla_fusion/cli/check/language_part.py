"""The part of a config that describes the language model. A class of vLLM or of a checkpoint reads
it under a name of its own; it is found without running one, so that an answer takes no time."""

from typing import Any

# As HF's `get_text_config`, vLLM's `get_hf_text_config` and its config classes name the part.
NAMES = ("text_config", "language_config", "llm_config", "thinker_config", "decoder", "generator")
# Parts that are no language model, although a latent may be among their fields.
_OTHERS = ("vision_config", "audio_config", "talker_config", "quantization_config")
_DEEPEST = 4  # parts inside parts; vLLM's own models have two


def find(content: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """The language model's part of a config; `content` itself where it has no such part.

    As for vLLM, a part is one only with `num_attention_heads`. A named part comes first, as it
    does for vLLM; one under another name counts where it alone has a latent.
    """
    if depth == _DEEPEST:
        return content
    others = [name for name in content if name not in (*NAMES, *_OTHERS)]
    for name in (*NAMES, *others):
        part = content.get(name)
        if isinstance(part, dict):
            part = find(part, depth + 1)
            latent = part.get("kv_lora_rank") is not None and content.get("kv_lora_rank") is None
            if part.get("num_attention_heads") is not None and (name in NAMES or latent):
                return part
    return content
