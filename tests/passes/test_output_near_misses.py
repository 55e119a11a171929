"""Quantizations that pass 6 must keep: one difference each from what the epilogue computes."""

import functools

import pytest
import torch
from torch import fx

from mla_fusion.patterns import output_quantization
from mla_fusion.report.reasons import Declined
from tests.passes import edits, graphs, linears
from tests.passes.graphs import HEADS, find
from tests.passes.numbered import after_pass
from tests.passes.test_output import BF16, assert_kept, quantization, spec_of

aten = torch.ops.aten
WIDTH = HEADS * linears.GROUP
CAST = torch.ops.prims.convert_element_type.default


_through = functools.partial(edits.through, quantization)


def _argument(**values):
    return lambda module: edits.set_argument(quantization(module), **values)


def _division(module):
    """x / scale where it was x * (1 / scale): the same up to a rounding."""
    product = find(module, aten.reciprocal.default)
    [times] = product.users
    quotient = edits.add(module, times, aten.div.Tensor, times.args[0], product.args[0])
    times.replace_all_uses_with(quotient)


def _less_clamped(module):
    find(module, aten.clamp_max.default).update_arg(1, 240.0)


def _rounded_first(module):
    """The product is rounded to bf16 before it is clamped."""
    clamp = find(module, aten.clamp_min.default)
    rounded = edits.add(module, clamp, CAST, clamp.args[0], BF16)
    wide = edits.add(module, clamp, CAST, rounded, torch.float32)
    clamp.replace_input_with(clamp.args[0], wide)


def _other_order(module):
    """One row of all."""
    node = quantization(module)
    flat = edits.add(module, node, aten.reshape.default, node.args[0], [-1])
    node.replace_input_with(node.args[0], flat)


def _another_value(module):
    """The scale comes from two values."""
    product = find(module, aten.reciprocal.default)
    scale = edits.node_named(module, "o_scale")
    other = edits.add(module, product, aten.neg.default, scale)
    twice = edits.add(module, product, aten.mul.Tensor, scale, other)
    product.replace_input_with(scale, twice)


def _twice(name):
    """Two of what an argument is, one after the other."""

    def edit(module):
        call = quantization(module)
        given = call.kwargs[name]
        twice = edits.add(module, call, aten.cat.default, [given, given])
        edits.set_argument(call, **{name: twice})

    return edit


# name -> (quantization, edit, what the detail names)
NEAR_MISSES = {
    "packed": ("group_packed", edits.nothing, "per_token_group_fp8_quant_packed"),
    "groups of 64": ("group_of_64", edits.nothing, "group_size 64"),
    "aten ops of groups": ("group_native", edits.nothing, "in aten ops"),
    "a scale of each token": ("per_token", edits.nothing, "per_token_quant"),
    "another least maximum": ("group", _argument(eps=1e-6), "eps"),
    "another most": ("group", _argument(fp8_max=240.0), "fp8_max 240"),
    "scales in bytes": ("group_ue8m0", _through("output_s", CAST, torch.uint8), "uint8"),
    "two scales": ("tensor", _twice("scale"), "a scale [2]"),
    "a scale in fp64": ("tensor", _through("scale", CAST, torch.float64), "float64"),
    "padded rows": ("tensor", _twice("result"), "padded rows"),
    "integers": ("tensor", _through("result", CAST, torch.int8), "int8"),
    "division": ("tensor_native", _division, "in aten ops"),
    "rounded before": ("tensor_native", _rounded_first, "another formula"),
    "less clamped": ("tensor_native", _less_clamped, "formula"),
    "of another shape": ("tensor_native", _other_order, "formula"),
    "of two values": ("tensor_native", _another_value, "other values"),
    "values of padded rows": ("group", _twice("output_q"), "padded"),
    "scales of padded rows": ("group", _twice("output_s"), "padded"),
    "inside an op": ("opaque", edits.nothing, "dynamic_flashinfer_deepgemm"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_kept(name):
    quantized, edit, detail = NEAR_MISSES[name]
    spec = spec_of(quantized)
    module = after_pass(4, spec)
    edit(module)
    reason = "opaque" if quantized == "opaque" else "quantization"
    assert_kept(module, spec, f"output-{reason}", detail)


def _given(graph, name, *shape, dtype=BF16):
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape, dtype=dtype)
    return node


def test_an_output_that_the_quantization_writes_over_is_not_the_quantized_one():
    """The op takes it as the buffer of its scales, and quantizes another value."""
    graph = fx.Graph()
    output = _given(graph, "output", 3, WIDTH, dtype=torch.float32)
    other = _given(graph, "other", 3, WIDTH * linears.GROUP)
    result = _given(graph, "result", 3, WIDTH * linears.GROUP, dtype=linears.FP8)
    arguments = (other, result, output, linears.GROUP, 1e-10, -448.0, 448.0, False, False, False)
    values = (None, result.meta["val"], output.meta["val"])
    graph.output(
        graphs.functionalized(
            graph, torch.ops._C.per_token_group_fp8_quant.default, arguments, values
        )
    )
    with pytest.raises(Declined, match="of another value"):
        output_quantization.read([output])


@pytest.mark.parametrize(
    "target, args", [(aten.alias.default, ()), (aten.permute.default, ([1, 0],)),
                     (aten.transpose.int, (0, 1))], ids=str,
)  # fmt: skip
def test_a_square_output_that_is_transposed_is_not_the_quantized_one(target, args):
    """With as many tokens as columns only the order of the values differs."""
    graph = fx.Graph()
    output = _given(graph, "output", WIDTH, WIDTH)
    result = _given(graph, "result", WIDTH, WIDTH, dtype=linears.FP8)
    scale = _given(graph, "scale", 1, dtype=torch.float32)
    view = graph.call_function(target, (output, *args))
    view.meta["val"] = output.meta["val"]
    arguments, values = (result, view, scale, None), (None, result.meta["val"])
    graph.output(graphs.functionalized(graph, linears.STATIC_QUANTIZE, arguments, values))
    if target is aten.alias.default:
        assert output_quantization.read([output]).arguments["scale"] is scale
        return
    with pytest.raises(Declined, match=target._overloadpacket.__name__) as declined:
        output_quantization.read([output])
    assert declined.value.decline.code == "output-unquantized"
