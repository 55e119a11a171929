"""Entry point of `vllm.general_plugins`: the one package that changes objects of a served vLLM.

Each change says why it is needed, how it is made, and until when. `register` may be called any
number of times, in any process. While the flag is off, nothing here changes what vLLM does but for
one offer, `--attention-backend CUSTOM`, and little is imported: each module of this package imports
what works for the flag where it is used.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_fusion import logger
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import compilation, decision, decode_graph, flag, sparse, workers
from mla_fusion.plugin.wrap import put_back, when_imported


@dataclass(frozen=True)
class Hook:
    """A change of a module of vLLM, made once it is imported, and the names that it needs there.
    Names are looked up before the first change: all changes are made, or none."""

    module: str
    names: tuple[str, ...]
    change: Callable[[], object]

    def require(self) -> None:
        """Raise ImportError without the module, AttributeError without one of the names."""
        module = importlib.import_module(self.module)
        for name in self.names:
            *path, last = name.split(".")
            try:
                owner = functools.reduce(getattr, path, module)
            except AttributeError:  # its text guesses at a circular import
                raise AttributeError(f"{self.module}.{name}") from None
            if last not in vars(owner):  # what a class inherits is another function
                raise AttributeError(f"{self.module}.{name}")


def _restore(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, in a process that may not have loaded the plugin."""
    register()
    return flag.instance(fields)


# The flag, and the decision that switches it off with a reason outside the window too.
_FLAG = (
    Hook(
        "vllm.config", ("VllmConfig.__post_init__", "VllmConfig._set_compile_ranges"),
        decision.decide_in_vllm_config,
    ),
    Hook(
        "vllm.config",
        ("compilation.PassConfig", "compilation.CompilationConfig", "utils.config",
         "utils.get_hash_factors", "utils.hash_factors"),
        lambda: flag.add_fields(_restore),
    ),
)  # fmt: skip
HOOKS = (
    Hook("vllm.config", (), decision.keep_vllm_compile),
    *_FLAG,
    Hook(
        "vllm.compilation.passes.pass_manager", ("PostGradPassManager.configure",),
        compilation.add_passes,
    ),
    Hook(
        "vllm.compilation.backends", ("CompilerManager.compile", "CompilerManager.load"),
        compilation.compile_pieces,
    ),
    Hook(
        "vllm.compilation.backends",
        ("VllmBackend.__call__", "split_graph", "wrap_with_cudagraph_if_needed"),
        decode_graph.compile_decode_graph,
    ),
    Hook(
        "vllm.compilation.caching",
        ("VllmSerializableFunction.serialize_compile_artifacts",
         "VllmSerializableFunction.deserialize_compile_artifacts"),
        decode_graph.keep_both_graphs,
    ),
    Hook("vllm.v1.worker.worker_base", ("WorkerBase",), workers.prepare_workers),
    Hook(
        "vllm.model_executor.layers.attention.mla_attention",
        ("MLACommonMetadataBuilder",), workers.count_steps,
    ),
    Hook(
        "vllm.v1.attention.backends.registry",
        ("AttentionBackendEnum.clear_override", "register_backend"), sparse.offer,
    ),
)  # fmt: skip
_registered = False
_inactive = False


def register() -> None:
    """Make the flag known to vLLM and the passes available. vLLM calls it in every process, when it
    loads plugins. Code that builds `CompilationConfig` or `LLM` calls it first, because vLLM checks
    their arguments before.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    global _registered, _inactive
    if _registered:
        return
    try:
        version = vllm_compat.installed_version()
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        what_to_do = "mla_fusion needs vLLM, which is not installed; `mla-fusion doctor` says more"
        raise ModuleNotFoundError(what_to_do, name="vllm") from None
    _registered, _inactive = True, False
    hooks = HOOKS if vllm_compat.is_supported(version) else _FLAG
    modules = dict.fromkeys(hook.module for hook in hooks)
    if _attempt(hook.require for hook in hooks if hook.module in sys.modules):
        for module in modules:
            here = [hook for hook in hooks if hook.module == module]
            when_imported(module, functools.partial(_make, here))


def _make(hooks: list[Hook]) -> None:
    if not _inactive:
        _attempt([*(hook.require for hook in hooks), *(hook.change for hook in hooks)])


def _attempt(steps: Any) -> bool:
    """True if all steps were made. Else nothing that the plugin changed stays changed, and a
    warning names what this vLLM lacks."""
    global _inactive
    try:
        for step in steps:
            step()
        return True
    except (ImportError, AttributeError, TypeError) as error:
        from mla_fusion.report import FLAG_LINE
        from mla_fusion.report.reasons import Decline

        _inactive = True
        put_back()
        version = vllm_compat.installed_version()
        why = f"vLLM {version} lacks a name that the plugin changes: {error}"
        if not vllm_compat.is_supported(version):
            detail = f"{version}, supported are {vllm_compat.window()}; {error}"
            why = Decline("vllm-version", detail).explain()
        logger.warning("%s is unknown, mla_fusion is inactive: %s", FLAG_LINE, why)
        return False
