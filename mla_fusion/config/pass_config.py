"""The flag's two fields as a subclass of vLLM's PassConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def extend(base: type, restore: Callable[[dict[str, Any]], Any]) -> type:
    """`base`, vLLM's PassConfig, with the fields of this library.

    `restore` makes an instance from its fields, in a process that may not have loaded the plugin.
    """
    from pydantic import Field
    from vllm.config.utils import config, get_hash_factors, hash_factors

    from mla_fusion.config import FLAG, THRESHOLD
    from mla_fusion.config.identity import source_hash

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
                factors[FLAG] = [getattr(self, THRESHOLD), source_hash()]
            return hash_factors(factors)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """A worker process unpickles its config before it loads plugins.

            By reference it would then get vLLM's class, which has the flag's value but hashes as
            if it were off, and take compiled graphs of an engine without the fusion.
            """
            if getattr(self, FLAG):
                return restore, (dict(self.__dict__),)
            return super().__reduce_ex__(protocol)

    PassConfig.__qualname__ = base.__qualname__
    PassConfig.__module__ = base.__module__
    extended: Any = config(PassConfig)
    return extended
