"""Pass 6 in the seven cases of CONTRIBUTING.md, on graphs traced from vLLM's own quantizations."""

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from mla_fusion import ops
from mla_fusion.attention.plan import epilogue
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.passes.output import MLADecodeOutputFusionPass
from mla_fusion.passes.pipeline import by_argument
from mla_fusion.passes.rewrite import PassResult
from mla_fusion.patterns.site import functionalized_op
from mla_fusion.report.reasons import Decline
from tests.passes import edits, graphs, linears, programs
from tests.passes.fake_engine import BATCHES, Engine, assert_same, fuse, reasons, run
from tests.passes.graphs import HEADS, Spec, build, find, find_all, printed
from tests.passes.numbered import after_pass, passes

aten, prims = torch.ops.aten, torch.ops.prims
BF16 = torch.bfloat16
ATTENTION, GROUPS, TENSOR = (f"{ops.NAMESPACE}::{name}" for name in ops.ATTENTION_OPS)
QUANTIZE = {True: "_C::per_token_group_fp8_quant", False: "_C::static_scaled_fp8_quant"}
ALL = [
    *(Spec("nope", dtype=BF16, quantized=name) for name in linears.FUSED),
    Spec("flashinfer", dtype=BF16, quantized="group_tma", q_lora=True, layer_name="constant"),
    Spec("nope", dtype=BF16, quantized="tensor_native", dynamic=False),
    Spec("nope", dtype=torch.float16, quantized="tensor_native"),
]


def kind(spec):
    return linears.kind(spec.quantized)


def in_groups(spec):
    return epilogue.in_groups(kind(spec))


def spec_of(quantized="group", **options):
    return Spec("nope", dtype=BF16, quantized=quantized, **options)


def quantization(module, layer=0):
    """The node that makes the fp8 values in front of o_proj."""
    values = find(module, "mla_fusion_tests::fp8_linear", layer).args[0]
    return values if values.target is prims.convert_element_type.default else values.args[0]


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_matched(spec):
    module = build(spec)
    module.graph.eliminate_dead_code()
    old = set(module.graph.nodes)
    record = fuse(module, spec)
    assert (record.fused, record.outputs, record.plain_outputs) == (1, {kind(spec): 1}, {})
    new = find(module, GROUPS if in_groups(spec) else TENSOR)
    assert functionalized_op(new) and not find_all(module, ATTENTION)
    values, scales, _ = find(module, "mla_fusion_tests::fp8_linear").args
    assert values.args == (new, 2)
    assert (values.meta["val"].dtype, values.meta["val"].shape[1]) == (linears.FP8, HEADS * 128)
    spelling = {
        "group_ue8m0": ops.Quantization.GROUP_UE8M0,
        "tensor": ops.Quantization.TENSOR,
        "tensor_native": ops.Quantization.TENSOR_NATIVE,
    }.get(spec.quantized, ops.Quantization.GROUP)
    assert new.kwargs["quantization"] == spelling and spelling.kind == kind(spec)
    if in_groups(spec):
        assert scales.args == (new, 3)
        assert scales.meta["val"].stride(0) == (2 if spec.quantized == "group" else 1)
    else:
        assert scales is new.kwargs["scale"] and scales.name == "o_scale"
    assert not find_all(module, QUANTIZE[in_groups(spec)])
    assert not find_all(module, aten.reciprocal.default)
    for node in set(module.graph.nodes) - old:
        assert "val" in node.meta, node.name
    before = printed(module)
    module.graph.eliminate_dead_code()
    assert printed(module) == before
    MLAFixFunctionalizationPass()(module.graph)
    module.graph.lint()
    assert not find_all(module, aten.clone.default)
    assert not [n for n in module.graph.nodes if n.target is auto_functionalized]
    buffer = find(module, GROUPS if in_groups(spec) else TENSOR).kwargs["quantized"]
    assert find(module, "mla_fusion_tests::fp8_linear").args[0] is buffer


def assert_kept(module, spec, reason, detail="", step=None):
    """No output is quantized, each for `reason`, and the graph is the same code."""
    before = printed(module)
    result = (step or passes(spec)[6])(module.graph)
    assert (result.rewritten, set(reasons(result))) == ({}, {reason})
    assert all(detail in declined.detail for declined in result.declined)
    assert printed(module) == before


@pytest.mark.parametrize("spec", [ALL[0], ALL[3], ALL[4]], ids=str)
def test_missing_metadata_is_a_decline(spec):
    """Without the metadata of one node the output is quantized all the same, or says why not.

    Pass 2 saw to what the attention reads.
    """
    nodes = list(after_pass(4, spec).graph.nodes)
    codes = set()
    for index, node in enumerate(nodes):
        attended = any(functionalized_op(user) == ATTENTION for user in node.users)
        if attended or node.name.startswith("layer_name"):
            continue
        module = after_pass(4, spec)
        before = printed(module)
        list(module.graph.nodes)[index].meta.pop("val", None)
        result = passes(spec)[6](module.graph)
        module.graph.lint()
        codes |= set(reasons(result))
        if result.declined:
            assert printed(module) == before
    assert codes == {"missing-metadata"}


def output_of(module, layer=0):
    """The attention's output [T, H * V]."""
    attention = find(module, ATTENTION, layer)
    return next(user for user in attention.users if user.args[1] == 1)


@pytest.mark.parametrize("quantized", linears.FUSED)
def test_views_of_the_same_shape_are_seen_through(quantized):
    spec = spec_of(quantized)
    module = after_pass(4, spec)
    output = output_of(module)
    users = list(output.users)
    view = edits.add(module, output.next, aten.alias.default, output)
    for user in users:
        user.replace_input_with(output, view)
    assert len(passes(spec)[6](module.graph).rewritten) == 1


@pytest.mark.parametrize("quantized", ["group_tma", "tensor_native"])
def test_chain(quantized):
    """The second of three layers is read elsewhere, and kept."""
    spec = spec_of(quantized, layers=3)
    module = build(spec)
    edits.read_also(module, next(u for u in edits.attention(module, 1).users if u.args[1] == 1))
    before = graphs.copy(module)
    record = fuse(module, spec)
    assert (record.fused, record.outputs) == (3, {kind(spec): 2, "none": 1})
    assert [d.code for d in record.plain_outputs] == ["output-shared"]
    names = [
        [n.kwargs["layer_name"].name for n in find_all(module, op)]
        for op in (ATTENTION, GROUPS if in_groups(spec) else TENSOR)
    ]
    assert names == [["layer_name_1"], ["layer_name_0", "layer_name_2"]]
    in_place = graphs.copy(module)
    MLAFixFunctionalizationPass()(in_place.graph)
    for batch in (BATCHES["decode"], BATCHES["mixed"]):
        for after in (module, in_place):
            assert_same(run(before, spec, batch), run(after, spec, batch), batch)


def test_nothing_to_do_is_the_same_object():
    """No MLA layer, or none that pass 4 fused, or one without a reader."""
    unread = after_pass(4, spec_of())
    output_of(unread).replace_all_uses_with(find(unread, ATTENTION).kwargs["output"])
    unread.graph.erase_node(output_of(unread))
    for module in (fx.symbolic_trace(lambda x: x + 1), build(spec_of()), unread):
        graph, before = module.graph, printed(module)
        assert passes(spec_of())[6](graph) == PassResult()
        assert module.graph is graph and printed(module) == before


@pytest.mark.parametrize(
    "spec, code, detail",
    [
        (spec_of(""), "output-epilogue", "vLLM's backend decodes"),
        (Spec("nope", quantized="group"), "output-epilogue", "W_UV is torch.float32"),
    ],
)
def test_layers_whose_decode_has_no_epilogue(spec, code, detail):
    module = after_pass(4, spec)
    assert_kept(module, spec, code, detail)
    assert_kept(module, spec, "unknown-layer", step=MLADecodeOutputFusionPass(by_argument({})))


def test_a_write_of_the_cache_in_front_of_the_quantization_keeps_the_output():
    module = build(spec_of())
    programs.write_again(module, None, 0)
    [reason] = fuse(module, spec_of()).plain_outputs
    assert reason == Decline(
        "output-quantization", f"behind {edits.UPDATE}, which writes the cache"
    )


def test_an_output_that_nothing_quantizes_is_no_decline_of_the_layer():
    spec, quantized = spec_of(""), spec_of()
    module = build(spec)
    record = fuse(module, spec, Engine(quantized).facts_of())
    assert (record.fused, record.declined, record.outputs) == (1, {}, {"none": 1})
    [reason] = record.plain_outputs
    assert (reason.code, reason.detail) == ("output-unquantized", "aten::addmm")
    assert "none needed" in reason.explain()


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_numerics_are_equal(spec, plain_kernels):
    """To the bit, as no layer has a plan: also after everything is in-place."""
    module, before = build(spec), build(spec)
    if spec.rope != "nope":  # passes 2 to 4 rotate a decode batch in another order
        fuse(before, spec, Engine(replace(spec, quantized="")).facts_of())
    fuse(module, spec)
    MLAFixFunctionalizationPass()((in_place := graphs.copy(module)).graph)
    for batch in BATCHES.values():
        wanted = run(before, spec, batch)
        for after in (module, in_place):
            assert_same(wanted, run(after, spec, batch), batch)


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
    MLAFixFunctionalizationPass()((in_place := graphs.copy(module)).graph)
    assert not any(map(functionalized_op, in_place.graph.nodes))
    clones = graphs.find_all(in_place, torch.ops.aten.clone.default)
    assert len(clones) == len(names)
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
    MLAFixFunctionalizationPass()(module.graph)
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch)
