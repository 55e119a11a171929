"""Entry point of `vllm.general_plugins`: the one package that changes objects of a served vLLM.

Each change says why it is needed, how it is made, and until when. `register` may be called any
number of times, in any process. While the flag is off, nothing here changes what vLLM does but for
one offer, `--attention-backend CUSTOM`, and little is imported: each module of this package imports
what works for the flag where it is used.
"""

from typing import Any

from mla_fusion import logger
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import compilation, decision, flag, workers
from mla_fusion.plugin.wrap import when_imported

_registered = False


def register() -> None:
    """Make the flag known to vLLM and the passes available. vLLM calls it in every process, when it
    loads plugins. Code that builds `CompilationConfig` or `LLM` calls it first, because vLLM checks
    their arguments before.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    global _registered
    if _registered:
        return
    try:
        version = vllm_compat.installed_version()
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        what_to_do = "mla_fusion needs vLLM, which is not installed; `mla-fusion doctor` says more"
        raise ModuleNotFoundError(what_to_do, name="vllm") from None
    _registered = True
    if vllm_compat.is_supported(version):
        flag.add_fields(_restore)
        decision.decide_in_vllm_config()
        decision.keep_vllm_compile()
        when_imported("vllm.compilation.passes.pass_manager", compilation.add_passes)
        when_imported("vllm.compilation.backends", compilation.set_options_for_ranges)
        when_imported("vllm.v1.worker.worker_base", workers.prepare_workers)
        # vLLM's own registry: nothing is imported before an operator chooses CUSTOM.
        if not vllm_compat.register_sparse_backend():
            logger.debug("another plugin has the attention backend CUSTOM")
        return
    # Let the flag be set, and switch it off with its reason, if this release allows that.
    try:
        decision.require_names()  # before the first change: all are made, or none
        flag.add_fields(_restore)
        decision.decide_in_vllm_config()
    except (ImportError, AttributeError, TypeError) as error:
        from mla_fusion.report import FLAG_LINE
        from mla_fusion.report.reasons import Decline

        detail = f"{version}, supported are {vllm_compat.window()}; {error}"
        why = Decline("vllm-version", detail).explain()
        logger.warning("%s is unknown, mla_fusion is inactive: %s", FLAG_LINE, why)


def _restore(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, in a process that may not have loaded the plugin."""
    register()
    return flag.instance(fields)
