"""Pass 4: the canonical RoPE node and the query preparation of one layer become one node.

    before   q, kv_c, k_pe, ... ─► rope_mla_kv_cache_update ─► [1] q ─► mla_decode_q_prep ─►
                                                                                   attention
    after    q, kv_c, k_pe, an empty buffer, ... ─► fused_aiter_qk_rope_kvcache_q_concat_quant_mla
                                     [1] q, [2] k_pe, [3] prepared query ─► attention

The fused node reads the query before its rotation and its factor, so that it can do all in one
launch. It returns q and k_pe: rotated in place, and q scaled, for a batch that is not decode-only,
unchanged otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_fusion import ops
from mla_fusion.passes.result import PassResult
from mla_fusion.passes.rewrite import empty, functionalized_call
from mla_fusion.patterns.fused_pair import pairs
from mla_fusion.patterns.site import output

if TYPE_CHECKING:
    from torch import fx

    from mla_fusion.patterns.fused_pair import Pair


class MLAAiterQkRopeKVCacheFusionPass:
    """`provider` is who computes the fused op: "aiter", "triton" or "reference"."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for pair in list(pairs(graph)):
            result.rewritten[pair.prep.name] = self._rewrite(graph, pair)
        return result

    def _rewrite(self, graph: fx.Graph, pair: Pair) -> fx.Node:
        dummy, q, k_pe = (output(pair.rope, index) for index in range(3))
        with graph.inserting_before(pair.rope):
            fused, (_, new_q, new_k_pe, prepared) = functionalized_call(
                graph,
                ops.get(ops.FUSED),
                {
                    **pair.rope.kwargs,
                    "prepared_q": empty(graph, pair.prep.meta["val"], pair.rope.kwargs["q"]),
                    "provider": self.provider,
                },
                returned=(None,),
                mutated=("q", "k_pe", "prepared_q"),
            )
        pair.prep.replace_all_uses_with(prepared)
        graph.erase_node(pair.prep)
        for old, new in ((q, new_q), (k_pe, new_k_pe)):
            if old is not None:
                old.replace_all_uses_with(new)
                graph.erase_node(old)
        if dummy is not None:
            # It ordered the cache write before the attention; the prepared query does so now.
            for user in list(dummy.users):
                user.kwargs = {k: None if v is dummy else v for k, v in user.kwargs.items()}
            graph.erase_node(dummy)
        graph.erase_node(pair.rope)
        return fused
