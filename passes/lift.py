"""Pass 3: the decode query preparation leaves the attention op and becomes a node of its own.

    before   q ─────────────────► unified_mla_attention_with_output

    after    q ─┬───────────────► mla_attention_with_prepared_query
                └► mla_decode_q_prep ─►

Safe because vLLM's op does the same inside, for the decode tokens of the batch, and the new op
falls through to vLLM's code for any other batch. Only calls that pass 2 made canonical are lifted:
without pass 4 the lift would add a launch and save none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_fusion import ops
from mla_fusion.config.eligibility import LayerFacts
from mla_fusion.passes.rewrite import PassResult, call, functionalized_call, replace
from mla_fusion.patterns.site import attention_calls, made_by, outputs


@dataclass
class MLADecodeQPrepLiftPass:
    """`facts_of` as for pass 2: the type of the prepared query follows from the facts."""

    facts_of: Callable[[Any], LayerFacts]

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for attention in attention_calls(graph):
            q: Any = attention.kwargs["q"]
            if made_by(q) == f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}":
                facts = self.facts_of(attention.kwargs["layer_name"])
                result.rewritten[attention.name] = _rewrite(graph, attention, facts)
        return result


def _rewrite(graph: fx.Graph, attention: fx.Node, facts: LayerFacts) -> fx.Node:
    args = attention.kwargs
    q, kv_c, k_pe = args["q"], args["kv_c_normed"], args["k_pe"]
    value, latent, rope = q.meta["val"], kv_c.meta["val"].shape[-1], k_pe.meta["val"].shape[-1]
    dtype = facts.query_dtype(value.dtype)
    made = value.new_empty((*value.shape[:2], latent + rope), dtype=dtype)
    with graph.inserting_before(attention):
        given = (q, args["layer_name"], latent, rope, dtype)
        prepared = call(graph, ops.get(ops.Q_PREP), given, made)
        same = ("k_pe", "output", "layer_name", "kv_cache_dummy_dep")
        kwargs = {"q": q, "prepared_q": prepared, "kv_c": kv_c} | {k: args[k] for k in same}
        new, (_, output) = functionalized_call(graph, ops.get(ops.ATTENTION), kwargs)
    replace(graph, outputs(attention, 1), output)
    graph.erase_node(attention)
    return new
