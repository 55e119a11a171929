"""What pass 6 makes of views of the attention's output, and of buffers that two layers share."""

import pytest
import torch
from torch import fx

from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.patterns import output_quantization
from mla_fusion.patterns.site import functionalized_op
from mla_fusion.report.reasons import Declined
from tests.passes import edits, graphs, linears
from tests.passes.fake_engine import BATCHES, assert_same, fuse, run
from tests.passes.graphs import HEADS, Spec, build, find_all
from tests.passes.test_output import BF16, QUANTIZE, quantization

aten = torch.ops.aten
WIDTH = HEADS * linears.GROUP
TURNS = {
    "alias": (aten.alias.default, ()),
    "permute": (aten.permute.default, ([1, 0],)),
    "transpose": (aten.transpose.int, (0, 1)),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_square_output_that_is_transposed_is_not_the_quantized_one(name):
    """With as many tokens as columns only the order of the values differs."""
    graph = fx.Graph()

    def given(name, *shape, dtype=BF16):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    output = given("output", WIDTH, WIDTH)
    result = given("result", WIDTH, WIDTH, dtype=linears.FP8)
    scale = given("scale", 1, dtype=torch.float32)
    target, args = TURNS[name]
    view = graph.call_function(target, (output, *args))
    view.meta["val"] = output.meta["val"]
    arguments, values = (result, view, scale, None), (None, result.meta["val"])
    graph.output(graphs.functionalized(graph, linears.STATIC_QUANTIZE, arguments, values))
    if name == "alias":
        assert output_quantization.read([output]).scale is scale
        return
    with pytest.raises(Declined, match=name) as declined:
        output_quantization.read([output])
    assert declined.value.decline.code == "output-unquantized"


@pytest.mark.parametrize("quantized", ["group_tma", "tensor"])
def test_two_layers_may_quantize_into_the_same_buffers(quantized):
    """The first op then writes copies: the second one overwrites what it reads from."""
    spec = Spec("nope", dtype=BF16, quantized=quantized, layers=2)
    module = build(spec)
    first, second = find_all(module, QUANTIZE[quantized != "tensor"])
    names = ("result",) if quantized == "tensor" else ("output_q", "output_s")
    edits.set_argument(second, **{name: first.kwargs[name] for name in names})
    module.graph.eliminate_dead_code()
    before = graphs.copy(module)
    assert fuse(module, spec).outputs == {linears.kind(quantized): 2}
    MLAFixFunctionalizationPass(None)((in_place := graphs.copy(module)).graph)
    assert [bool(functionalized_op(n)) for n in in_place.graph.nodes].count(True) == 1
    for batch in (BATCHES["decode"], BATCHES["padded"], BATCHES["mixed"]):
        for after in (module, in_place):
            assert_same(run(before, spec, batch), run(after, spec, batch), batch)


def test_each_layer_keeps_its_own_quantization():
    """Of two layers one has scales that are powers of two."""
    spec = Spec("nope", dtype=BF16, quantized="group", layers=2)
    module = build(spec)
    edits.set_argument(quantization(module, 1), scale_ue8m0=True)
    before = graphs.copy(module)
    assert fuse(module, spec).outputs == {"group": 1, "group_ue8m0": 1}
    MLAFixFunctionalizationPass(None)(module.graph)
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch)
