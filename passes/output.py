"""Pass 6: the quantization in front of o_proj goes into the attention op.

    before   prepared query, ... ─► mla_attention_with_prepared_query
                                     [1] output ─► quantization ─► fp8, scales ─► o_proj

    after    prepared query, ..., two empty buffers ─► mla_attention_with_group_quantized_output
                                     [2] fp8, [3] scales ─► o_proj
       or    prepared query, ..., a buffer, scale ─► mla_attention_with_tensor_quantized_output
                                     [2] fp8 ─► o_proj

So the epilogue of a decode merges, multiplies with W_UV and quantizes. For a batch that is not
decode-only vLLM's attention still writes the buffer of the output, and its quantization reads it.

Safe because nothing but the quantization reads the output, because nothing writes the layer's cache
before that, and because the op quantizes as `patterns.output_quantization` found. An output that
stays as it is has a reason; that is no decline of the layer."""

from dataclasses import dataclass

from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import FactsOf, PassResult, empty, functionalized_call
from mla_fusion.patterns import output_quantization
from mla_fusion.patterns.output_quantization import OutputQuantization
from mla_fusion.patterns.site import ATTENTION, functionalized_op, made_by, naming, outputs
from mla_fusion.report.reasons import Declined

_READERS = {ATTENTION, *(f"{ops.NAMESPACE}::{name}" for name in ops.ATTENTION_OPS)}  # of the cache


@dataclass
class MLADecodeOutputFusionPass:
    """The facts say whether the decode has an epilogue."""

    facts_of: FactsOf

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for attention in filter(_is_fused, list(graph.nodes)):
            try:
                if why := self.facts_of(attention.kwargs["layer_name"]).plain_output:
                    raise Declined("output-epilogue", why)
                found = output_quantization.read(outputs(attention, 1))
                # The attention moves behind what is in between.
                between = {*naming(attention.kwargs["layer_name"], attention, found.last)}
                for op in sorted(between - _READERS):
                    raise Declined("output-quantization", f"behind {op}, which writes the cache")
            except Declined as declined:
                result.declined.append(declined.decline)
                continue
            if not any(node.users for node in found.results[0]):
                continue  # rewritten before, and dead until the end of the pipeline
            result.rewritten[attention.name] = _rewrite(graph, attention, found)
            result.dead += (attention, found.last)
        return result


def _is_fused(node: fx.Node) -> bool:
    """A call of the attention op whose query pass 4 prepares; without readers it is dead."""
    if functionalized_op(node) != f"{ops.NAMESPACE}::{ops.ATTENTION}" or not outputs(node, 1):
        return False
    return made_by(node.kwargs["prepared_q"]) == f"{ops.NAMESPACE}::{ops.FUSED}"


def _rewrite(graph: fx.Graph, attention: fx.Node, found: OutputQuantization) -> fx.Node:
    kwargs = {k: v for k, v in attention.kwargs.items() if k != "kv_cache_dummy_dep"}
    kwargs |= found.arguments | {"quantization": str(found.spelling)}
    op = ops.get(ops.GROUP_ATTENTION if "scales" in kwargs else ops.TENSOR_ATTENTION)
    with graph.inserting_before(found.last):
        if "quantized" not in kwargs:
            kwargs["quantized"] = empty(graph, found.last.meta["val"], kwargs["q"])
        new, (_, output, *made) = functionalized_call(graph, op, kwargs)
    graph.erase_node(output)  # nothing reads it
    for read, value in zip(found.results, made, strict=True):
        for node in read:
            node.replace_all_uses_with(value)
    return new
