"""The flag and its threshold as fields of vLLM's PassConfig."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mla_fusion.config import FLAG, THRESHOLD
from mla_fusion.config.identity import graphs_hash
from mla_fusion.plugin.wrap import WRAPPED, replace


def add_fields(restore: Callable[[dict[str, Any]], Any]) -> None:
    """Why: vLLM's PassConfig forbids unknown fields, so `pass_config.fuse_aiter_...` is an error.

    How: `PassConfig(...)` with one of the two fields makes an instance of a subclass that has them,
    and from then on CompilationConfig prints them. Without them it stays vLLM's own: whatever
    prints, compares, copies, hashes or pickles a config never meets the plugin. A process that
    unpickles one with them calls `restore`, which makes an instance from its fields. Until: vLLM
    lets a plugin declare pass options.
    """
    import vllm.config.compilation as compilation

    base = compilation.PassConfig
    if "__new__" in vars(base).get(WRAPPED, ()):
        return

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        ours = cls is base and not {FLAG, THRESHOLD}.isdisjoint(kwargs)
        return object.__new__(_extended(base, restore) if ours else cls)

    replace(base, "__new__", new)


def instance(fields: dict[str, Any]) -> Any:
    """A PassConfig with these fields, some of ours among them, as pickle and copy make one."""
    from vllm.config import PassConfig

    made = PassConfig.__new__(PassConfig, **fields)
    made.__dict__.update(fields)
    return made


@functools.cache
def _extended(base: Any, restore: Callable[[dict[str, Any]], Any]) -> type:
    """`base`, vLLM's PassConfig, with the fields of this library."""
    from pydantic import Field, SerializeAsAny
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.compilation import CompilationConfig
    from vllm.config.utils import config, get_hash_factors, hash_factors

    class PassConfig(base):
        __doc__ = base.__doc__

        fuse_aiter_qk_rope_kvcache_mla: bool = False
        """Fuse MLA QK-RoPE, KV-cache write, q-absorb, q-concat and q-quant in decode graphs
        (mla-fusion)."""

        aiter_qk_rope_kvcache_fusion_max_token_num: int | None = Field(default=None, gt=0)
        """The largest number of tokens of a graph that is fused; by default
        max_num_seqs * (1 + num_speculative_tokens), padded to its CUDA graph (mla-fusion)."""

        def compute_hash(self) -> str:
            """The hash with which vLLM finds compiled graphs: with the flag also of this library's
            source."""
            factors = get_hash_factors(self, {FLAG, THRESHOLD})
            if getattr(self, FLAG):
                factors[FLAG] = [getattr(self, THRESHOLD), graphs_hash()]
            return hash_factors(factors)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # The class is not found under its name: vLLM's is. A worker process unpickles its
            # config before it loads plugins.
            return restore, (dict(self.__dict__),)

    PassConfig.__qualname__, PassConfig.__module__ = base.__qualname__, base.__module__
    # pydantic compiled the schema of vLLM's CompilationConfig for `base`, whose fields alone it
    # would print and dump.
    [declared] = [f for f in dataclasses.fields(CompilationConfig) if f.name == "pass_config"]
    declared.type = SerializeAsAny[base]  # type: ignore[misc]
    rebuild_dataclass(CompilationConfig, force=True)
    extended: type = config(PassConfig)
    return extended
