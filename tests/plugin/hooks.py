"""Registers the plugin in processes of their own, each with a vLLM that lacks one of its names.

python -m tests.plugin.hooks
"""

import contextlib
import functools
import importlib
import json
import os
import sys

known: list = []  # classes of vLLM, before one of their names is gone
said: list = []  # warnings of the plugin


def names():
    """(module, dotted name) of every name that a hook needs."""
    from mla_fusion import plugin

    return [(hook.module, name) for hook in plugin.HOOKS for name in hook.names]


def forked(work, *arguments):
    """What `work` returns in a child of this process."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, json.dumps(work(*arguments)).encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with os.fdopen(reads) as pipe:
        return json.loads(pipe.read() or "null")


def lacking(module, name):
    """What became of vLLM and its flag without `name`, registered before or after its import."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    delattr(owner, last)
    return register()


def outside():
    """The same of a vLLM outside the window."""
    from mla_fusion.config import vllm_compat

    vllm_compat.installed_version = lambda: "0.99.0"
    return lacking("vllm.config", "VllmConfig._set_compile_ranges")


def lost_later():
    """The same if a name is missing in a module that is imported after the plugin was loaded."""
    from mla_fusion import plugin

    late = plugin.Hook("json", ("nothing",), lambda: None)
    plugin.HOOKS = (*plugin.HOOKS, late)
    sys.modules.pop("json")
    register()
    import json  # noqa: F401

    return register()


def wrapped_by_another():
    """The same, after another plugin wrapped what this one had: it keeps its own, and reaches
    vLLM's."""
    from mla_fusion.plugin import wrap

    register()
    worker, name = known[2], "mla_fusion_steps"
    theirs = lambda *args: "theirs"  # noqa: E731
    setattr(worker, name, theirs)
    called = []
    method = type("method", (), {"f": lambda self: "vLLM's"})
    wrap.wrap(method, "f", lambda original, self: called.append("ours") or original(self))
    ours = method.f
    method.f = lambda self: "theirs, then " + ours(self)
    wrap.put_back()
    return [getattr(worker, name) is theirs, method().f(), called]


def register():
    """Register, and say what stays changed, whether vLLM takes the flag, and what was said."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from mla_fusion import plugin
    from mla_fusion.plugin.wrap import WRAPPED

    plugin.logger.warning = lambda text, *given: said.append(text % given)
    plugin.register()
    config, *owners = known
    changed = [owner.__name__ for owner in owners if vars(owner).get(WRAPPED)]
    changed += ["CUSTOM"] * AttentionBackendEnum.CUSTOM.is_overridden()
    taken = []
    for name in ("eliminate_noops", "fuse_aiter_qk_rope_kvcache_mla"):
        # vLLM itself looks some of the names up.
        with contextlib.suppress(ValueError, TypeError, NameError):
            config(pass_config={name: True})
            taken.append(name)
    return changed, taken, said


def main():
    from mla_fusion import plugin

    plugin.register()
    waits = [name for name in ("vllm.config", "vllm.platforms.cpu") if name in sys.modules]
    plugin._registered = False
    from mla_fusion.plugin import wrap

    wrap._waiting.clear()
    for hook in plugin.HOOKS:
        importlib.import_module(hook.module)
    from vllm.config import CompilationConfig, VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
    from vllm.v1.worker.worker_base import WorkerBase

    known.extend((CompilationConfig, VllmConfig, WorkerBase, MLACommonMetadataBuilder))
    found = {f"{module}.{name}": forked(lacking, module, name) for module, name in names()}
    found |= {"later": forked(lost_later), "outside": forked(outside)}
    found |= {"none": forked(register), "imported": waits, "wrapped": forked(wrapped_by_another)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
