"""The flag and its threshold as fields of vLLM's PassConfig."""

import functools
from collections.abc import Callable
from typing import Any

from mla_fusion import config
from mla_fusion.plugin.wrap import WRAPPED


def add_fields(restore: Callable[[dict[str, Any]], Any]) -> None:
    """Why: vLLM's PassConfig forbids unknown fields, so `pass_config.fuse_aiter_...` is an error.

    How: `PassConfig(...)` with one of the two fields makes an instance of a subclass that has them,
    and from then on CompilationConfig prints them. Without them it stays vLLM's own: whatever
    prints, compares, copies, hashes or pickles a config never meets the plugin. A process that
    unpickles one with them calls `restore`. Until: vLLM lets a plugin declare pass options.
    """
    import vllm.config.compilation as compilation

    base = compilation.PassConfig
    if hasattr(base, WRAPPED):
        return
    fields = {config.FLAG, config.THRESHOLD}

    @functools.cache
    def extended() -> Any:
        from mla_fusion.config import pass_config

        pass_config.show_subclass(compilation.CompilationConfig, base)
        return pass_config.extend(base, restore)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not base or fields.isdisjoint(kwargs):
            return object.__new__(cls)
        return object.__new__(extended())

    base.__new__ = new
    setattr(base, WRAPPED, True)


def instance(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, some of ours among them, as pickle and copy make one."""
    from vllm.config import PassConfig

    made = PassConfig.__new__(PassConfig, **fields)
    made.__dict__.update(fields)
    return made
