"""What only pass 2, 3 or 4 does; the cases that all passes share are in test_cases.py."""

import operator

import pytest
import torch

from mla_fusion import ops
from mla_fusion.config.eligibility import LayerFacts
from mla_fusion.ops import Rope
from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.fuse import MLAAiterQkRopeKVCacheFusionPass
from mla_fusion.passes.pipeline import by_argument
from mla_fusion.patterns import probe
from mla_fusion.report.reasons import Decline
from tests.passes import edits
from tests.passes.graphs import HEADS, LATENT, ROPE, Spec, build, find, find_all, printed
from tests.passes.numbered import after_pass, passes
from tests.passes.rotations import ROPES

CANONICAL, Q_PREP, FUSED, ATTENTION = (
    f"{ops.NAMESPACE}::{name}" for name in (ops.ROPE_UPDATE, ops.Q_PREP, ops.FUSED, ops.ATTENTION)
)
ROPE_OF = dict(zip(ROPES, (Rope.NATIVE, Rope.NATIVE, Rope.VLLM_C, Rope.FLASHINFER,
                           Rope.AITER_TRITON, Rope.CAT_FUSED, Rope.NONE), strict=True))  # fmt: skip


def lift(module, spec):
    return list(passes(spec)[3](module.graph).rewritten)


def fuse_pairs(module, provider="reference"):
    return list(MLAAiterQkRopeKVCacheFusionPass(provider)(module.graph).rewritten)


# --- pass 2


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_canonical_node(rope, is_neox):
    spec = Spec(rope, is_neox)
    module = build(spec)
    attention = edits.attention(module)
    old = {name: attention.kwargs[name].meta["val"] for name in ("q", "k_pe")}
    result = passes(spec)[2](module.graph)
    node = find(module, CANONICAL)
    assert (result.rewritten, result.declined) == ({attention.name: node}, [])
    names = {k: getattr(v, "name", v) for k, v in node.kwargs.items()}
    rotates = rope != "nope"
    assert names["rope"] == ROPE_OF[rope]
    assert names["is_neox"] is (is_neox and rotates)
    assert names["positions"] == ("positions" if rotates else None)
    assert names["cos_sin_cache"] == ("table" if rotates else None)
    assert (names["k_scale"], names["layer_name"]) == ("k_scale", "layer_name_0")
    read = [attention.kwargs[a].args for a in ("kv_cache_dummy_dep", "q", "k_pe")]
    assert read == [(node, 0), (node, 1), (node, 2)]
    for name, value in old.items():
        for new in (attention.kwargs[name].meta["val"], node.kwargs[name].meta["val"]):
            assert (str(new.shape), new.dtype) == (str(value.shape), value.dtype)
    dummy = attention.kwargs["kv_cache_dummy_dep"].meta["val"]
    assert (tuple(dummy.shape), dummy.dtype) == ((0,), spec.dtype)


def test_details_name_the_obstacle():
    spec = Spec("native")
    module = build(spec)
    [unknown] = CanonicalizeMLARoPEPass(by_argument({}))(module.graph).declined
    assert unknown == Decline("unknown-layer", "layer_name_0")
    padded = Decline("padded-heads", "12 to 16")
    facts = LayerFacts(padded, *[torch.bfloat16] * 3)
    [refused] = CanonicalizeMLARoPEPass(lambda name: facts)(module.graph).declined
    assert refused == padded
    for argument in ("q", "kv_cache_dummy_dep"):
        module = build(spec)
        value = edits.attention(module).kwargs[argument]
        edits.read_also(module, value)
        [shared] = passes(spec)[2](module.graph).declined
        [reader] = [n for n in value.users if n.target is edits.aten.neg.default]
        # What is computed from a rotated value by moving and adding is followed to its reader.
        pair = (reader.name, "output") if argument == "q" else (value.name, reader.name)
        assert shared.detail == "{} is read by {}".format(*pair)


def test_only_the_table_is_probed_with_few_rows():
    """Also where it is cast before its lookup."""
    for table_dtype in (torch.bfloat16, torch.float32):
        module = build(Spec("native", dtype=torch.bfloat16, table_dtype=table_dtype))
        given = module.graph.find_nodes(op="placeholder")
        assert [node.name for node in given if probe._is_table(node)] == ["table"]


# --- pass 3


@pytest.mark.parametrize("rope", ["native", "flashinfer", "nope"])
def test_lifted_call(rope):
    """All readers of the output read the new call, also where it is taken apart twice."""
    spec = Spec(rope)
    module = after_pass(2, spec)
    old = edits.attention(module)
    given = old.kwargs
    twin = edits.add(module, module.graph.output_node(), operator.getitem, old, 1)
    edits.read_also(module, twin)
    assert lift(module, spec) == [old.name]
    prep, new = find(module, Q_PREP), find(module, ATTENTION)
    assert list(prep.meta["val"].shape[1:]) == [HEADS, LATENT + ROPE]
    assert not find_all(module, edits.ATTENTION)
    assert prep.args == (given["q"], given["layer_name"], LATENT, ROPE, torch.float32)
    want = {k: given[k] for k in ("q", "k_pe", "output", "layer_name", "kv_cache_dummy_dep")}
    assert dict(new.kwargs) == {**want, "prepared_q": prep, "kv_c": given["kv_c_normed"]}
    nothing, output = new.meta["val"]
    assert nothing is None and str(output.shape) == str(given["output"].meta["val"].shape)


@pytest.mark.parametrize("through", ["copy", "split"])
def test_near_miss_a_query_that_is_not_canonical_is_kept(through):
    spec = Spec("native")
    module = after_pass(2, spec)
    attention = edits.attention(module)
    other = attention.kwargs["q"]
    if through == "copy":
        other = edits.add(module, attention, edits.aten.clone.default, other)
    else:
        halves = edits.add(module, attention, edits.aten.split.Tensor, other, HEADS)
        other = edits.add(module, attention, operator.getitem, halves, 0)
    edits.set_argument(attention, q=other)
    before = printed(module)
    assert not lift(module, spec)
    assert printed(module) == before


def test_a_graph_that_was_lifted_in_part_is_lifted_whole():
    spec = Spec("native", layers=2)
    module = after_pass(2, spec)
    attention = edits.attention(module, 1)
    query = attention.kwargs["q"]
    edits.set_argument(attention, q=edits.add(module, attention, edits.aten.clone.default, query))
    assert len(lift(module, spec)) == 1
    edits.set_argument(attention, q=query)
    assert lift(module, spec) == [attention.name]
    assert lift(module, spec) == []


def test_a_call_whose_output_nothing_reads_is_lifted():
    spec = Spec("native")
    module = after_pass(2, spec)
    for read in list(edits.attention(module).users):
        read.replace_all_uses_with(edits.attention(module).kwargs["output"])
        module.graph.erase_node(read)
    assert len(lift(module, spec)) == 1


# --- pass 4


@pytest.mark.parametrize("rope", ["native", "flashinfer", "nope"])
@pytest.mark.parametrize("provider", ["reference", "triton", "aiter"])
def test_fused_node(rope, provider):
    module = after_pass(3, Spec(rope))
    canonical, prep = find(module, CANONICAL), find(module, Q_PREP)
    kwargs = dict(canonical.kwargs)
    assert fuse_pairs(module, provider) == [prep.name]
    fused = find(module, FUSED)
    buffer = fused.kwargs["prepared_q"]
    assert dict(fused.kwargs) == {**kwargs, "prepared_q": buffer, "provider": provider}
    assert buffer.meta["val"].dtype is prep.meta["val"].dtype
    assert not find_all(module, CANONICAL) and not find_all(module, Q_PREP)
    assert find(module, ATTENTION).kwargs["kv_cache_dummy_dep"] is None


@pytest.mark.parametrize("of", ["another layer", "another value"])
def test_near_miss_the_preparation_of_something_else_is_kept(of):
    module = after_pass(3, Spec("native", layers=2))
    prep, other = find_all(module, Q_PREP)
    if of == "another layer":
        prep.args = (prep.args[0], other.args[1], *prep.args[2:])
    else:
        copied = edits.add(module, prep, edits.aten.clone.default, prep.args[0])
        prep.args = (copied, *prep.args[1:])
    assert fuse_pairs(module) == [other.name]
    assert find_all(module, Q_PREP) == [prep]


def test_unread_outputs_may_be_missing():
    """An output of the canonical node that nothing reads need not have a getitem."""
    module = after_pass(3, Spec("native"))
    dummy = find(module, ATTENTION).kwargs["kv_cache_dummy_dep"]
    for user in list(dummy.users):
        edits.set_argument(user, kv_cache_dummy_dep=None)
    module.graph.erase_node(dummy)
    assert len(fuse_pairs(module)) == 1
    module.graph.lint()


def test_rotated_values_with_several_users():
    """Other readers of the canonical q or k_pe read the fused node's."""
    module = after_pass(3, Spec("native"))
    attention = find(module, ATTENTION)
    for name in ("q", "k_pe"):
        edits.read_also(module, attention.kwargs[name])
    fuse_pairs(module)
    read = {n.args[0].args[0] for n in find_all(module, edits.aten.neg.default)}
    assert read == {find(module, FUSED)}


@pytest.mark.parametrize("dynamic", [True, False])
def test_buffer_is_allocated_by_the_graph(dynamic):
    module = after_pass(3, Spec("native", dynamic=dynamic))
    value = find(module, Q_PREP).meta["val"]
    fuse_pairs(module)
    node = find(module, FUSED)
    buffer = node.kwargs["prepared_q"]
    assert buffer.target is edits.aten.empty.memory_format
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    assert dict(buffer.kwargs) == options
    [[tokens, *rest]] = buffer.args
    assert rest == list(value.shape[1:])
    if dynamic:
        assert (tokens.target, tokens.args) == (edits.aten.sym_size.int, (node.kwargs["q"], 0))
        tokens = tokens.meta["val"]
    assert str(tokens) == str(value.shape[0])
    assert buffer.meta["val"] is value
    assert node.meta["val"][0] is None
