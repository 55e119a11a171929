"""Pass 3: the decode query preparation leaves the attention op and becomes a node of its own.

    before   q ─────────────────► unified_mla_attention_with_output

    after    q ─┬───────────────► mla_attention_with_prepared_query
                └► mla_decode_q_prep ─►

Safe because vLLM's op does the same inside, for the decode tokens of the batch, and the new op
falls through to vLLM's code for any other batch. Only calls that pass 2 made canonical are lifted:
without pass 4 the lift would add a launch and save none.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from mla_fusion import ops
from mla_fusion.config.eligibility import LayerFacts
from mla_fusion.passes.rewrite import PassResult, call, functionalized_call
from mla_fusion.patterns.site import attention_calls, made_by, op_name, outputs


class MLADecodeQPrepLiftPass:
    """`facts_of` as for pass 2: the type of the prepared query follows from the facts."""

    def __init__(self, facts_of: Callable[[Any], LayerFacts | None]) -> None:
        self.facts_of = facts_of

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for attention in attention_calls(graph):
            facts = self.facts_of(attention.kwargs["layer_name"])
            q: Any = attention.kwargs["q"]
            canonical = made_by(q) == f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}"
            if facts is not None and canonical and not _is_lifted(q):
                result.rewritten[attention.name] = _rewrite(graph, attention, facts)
                result.dead.append(attention)
        return result


def _is_lifted(q: fx.Node) -> bool:
    """A lifted call stays in the graph, dead, until the end of the pipeline."""
    return any(op_name(user.target) == f"{ops.NAMESPACE}::{ops.Q_PREP}" for user in q.users)


def _rewrite(graph: fx.Graph, attention: fx.Node, facts: LayerFacts) -> fx.Node:
    args = attention.kwargs
    q, kv_c, k_pe = args["q"], args["kv_c_normed"], args["k_pe"]
    latent, rope = kv_c.meta["val"].shape[-1], k_pe.meta["val"].shape[-1]
    value = q.meta["val"]
    dtype = facts.query_dtype(value.dtype)
    with graph.inserting_before(attention):
        prepared = call(
            graph,
            ops.get(ops.Q_PREP),
            (q, args["layer_name"], latent, rope, dtype),
            value.new_empty((*value.shape[:2], latent + rope), dtype=dtype),
        )
        new, (_, output) = functionalized_call(
            graph,
            ops.get(ops.ATTENTION),
            {
                "q": q,
                "prepared_q": prepared,
                "kv_c": kv_c,
                "k_pe": k_pe,
                "output": args["output"],
                "layer_name": args["layer_name"],
                "kv_cache_dummy_dep": args["kv_cache_dummy_dep"],
            },
        )
    for read in outputs(attention, 1):
        read.replace_all_uses_with(output)
    return new
