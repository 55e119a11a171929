"""vLLM's sparse MLA with the small decode steps of this library: `--attention-backend CUSTOM`.

vLLM imports this module where an operator chose that. All but the decode of decode tokens is that
of vLLM's backend of the platform, FLASHMLA_SPARSE or ROCM_AITER_MLA_SPARSE: metadata, builder,
prefill, cache, and the name: vLLM chooses the cache type and more by it.
"""

from typing import Any

from mla_fusion.config import vllm_compat
from mla_fusion.runtime import sparse_step

_Backend: Any
_Impl: Any
_Backend, _Impl = vllm_compat.sparse_backend()


class SparseImpl(_Impl):
    """A layer. Until its step is attached, and where it is None, vLLM decodes every step."""

    mla_fusion_step: sparse_step.Step | None = None
    mla_fusion_shape, mla_fusion_why_not = sparse_step.shape, sparse_step.why_not

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any
    ) -> tuple[Any, Any]:
        """Attention of absorbed queries [T, H, 512 + 64], or of both parts, over chosen entries. T
        is padded in a captured graph, so the choice is one of the graph."""
        step, tokens = self.mla_fusion_step, (q[0] if isinstance(q, tuple) else q).shape[0]
        if step is None or not step.serves(tokens, attn_metadata):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        chosen = self.topk_indices_buffer[:tokens]
        out = step.decode(q, kv_c_and_k_pe_cache, chosen, attn_metadata, layer, self.softmax_scale)
        return out, None


class SparseBackend(_Backend):
    """The attention backend CUSTOM of vLLM's registry."""

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        """The class of its layers."""
        return SparseImpl
