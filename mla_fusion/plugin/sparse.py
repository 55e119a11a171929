"""The sparse decode of this library as an attention backend of vLLM."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mla_fusion import logger
from mla_fusion.config import models, vllm_compat
from mla_fusion.config.vllm_compat import SPARSE_BACKEND
from mla_fusion.plugin.wrap import undo_by, wrap


def offer() -> None:
    """Why: vLLM chooses attention backends from a registry of its own.

    How: register `SPARSE_BACKEND` as `--attention-backend CUSTOM`, unless another plugin has that
    name. Its class is imported once an operator chooses it. Until: vLLM finds backends by entry
    points.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, SPARSE_BACKEND)
        undo_by(custom.clear_override)
    if custom.get_path() != SPARSE_BACKEND:
        logger.debug("another plugin has the attention backend CUSTOM")


@contextmanager
def loading(vllm_config: Any) -> Iterator[None]:
    """A model is loaded in this context, and then its sparse layers share what they need."""
    chosen = vllm_compat.chose_sparse_backend(vllm_config)
    if chosen:
        take_deepseek_v4(vllm_config.model_config.architecture)
    yield
    # The first layer of a process with the backend imports it.
    if chosen or SPARSE_BACKEND.rpartition(".")[0] in sys.modules:
        from mla_fusion.runtime import sparse_step

        layers = vllm_config.compilation_config.static_forward_context
        sparse_step.attach(layers, vllm_config, chosen)


def take_deepseek_v4(architecture: str) -> None:
    """Why: the class of these layers is what a function of the model's module returns, which takes
    the backend CUSTOM for its default.

    How: before a worker of an engine with CUSTOM makes its model, that function is replaced: it
    returns a subclass that decodes the steps of `runtime.deepseek_v4` here. A later engine of the
    process without CUSTOM gets vLLM's class. Until: vLLM asks its registry of backends for these
    layers too.
    """
    from vllm.platforms import current_platform

    known = models.facts(architecture)
    if not (current_platform.is_cuda() and known.package):
        return
    from mla_fusion.runtime import deepseek_v4

    def select(original: Callable[..., Any], vllm_config: Any) -> Any:
        selected = original(vllm_config)
        chosen = vllm_compat.chose_sparse_backend(vllm_config)
        if not (chosen and hasattr(selected, "_forward_decode")):
            return selected
        slots = pkgutil.resolve_name(f"{known.package}.{known.slots}")
        return deepseek_v4.decoded_here(selected, known.kinds, slots)

    module, function = known.select.split(":")
    wrap(importlib.import_module(f"{known.package}.{module}"), function, select)
