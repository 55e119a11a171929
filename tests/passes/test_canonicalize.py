"""Pass 2 alone, `CanonicalizeMLARoPEPass`: the seven cases."""

from __future__ import annotations

import pytest
from torch import fx

from mla_fusion import ops
from mla_fusion.config.eligibility import LayerFacts
from mla_fusion.ops import Rope
from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.result import PassResult
from mla_fusion.report.reasons import Decline
from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, facts_of, reasons, run
from tests.passes.graphs import ROPES, Spec, build, find, find_all, printed

CANONICAL = f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}"
ROPE_OF = {
    "native": Rope.NATIVE,
    "deepseek": Rope.NATIVE,
    "vllm_c": Rope.VLLM_C,
    "flashinfer": Rope.FLASHINFER,
    "aiter": Rope.AITER_TRITON,
    "cat_fused": Rope.CAT_FUSED,
    "nope": Rope.NONE,
}


def canonicalize(module: fx.GraphModule, spec: Spec) -> PassResult:
    return CanonicalizeMLARoPEPass(facts_of(spec))(module.graph)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_matched(rope: str, is_neox: bool) -> None:
    spec = Spec(rope, is_neox)
    module = build(spec)
    attention = edits.attention(module)
    result = canonicalize(module, spec)
    assert (list(result.rewritten), result.declined) == ([attention.name], {})
    node = find(module, CANONICAL)
    names = {k: getattr(v, "name", v) for k, v in node.kwargs.items()}
    rotates = rope != "nope"
    assert names["rope"] == ROPE_OF[rope]
    assert names["is_neox"] is (is_neox and rotates)
    assert names["positions"] == ("positions" if rotates else None)
    assert names["cos_sin_cache"] == ("table" if rotates else None)
    assert (names["k_scale"], names["layer_name"]) == ("k_scale", "layer_name_0")
    read = [attention.kwargs[a].args for a in ("kv_cache_dummy_dep", "q", "k_pe")]
    assert read == [(node, 0), (node, 1), (node, 2)]
    module.graph.lint()


@pytest.mark.parametrize("name", edits.NEAR_MISSES)
def test_near_miss_is_kept(name: str) -> None:
    module, spec, reason = edits.near_miss(name)
    before = printed(module)
    result = canonicalize(module, spec)
    assert (result.rewritten, reasons(result)) == ({}, [reason])
    assert printed(module) == before


@pytest.mark.parametrize("spec", [Spec("native"), Spec("flashinfer"), Spec("nope")], ids=str)
def test_missing_metadata_anywhere_is_skipped(spec: Spec) -> None:
    """Without the metadata of one node the layer matches all the same, or says what is missing."""
    for index in range(len(build(spec).graph.nodes)):
        module = build(spec)
        before = printed(module)
        node = list(module.graph.nodes)[index]
        if node.name.startswith("layer_name"):
            continue  # the name of the layer: without it the layer is unknown
        node.meta.pop("val", None)
        result = canonicalize(module, spec)
        assert reasons(result) in ([], ["missing-metadata"]), node.name
        if result.declined:
            assert printed(module) == before


def test_several_users() -> None:
    spec = Spec("deepseek")
    module = build(spec)
    edits.also_return(module, edits.attention(module).kwargs["k_pe"])
    before = printed(module)
    assert reasons(canonicalize(module, spec)) == ["shared-rotation"]
    assert printed(module) == before


def test_dead_users_do_not_count() -> None:
    spec = Spec("deepseek")
    module = build(spec)
    q = edits.attention(module).kwargs["q"]
    edits.add(module, module.graph.output_node(), edits.aten.slice.Tensor, q, 0, 0, 2)
    assert canonicalize(module, spec).declined == {}


def test_chain_of_layers() -> None:
    spec = Spec("flashinfer", layers=3, q_lora=True)
    module = build(spec)
    assert len(canonicalize(module, spec).rewritten) == 3
    updates = find_all(module, CANONICAL)
    assert [n.kwargs["layer_name"].name for n in updates] == [f"layer_name_{i}" for i in range(3)]


def test_graph_without_attention_is_the_same_object() -> None:
    module = fx.symbolic_trace(lambda x: x + 1)
    graph, before = module.graph, printed(module)
    result = canonicalize(module, Spec())
    assert (result.rewritten, result.declined) == ({}, {})
    assert module.graph is graph
    assert printed(module) == before


def test_second_run_changes_nothing() -> None:
    spec = Spec("native")
    module = build(spec)
    canonicalize(module, spec)
    before = printed(module)
    assert reasons(canonicalize(module, spec)) == ["cache-update"]
    assert printed(module) == before


@pytest.mark.parametrize("rope", ROPES)
def test_numerics_are_equal(rope: str, plain_kernels: None) -> None:
    """The canonical op calls what the graph called, so even a decode batch is exact."""
    spec = Spec(rope, layers=2)
    module = build(spec)
    canonicalize(module, spec)
    for batch in (BATCHES["decode"], BATCHES["mixed"], BATCHES["profile"]):
        assert_same(run(build(spec), spec, batch), run(module, spec, batch), batch)


def test_details_name_what_stands_in_the_way() -> None:
    spec = Spec("native")
    module = build(spec)
    [unknown] = CanonicalizeMLARoPEPass(lambda name: None)(module.graph).declined.values()
    assert (unknown.code, unknown.detail) == ("unknown-layer", "layer_name_0")
    facts = LayerFacts(Decline("padded-heads", "12 to 16"), False)
    [refused] = CanonicalizeMLARoPEPass(lambda name: facts)(module.graph).declined.values()
    assert (refused.code, refused.detail) == ("padded-heads", "12 to 16")
    for argument in ("q", "kv_cache_dummy_dep"):
        module = build(spec)
        value = edits.attention(module).kwargs[argument]
        edits.read_also(module, value)
        [shared] = canonicalize(module, spec).declined.values()
        [reader] = [n for n in value.users if n.target is edits.aten.neg.default]
        # What is computed from a rotated value by moving and adding is followed to its reader.
        pair = (reader.name, "output") if argument == "q" else (value.name, reader.name)
        assert shared.detail == "{} is read by {}".format(*pair)


@pytest.mark.parametrize("rope", ROPES)
def test_new_nodes_have_the_metadata_of_what_they_replace(rope: str) -> None:
    spec = Spec(rope)
    module = build(spec)
    attention = edits.attention(module)
    old = {name: attention.kwargs[name].meta["val"] for name in ("q", "k_pe")}
    canonicalize(module, spec)
    node = find(module, CANONICAL)
    for name, value in old.items():
        new = attention.kwargs[name].meta["val"]
        assert (str(new.shape), new.dtype) == (str(value.shape), value.dtype)
        given = node.kwargs[name].meta["val"]
        assert (str(given.shape), given.dtype) == (str(value.shape), value.dtype)
    dummy = attention.kwargs["kv_cache_dummy_dep"].meta["val"]
    assert (tuple(dummy.shape), dummy.dtype) == ((0,), spec.dtype)
