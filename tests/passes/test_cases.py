"""The seven cases of CONTRIBUTING.md, for passes 2 to 5 one by one and for 2 to 4 together.

The graphs are traced from vLLM's own RoPE code. What only one pass does is in
test_single_passes.py and test_fix_functionalization.py; the cases of pass 6 in test_output.py.
"""

import pytest
import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.passes.pipeline import by_argument
from mla_fusion.passes.rewrite import PassResult
from mla_fusion.patterns import inplace
from mla_fusion.patterns.site import functionalized_op, made_by
from tests.passes import edits, graphs, programs
from tests.passes.fake_engine import BATCHES, assert_same, fuse, reasons, run
from tests.passes.graphs import Spec, build, find, find_all, printed
from tests.passes.numbered import after_pass, passes
from tests.passes.rotations import ROPES, SCALINGS

aten = torch.ops.aten
FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"
ATTENTION = f"{ops.NAMESPACE}::{ops.ATTENTION}"
NUMBERS = (2, 3, 4, 5)

SPELLINGS = [Spec(rope, neox) for rope in ROPES for neox in (False, True)]
VARIANTS = [
    *(Spec(rope, q_lora=True, layer_name="constant", dynamic=False) for rope in ROPES),
    Spec("native", dtype=torch.bfloat16, table_dtype=torch.float32),
    Spec("native_late_cast", dtype=torch.bfloat16, table_dtype=torch.float32),
    Spec("flashinfer", dtype=torch.bfloat16, table_dtype=torch.float32),
]
BF16 = torch.bfloat16
SCALED_BF16 = [Spec(rope, dtype=BF16, scaled="in_place") for rope in ("native", "nope")]
SCALED = [
    *(Spec(rope, rope != "native", scaled="in_place") for rope in ROPES),
    *(Spec("flashinfer", dtype=BF16, scaled=scaled) for scaled in SCALINGS),
]
CHAINS = [Spec(rope, layers=2, scaled="in_place" * (rope == "deepseek")) for rope in ROPES]
ALL = SPELLINGS + VARIANTS + SCALED + CHAINS

# A rotation by another kernel, or in another order, differs in the last bits. fp32: 2**-24 times
# a few dozen additions; bf16: one rounding of 2**-9 to either side.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


# --- each pass alone


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_to_do_is_the_same_object(number):
    """No MLA layer, or none that the pass before this one rewrote."""
    modules = [fx.symbolic_trace(lambda x: x + 1)]
    modules += [build(Spec("deepseek"))] if number > 2 else []
    for module in modules:
        graph, before = module.graph, printed(module)
        assert passes(Spec())[number](graph) == PassResult()
        assert module.graph is graph
        assert printed(module) == before


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_pass_alone_keeps_the_results_of_a_chain(number, rope, plain_kernels):
    spec = Spec(rope, layers=2)
    module, step = after_pass(min(number, 4) - 1, spec), passes(spec)[number]
    if number == 5:
        fuse(module := build(spec), spec)
    result = step(module.graph)
    module.graph.lint()
    named = [node.kwargs["layer_name"].name for node in result.rewritten.values()]
    assert named == sorted(["layer_name_0", "layer_name_1"] * (2 if number == 5 else 1))
    assert result.declined == []
    for batch in BATCHES.values():
        # The canonical op calls what the graph called: even a decode batch is exact.
        tolerance = None if number == 2 else TOLERANCE[torch.float32]
        assert_same(run(build(spec), spec, batch), run(module, spec, batch), batch,
                    tolerance=tolerance)  # fmt: skip
    before = printed(module)
    again = step(module.graph)
    assert (again.rewritten, printed(module)) == ({}, before)
    assert reasons(again) == (["cache-update"] * 2 if number == 2 else [])


# --- passes 2 to 4 together, and pass 5 after them


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_matched(spec):
    module = build(spec)
    module.graph.eliminate_dead_code()  # AOT autograd leaves dead code of its own
    old = set(module.graph.nodes)
    names = [call.kwargs["layer_name"] for call in find_all(module, edits.ATTENTION)]
    record = fuse(module, spec)
    assert (record.layers, record.fused, record.declined) == (spec.layers, spec.layers, {})
    calls = zip(names, find_all(module, FUSED), find_all(module, ATTENTION), strict=True)
    for name, fused, attention in calls:
        assert fused.kwargs["layer_name"] == attention.kwargs["layer_name"] == name
        assert fused.kwargs["is_neox"] is (spec.is_neox and spec.rope != "nope")
        for index, argument in ((1, "q"), (2, "k_pe"), (3, "prepared_q")):
            assert attention.kwargs[argument].args == (fused, index)
        unrotated = fused.kwargs["q"]
        assert unrotated.target is aten.reshape.default
        assert unrotated.args[0].target is aten.mm.default
    [factor] = {fused.kwargs["q_factor"] for fused in find_all(module, FUSED)}  # all share it
    check_factor(factor, spec)
    left = {functionalized_op(node) for node in module.graph.nodes} - {""}
    assert left == {FUSED, ATTENTION}
    assert not find_all(module, edits.UPDATE)
    check_metadata(module, old)
    before = printed(module)
    module.graph.eliminate_dead_code()
    again = fuse(module, spec)
    assert (again.layers, again.fused, again.declined) == (0, 0, {})
    assert printed(module) == before
    module.recompile()
    assert len(MLAFixFunctionalizationPass()(module.graph).rewritten) == 2 * spec.layers
    module.graph.lint()
    assert not [n for n in module.graph.nodes if functionalized_op(n)]
    assert not find_all(module, aten.slice_scatter.default)
    assert not find_all(module, aten.copy.default)
    fused, attention = find(module, FUSED), find(module, ATTENTION)
    for name in ("q", "k_pe", "prepared_q"):
        assert attention.kwargs[name] is fused.kwargs[name]
    assert fused.meta["val"] is None
    check_metadata(module, old)


def check_factor(factor, spec):
    """One number per token, rounded if the graph rounds it, and no product with the query."""
    if not spec.scaled:
        assert factor is None
        return
    value = factor.meta["val"]
    assert (value.dim(), value.is_contiguous()) == (1, True)
    assert value.dtype is (spec.dtype if spec.scaled == "rounded" else torch.float32)
    products = [n for n in find_all(factor.graph.owning_module, aten.mul.Tensor)
                if n.meta["val"].dim() == 3]  # fmt: skip
    assert not products


def check_metadata(module, old):
    """Invariant 10: each new node has a value of the right shape, from its op's own fake."""
    new = [n for n in module.graph.nodes if n not in old]
    assert new
    for node in new:
        assert "val" in node.meta, node.name
        if functionalized_op(node) == FUSED:
            q, k_pe, buffer = (
                node.kwargs[name].meta["val"] for name in ("q", "k_pe", "prepared_q")
            )
            assert list(buffer.shape[1:]) == [graphs.HEADS, graphs.LATENT + graphs.ROPE]
            values = node.meta["val"]
            for value, want in zip(values[1:], (q, k_pe, buffer), strict=True):
                assert (value.shape, value.dtype) == (want.shape, want.dtype)
            for user in node.users:
                assert user.meta["val"] is values[user.args[1]]


def assert_kept(module, spec, reason):
    """No layer fuses, each declines for `reason`, and the graph is the same code."""
    before = printed(module)
    record = fuse(module, spec)
    assert record.fused == 0
    assert reasons(record) == [reason] * spec.layers
    assert printed(module) == before


@pytest.mark.parametrize("name", edits.NEAR_MISSES)
def test_near_miss_is_kept(name):
    assert_kept(*edits.near_miss(name))


def test_a_write_of_the_cache_in_front_of_the_attention_is_kept():
    module = build(Spec("nope"))
    programs.write_again(module, None, 4)
    assert_kept(module, Spec("nope"), "cache-update")


@pytest.mark.parametrize("spec", [*map(Spec, ROPES), *SCALED_BF16], ids=str)
def test_missing_metadata_is_a_decline(spec):
    """Of one node: of what the attention reads; of others the layer may match all the same."""
    step, whole = passes(spec)[2], build(spec)
    before, given = printed(whole), edits.attention(whole).kwargs
    needed = [given[name] for name in ("q", "kv_c_normed", "k_pe", "output")]
    if spec.scaled:  # and the product and what it multiplies
        product = needed[0].all_input_nodes[0]
        needed += [product, product.args[0]]
    for node in whole.graph.nodes:
        module = build(spec)
        if not node.name.startswith("layer_name"):  # without it the layer is unknown
            edits.node_named(module, node.name).meta.pop("val", None)
        found = reasons(step(module.graph))
        assert found == ["missing-metadata"] or not (found or node in needed), node.name
        assert not found or printed(module) == before


@pytest.mark.parametrize("spec", SPELLINGS, ids=str)
def test_a_value_that_something_else_reads_is_kept(spec):
    rotated = () if spec.rope == "nope" else ("q", "k_pe")
    for argument in (*rotated, "kv_cache_dummy_dep"):
        module = build(spec)
        edits.read_also(module, edits.attention(module).kwargs[argument])
        assert_kept(module, spec, "shared-rotation")
    module = build(spec)
    call, end = edits.attention(module), module.graph.output_node()
    edits.add(module, end, aten.abs.default, call.kwargs["q"])
    assert fuse(module, spec).fused == 1  # what nothing reads does not count
    for name in [n.name for n in build(spec).graph.nodes if made_by(n) in inplace.OPS]:
        module = build(spec)
        output = edits.node_named(module, name)  # of which another getitem is read
        edits.read_also(module, edits.add(module, output.next, output.target, *output.args))
        assert_kept(module, spec, "shared-rotation")


def test_one_layer_of_a_chain_is_kept(plain_kernels):
    spec = Spec("deepseek", layers=3)
    module = build(spec)
    kept = edits.attention(module, 1)
    edits.read_also(module, kept.kwargs["q"])
    before = graphs.copy(module)
    record = fuse(module, spec)
    assert record.fused == 2
    assert reasons(record) == ["shared-rotation"]
    assert find(module, edits.ATTENTION) is kept
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch, tolerance=1e-5)


@pytest.mark.parametrize("spec", [Spec("native"), Spec("flashinfer", layers=2)], ids=str)
def test_unchanged_graph_is_the_same_object(spec):
    module = build(spec)
    graph, nodes, before = module.graph, list(module.graph.nodes), printed(module)
    metas = [dict(node.meta) for node in nodes]
    record = fuse(module, spec, by_argument({}))
    assert reasons(record) == ["unknown-layer"] * spec.layers
    assert module.graph is graph
    assert list(graph.nodes) == nodes
    assert [dict(node.meta) for node in nodes] == metas
    assert printed(module) == before


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_numerics_are_equal(spec, plain_kernels):
    """Invariant 3: a batch that is not decode-only is exact, also after everything is in-place."""
    module = build(spec)
    fuse(module, spec)
    in_place = graphs.copy(module)
    MLAFixFunctionalizationPass()(in_place.graph)
    bf16 = spec.dtype is torch.bfloat16
    native = spec.rope in ("native", "native_late_cast", "deepseek")
    for batch in BATCHES.values():
        # Eager torch rounds every product of a bf16 rotation, as a compiled graph does not.
        exact = not batch.decode_only and not (bf16 and native)
        tolerance = None if exact else TOLERANCE[spec.dtype]
        before = run(build(spec), spec, batch)
        for after in (module, in_place):
            assert_same(before, run(after, spec, batch), batch, tolerance=tolerance)


@pytest.mark.parametrize("rope", ["flashinfer", "nope"])
@pytest.mark.parametrize("quantized", [False, True])
def test_fp8_cache(rope, quantized, plain_kernels):
    """Equal to the byte, but for a rotated value: it is rounded once, and not twice as before."""
    spec = Spec(rope, dtype=torch.bfloat16, kv_cache_dtype="fp8")
    module = build(spec)
    assert fuse(module, spec, quantized_query=quantized).fused == 1
    wanted = torch.float8_e4m3fn if quantized else torch.bfloat16
    assert find(module, FUSED).kwargs["prepared_q"].meta["val"].dtype is wanted
    for batch in BATCHES.values():
        before, after = (run(m, spec, batch, quantized) for m in (build(spec), module))
        tolerance = 0.13 if rope != "nope" and batch.decode_only else None  # one step of fp8
        assert_same(before, after, batch, tolerance=tolerance)


def test_changes_are_those_of_one_layer():
    spec = Spec("deepseek", layers=3)
    layer = fuse(build(spec), spec).layer
    assert layer is not None
    changes = {op: counts for op, *counts in layer.changes()}
    assert changes[edits.ATTENTION] == changes[edits.UPDATE] == [1, 0]
    assert changes[FUSED] == changes[ATTENTION] == [0, 1]
    assert len(layer.after) < len(layer.before)
