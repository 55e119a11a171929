"""The passes in vLLM's pass manager."""

from collections.abc import Callable
from typing import Any

from mla_fusion import config
from mla_fusion.plugin.wrap import wrap


def add_passes() -> None:
    """Why: vLLM's hook for custom passes has one slot, which belongs to the user, and its last
    step cannot be extended.

    How: after `PostGradPassManager.configure`, append the passes and put pass 5 in place of
    `fix_functionalization`. Until: vLLM takes several custom passes.
    """
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.platforms import current_platform

    def configure(original: Callable[..., Any], self: Any, vllm_config: Any) -> None:
        original(self, vllm_config)
        if not config.is_on(vllm_config):
            return
        from mla_fusion.passes.pipeline import LastStep, MLAFusionPass

        options = config.read_options(vllm_config.additional_config)
        bucket, rows = config.decode_bucket(vllm_config), 1 + config.draft_tokens(vllm_config)
        self.add(MLAFusionPass(options.provider, bucket, options.attention, rows))
        # vLLM's last step names CUDA-only ops and raises on a CPU build.
        rest = None if current_platform.is_cpu() else self.fix_functionalization
        self.fix_functionalization = LastStep(rest)

    wrap(PostGradPassManager, "configure", configure)
