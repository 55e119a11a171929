"""What the engines of `benchmarks/engine.py` add to every worker of vLLM.

vLLM imports this module in each of them, for `Worker`; `Loader` then takes the place of its loader
of dummy weights.
"""

from __future__ import annotations

import fcntl
import functools
from typing import TYPE_CHECKING, Any

import engine_model
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

if TYPE_CHECKING:
    import torch


@functools.cache
def rotate_for_the_next_position() -> None:
    """The error that a comparison must find; once in a process, for the drafter is loaded too."""
    from mla_fusion.kernels import triton as provider

    right = provider.launch_arguments

    def wrong(plan: Any, inputs: Any) -> Any:
        # padded rows do not use their positions
        return right(plan, inputs._replace(positions=inputs.positions + 1))

    provider.launch_arguments = wrong


class Worker:
    """Methods that every worker answers by `collective_rpc`."""

    def engine_facts(self: Any) -> dict[str, str]:
        """The model runner, V1 or V2, and the backend of the attention."""
        from mla_fusion.config import vllm_compat

        layers = self.vllm_config.compilation_config.static_forward_context
        layer = next(iter(vllm_compat.mla_layers(layers).values()))
        second = ".gpu.model_runner" in type(self.model_runner).__module__
        return {
            "runner": "V2" if second else "V1",
            "attention": layer.get_attn_backend().get_name(),
        }


@register_model_loader("dummy")
class Loader(BaseModelLoader):
    """The weights of `engine_model`.

    shared_weights: a file, or "". Engines that name the same one share their weights by it, one
        file a rank (`engine_model.share`).
    """

    def download_model(self, model_config: Any) -> None:
        """Nothing."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Make the weights up."""
        engine_model.initialize(model, get_tensor_model_parallel_rank())

    def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load, one engine at a time if they share: each needs room for all weights for a while."""
        options = self.load_config.model_loader_extra_config
        if options["arm"] == "planted":
            rotate_for_the_next_position()
        if not options["shared_weights"]:
            return super().load_model(*args, **kwargs)
        with open(f"{options['shared_weights']}-{get_tensor_model_parallel_rank()}", "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            model = super().load_model(*args, **kwargs)
            engine_model.share(model, file)
        return model
