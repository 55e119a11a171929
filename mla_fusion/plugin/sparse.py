"""The sparse decode of this library as an attention backend of vLLM."""

from mla_fusion import logger
from mla_fusion.config.vllm_compat import SPARSE_BACKEND
from mla_fusion.plugin.wrap import undo_by


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
