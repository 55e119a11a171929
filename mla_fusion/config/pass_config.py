"""The flag's two fields: a subclass of vLLM's PassConfig, for who sets one of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from mla_fusion.config import FLAG, THRESHOLD
from mla_fusion.config.identity import graphs_hash


def extend(base: type, restore: Callable[[dict[str, Any]], Any]) -> type:
    """`base`, vLLM's PassConfig, with the fields of this library.

    `restore` makes an instance from its fields, in a process that may not have loaded the plugin.
    """
    from pydantic import Field
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
            """vLLM's hash while the flag is off; else it also covers this library's source.

            vLLM finds compiled graphs by this hash, not by the uuid of its passes.
            """
            factors = get_hash_factors(self, {FLAG, THRESHOLD})
            if getattr(self, FLAG):
                factors[FLAG] = [getattr(self, THRESHOLD), graphs_hash()]
            return hash_factors(factors)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """A worker process unpickles its config before it loads plugins, which make this class.

            The class itself is not found under its name: vLLM's is.
            """
            return restore, (dict(self.__dict__),)

    PassConfig.__qualname__ = base.__qualname__
    PassConfig.__module__ = base.__module__
    extended: Any = config(PassConfig)
    return extended


def show_subclass(compilation_config: Any, base: type) -> None:
    """Let vLLM's CompilationConfig print and dump all fields of its pass config.

    pydantic compiled its schema for `base`, whose fields alone it would show.
    """
    from pydantic import SerializeAsAny
    from pydantic.dataclasses import rebuild_dataclass

    [declared] = [f for f in dataclasses.fields(compilation_config) if f.name == "pass_config"]
    declared.type = SerializeAsAny[base]  # type: ignore[misc, valid-type]
    rebuild_dataclass(compilation_config, force=True)
