"""The attention layers of DeepSeek-V4 and V4.1, which do not ask vLLM for a backend."""

import importlib
from collections.abc import Callable
from typing import Any

from mla_fusion.config import vllm_compat
from mla_fusion.plugin.wrap import wrap

# By how a model's class begins: its package, and by how many tokens an entry of a layer stands for,
# the kind of the layer.
MODELS = {
    "DeepseekV41": ("deepseek_v41", ((0, "swaonly"), (1, "c1a"), (2, "c2a"))),
    "DeepseekV4": ("deepseek_v4", ((1, "swaonly"), (4, "c4a"), (128, "c128a"))),
}


def take_layers(vllm_config: Any) -> None:
    """Why: the class of these layers is what a function of the model's module returns, which takes
    the backend CUSTOM for its default.

    How: before a worker of an engine with CUSTOM makes its model, that function is replaced: it
    returns a subclass that decodes the steps of `runtime.deepseek_v4` here. An engine without
    CUSTOM gets vLLM's class. Until: vLLM asks its registry of backends for these layers too.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() and vllm_compat.chose_sparse_backend(vllm_config)):
        return
    name = vllm_config.model_config.architecture
    found = next((each for start, each in MODELS.items() if name.startswith(start)), None)
    if found is None:
        return
    from mla_fusion.runtime import deepseek_v4

    package, kinds = found
    ops = importlib.import_module(f"vllm.models.{package}.common.ops")

    def select(original: Callable[..., Any], vllm_config: Any) -> Any:
        selected = original(vllm_config)
        chosen = vllm_compat.chose_sparse_backend(vllm_config)
        if not (chosen and hasattr(selected, "_forward_decode")):
            return selected
        slots = ops.compute_global_topk_indices_and_lens
        return deepseek_v4.decoded_here(selected, kinds, slots)

    model = importlib.import_module(f"vllm.models.{package}.nvidia.model")
    wrap(model, "_select_dsv4_attn_cls", select)
