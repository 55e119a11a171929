"""Entry point of `vllm.general_plugins`: the one package that changes objects of a served vLLM.

Each change says why it is needed, how it is made, and until when. `register` may be called any
number of times, in any process. While the flag is off, nothing here changes what vLLM does.
"""

from __future__ import annotations

import logging
from typing import Any

from mla_fusion import report
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import cpu, decision, flag, passes, workers
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import sparse_step

# Below vLLM's logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.mla_fusion")

_registered = False


def register() -> None:
    """Make the flag known to vLLM and the passes available. Called by vLLM in every process."""
    global _registered
    if _registered:
        return
    _registered = True
    version = vllm_compat.installed_version()
    if vllm_compat.is_supported(version):
        flag.add_fields(_restore)
        decision.decide_in_vllm_config()
        passes.add_passes()
        cpu.keep_vllm_compile()
        workers.prepare_workers()
        # vLLM's own registry: nothing is imported before an operator chooses CUSTOM.
        if not vllm_compat.register_sparse_backend(sparse_step.BACKEND):
            logger.debug("another plugin has the attention backend CUSTOM")
        return
    # Let the flag be set, and switch it off with its reason, if this release allows that.
    try:
        flag.add_fields(_restore)
        decision.decide_in_vllm_config()
    except (ImportError, AttributeError, TypeError) as error:
        detail = f"{version}, supported are {vllm_compat.window()}; {error}"
        why = Decline("vllm-version", detail).explain()
        logger.warning("%s is unknown, mla_fusion is inactive: %s", report.FLAG_LINE, why)


def _restore(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, in a process that may not have loaded the plugin."""
    register()
    return flag.instance(fields)
