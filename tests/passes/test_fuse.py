"""Pass 4 alone, `MLAAiterQkRopeKVCacheFusionPass`: the seven cases."""

from __future__ import annotations

import pytest
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.fuse import MLAAiterQkRopeKVCacheFusionPass
from mla_fusion.passes.lift import MLADecodeQPrepLiftPass
from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, facts_of, run
from tests.passes.graphs import Spec, build, find, find_all, printed

ROPE_UPDATE, Q_PREP, FUSED, ATTENTION = (
    f"{ops.NAMESPACE}::{name}" for name in (ops.ROPE_UPDATE, ops.Q_PREP, ops.FUSED, ops.ATTENTION)
)


def lifted(spec: Spec) -> fx.GraphModule:
    module = build(spec)
    CanonicalizeMLARoPEPass(facts_of(spec))(module.graph)
    MLADecodeQPrepLiftPass(facts_of(spec))(module.graph)
    return module


def fuse_pairs(module: fx.GraphModule, provider: str = "reference") -> list[str]:
    return list(MLAAiterQkRopeKVCacheFusionPass(provider)(module.graph).rewritten)


@pytest.mark.parametrize("rope", ["native", "flashinfer", "nope"])
@pytest.mark.parametrize("provider", ["reference", "triton", "aiter"])
def test_matched(rope: str, provider: str) -> None:
    module = lifted(Spec(rope))
    canonical, prep = find(module, ROPE_UPDATE), find(module, Q_PREP)
    kwargs = dict(canonical.kwargs)
    assert fuse_pairs(module, provider) == [prep.name]
    fused = find(module, FUSED)
    buffer = fused.kwargs["prepared_q"]
    assert dict(fused.kwargs) == {**kwargs, "prepared_q": buffer, "provider": provider}
    assert buffer.target is edits.aten.empty.memory_format
    assert buffer.meta["val"].shape == prep.meta["val"].shape
    assert buffer.meta["val"].dtype is prep.meta["val"].dtype
    assert not find_all(module, ROPE_UPDATE) and not find_all(module, Q_PREP)
    assert find(module, ATTENTION).kwargs["kv_cache_dummy_dep"] is None
    module.graph.lint()


def test_near_miss_another_layer() -> None:
    spec = Spec("native", layers=2)
    module = lifted(spec)
    prep = find(module, Q_PREP)
    prep.args = (prep.args[0], edits.node_named(module, "layer_name_1"), *prep.args[2:])
    other = find(module, Q_PREP, 1).name
    assert fuse_pairs(module) == [other]
    assert find_all(module, Q_PREP) == [prep]


def test_near_miss_another_output() -> None:
    """The preparation of something else than the rotated query is kept."""
    module = lifted(Spec("native"))
    prep = find(module, Q_PREP)
    copied = edits.add(module, prep, edits.aten.clone.default, prep.args[0])
    prep.args = (copied, *prep.args[1:])
    before = printed(module)
    assert fuse_pairs(module) == []
    assert printed(module) == before


def test_graph_without_a_pair_is_the_same_object() -> None:
    module = build(Spec("native"))
    graph, before = module.graph, printed(module)
    assert fuse_pairs(module) == []
    assert module.graph is graph
    assert printed(module) == before


def test_unread_outputs_may_be_missing() -> None:
    """An output of the canonical node that nothing reads need not have a getitem."""
    module = lifted(Spec("native"))
    dummy = find(module, ATTENTION).kwargs["kv_cache_dummy_dep"]
    for user in list(dummy.users):
        edits.set_argument(user, kv_cache_dummy_dep=None)
    module.graph.erase_node(dummy)
    assert len(fuse_pairs(module)) == 1
    module.graph.lint()


def test_rotated_values_with_several_users(plain_kernels: None) -> None:
    """Who else reads the canonical q or k_pe reads the fused node's."""
    spec = Spec("native")
    module = lifted(spec)
    attention = find(module, ATTENTION)
    for name in ("q", "k_pe"):
        edits.read_also(module, attention.kwargs[name])
    fuse_pairs(module)
    read = {n.args[0].args[0] for n in find_all(module, edits.aten.neg.default)}
    assert read == {find(module, FUSED)}


def test_chain_of_layers() -> None:
    module = lifted(Spec("deepseek", layers=3))
    assert len(fuse_pairs(module)) == 3
    assert len(find_all(module, FUSED)) == 3


@pytest.mark.parametrize("batch", BATCHES)
def test_numerics_are_equal(batch: str, plain_kernels: None) -> None:
    spec, step = Spec("deepseek", layers=2), BATCHES[batch]
    module = lifted(spec)
    fuse_pairs(module)
    assert_same(run(build(spec), spec, step), run(module, spec, step), step, tolerance=1e-5)


@pytest.mark.parametrize("dynamic", [True, False])
def test_buffer_is_allocated_by_the_graph(dynamic: bool) -> None:
    spec = Spec("native", dynamic=dynamic)
    module = lifted(spec)
    value = find(module, Q_PREP).meta["val"]
    fuse_pairs(module)
    node = find(module, FUSED)
    buffer = node.kwargs["prepared_q"]
    assert dict(buffer.kwargs) == {
        "dtype": value.dtype,
        "device": value.device,
        "pin_memory": False,
    }
    [sizes] = buffer.args
    tokens, *rest = sizes
    assert rest == list(value.shape[1:])
    if dynamic:
        assert (tokens.target, tokens.args) == (edits.aten.sym_size.int, (node.kwargs["q"], 0))
        assert str(tokens.meta["val"]) == str(value.shape[0])
    else:
        assert tokens == value.shape[0]
    assert buffer.meta["val"] is value
    assert node.meta["val"][0] is None
