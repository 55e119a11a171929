"""Pass 3: the decode query preparation leaves the attention op and becomes a node of its own.

    before   q ─────────────────► unified_mla_attention_with_output

    after    q ─┬───────────────► mla_attention_with_prepared_query
                └► mla_decode_q_prep ─►

Safe because vLLM's op does the same inside, for the decode tokens of the batch, and the new op
falls through to vLLM's code for any other batch. Only calls that pass 2 made canonical are lifted:
without pass 4 the lift would add a launch and save none."""

from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import FactsOf, PassResult, call, functionalized_call, replace
from mla_fusion.patterns.site import attention_calls, made_by, outputs


@dataclass
class MLADecodeQPrepLiftPass:
    """The type of the prepared query follows from the facts."""

    facts_of: FactsOf

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for attention in attention_calls(graph):
            q: Any = attention.kwargs["q"]
            if made_by(q) == f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}":
                result.rewritten[attention.name] = self._rewrite(graph, attention)
        return result

    def _rewrite(self, graph: fx.Graph, attention: fx.Node) -> fx.Node:
        args = attention.kwargs
        q, kv_c, name = args["q"], args["kv_c_normed"], args["layer_name"]
        latent, rope = (node.meta["val"].shape[-1] for node in (kv_c, args["k_pe"]))
        value, dtype = q.meta["val"], self.facts_of(name).query
        made = value.new_empty((*value.shape[:2], latent + rope), dtype=dtype)
        with graph.inserting_before(attention):
            prepared = call(graph, ops.get(ops.Q_PREP), (q, name, latent, rope, dtype), made)
            same = ("q", "k_pe", "output", "layer_name", "kv_cache_dummy_dep")
            kwargs = {"prepared_q": prepared, "kv_c": kv_c} | {k: args[k] for k in same}
            new, (_, output) = functionalized_call(graph, ops.get(ops.ATTENTION), kwargs)
        replace(graph, outputs(attention, 1), output)
        graph.erase_node(attention)
        return new
