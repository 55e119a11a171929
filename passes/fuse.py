"""Pass 4: the canonical RoPE node and the query preparation of one layer become one node.

    before   q, kv_c, k_pe, ... ─► rope_mla_kv_cache_update ─► [1] q ─► mla_decode_q_prep ─►
                                                                                   attention
    after    q, kv_c, k_pe, an empty buffer, ... ─► fused_aiter_qk_rope_kvcache_q_concat_quant_mla
                                     [1] q, [2] k_pe, [3] prepared query ─► attention

The fused node reads the query before its rotation and its factor, so that it can do all in one
launch. It returns q and k_pe, unchanged for a decode-only batch; else rotated, and q scaled."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import PassResult, empty, functionalized_call, replace
from mla_fusion.patterns.site import called, made_by, outputs


@dataclass
class MLAAiterQkRopeKVCacheFusionPass:
    """`provider` is who computes the fused op: "aiter", "triton" or "reference"."""

    provider: str

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for rope, prep in [(_rope_of(node), node) for node in graph.nodes]:
            if rope is not None:
                result.rewritten[prep.name] = self._rewrite(graph, rope, prep)
        return result

    def _rewrite(self, graph: fx.Graph, rope: fx.Node, prep: fx.Node) -> fx.Node:
        with graph.inserting_before(rope):
            buffer = empty(graph, prep.meta["val"], rope.kwargs["q"])
            kwargs = {**rope.kwargs, "prepared_q": buffer, "provider": self.provider}
            fused, (_, new_q, new_k_pe, prepared) = functionalized_call(
                graph, ops.get(ops.FUSED), kwargs
            )
        replace(graph, [prep], prepared)
        replace(graph, outputs(rope, 1), new_q)
        replace(graph, outputs(rope, 2), new_k_pe)
        for dummy in outputs(rope, 0):
            # It ordered the cache write before the attention; the prepared query does so now.
            for user in list(dummy.users):
                user.kwargs = {k: None if v is dummy else v for k, v in user.kwargs.items()}
            graph.erase_node(dummy)
        graph.erase_node(rope)
        return fused


def _rope_of(prep: Any) -> fx.Node | None:
    """The canonical RoPE node whose query `prep`, if it is a query preparation, reads."""
    if called(prep) != f"{ops.NAMESPACE}::{ops.Q_PREP}":
        return None
    q, layer_name, *_ = prep.args
    if made_by(q) != f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}" or q.args[1] != 1:
        return None
    rope: fx.Node = q.args[0]
    return rope if rope.kwargs["layer_name"] == layer_name else None
