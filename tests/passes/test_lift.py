"""Pass 3 alone, `MLADecodeQPrepLiftPass`: the seven cases."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.canonicalize import CanonicalizeMLARoPEPass
from mla_fusion.passes.lift import MLADecodeQPrepLiftPass
from mla_fusion.passes.result import PassResult
from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, facts_of, run
from tests.passes.graphs import HEADS, LATENT, ROPE, Spec, build, find, find_all, printed

Q_PREP = f"{ops.NAMESPACE}::{ops.Q_PREP}"
ATTENTION = f"{ops.NAMESPACE}::{ops.ATTENTION}"


def canonical(spec: Spec) -> fx.GraphModule:
    module = build(spec)
    CanonicalizeMLARoPEPass(facts_of(spec))(module.graph)
    return module


def lift(module: fx.GraphModule, spec: Spec, quantized_query: bool = False) -> PassResult:
    return MLADecodeQPrepLiftPass(facts_of(spec, quantized_query))(module.graph)


@pytest.mark.parametrize("rope", ["native", "flashinfer", "nope"])
def test_matched(rope: str) -> None:
    spec = Spec(rope)
    module = canonical(spec)
    old = edits.attention(module)
    result = lift(module, spec)
    assert list(result.rewritten) == [old.name]
    prep, new = find(module, Q_PREP), find(module, ATTENTION)
    assert prep.args[0] is new.kwargs["q"] is old.kwargs["q"]
    assert new.kwargs["prepared_q"] is prep
    assert list(prep.meta["val"].shape[1:]) == [HEADS, LATENT + ROPE]
    assert not [user for read in old.users for user in read.users]
    q, name = old.kwargs["q"], old.kwargs["layer_name"]
    assert prep.args == (q, name, LATENT, ROPE, torch.float32)
    taken = ("q", "k_pe", "output", "layer_name", "kv_cache_dummy_dep")
    want = {k: old.kwargs[k] for k in taken}
    assert dict(new.kwargs) == {**want, "prepared_q": prep, "kv_c": old.kwargs["kv_c_normed"]}
    nothing, output = new.meta["val"]
    assert nothing is None
    assert str(output.shape) == str(old.kwargs["output"].meta["val"].shape)
    module.graph.lint()


def test_query_type_is_that_of_the_backend() -> None:
    spec = Spec("nope", kv_cache_dtype="fp8", dtype=torch.bfloat16)
    module = canonical(spec)
    lift(module, spec, quantized_query=True)
    assert find(module, Q_PREP).meta["val"].dtype is torch.float8_e4m3fn


@pytest.mark.parametrize("through", ["copy", "split"])
def test_near_miss_a_query_that_is_not_canonical_is_kept(through: str) -> None:
    spec = Spec("native")
    module = canonical(spec)
    attention = edits.attention(module)
    q = attention.kwargs["q"]
    if through == "copy":
        other = edits.add(module, attention, edits.aten.clone.default, q)
    else:
        halves = edits.add(module, attention, edits.aten.split.Tensor, q, HEADS)
        other = edits.add(module, attention, operator.getitem, halves, 0)
    edits.set_argument(attention, q=other)
    before = printed(module)
    assert not lift(module, spec).rewritten
    assert printed(module) == before


def test_graph_that_pass_2_left_is_the_same_object() -> None:
    spec = Spec("native")
    module = build(spec)
    graph, before = module.graph, printed(module)
    assert not lift(module, spec).rewritten
    assert module.graph is graph
    assert printed(module) == before


def test_layer_without_facts_is_skipped() -> None:
    module = canonical(Spec("native"))
    before = printed(module)
    assert not MLADecodeQPrepLiftPass(lambda name: None)(module.graph).rewritten
    assert printed(module) == before


def test_attention_output_with_several_readers() -> None:
    """All of them read the new call, also where the output is taken apart twice."""
    spec = Spec("native")
    module = canonical(spec)
    old = edits.attention(module)
    twin = edits.add(module, module.graph.output_node(), edits.operator.getitem, old, 1)
    edits.read_also(module, twin)
    lift(module, spec)
    assert not [user for read in old.users for user in read.users]


def test_chain_of_layers() -> None:
    spec = Spec("deepseek", layers=3)
    module = canonical(spec)
    assert len(lift(module, spec).rewritten) == 3
    assert len(find_all(module, ATTENTION)) == 3


@pytest.mark.parametrize("batch", BATCHES)
def test_numerics_are_equal(batch: str, plain_kernels: None) -> None:
    spec, step = Spec("deepseek", layers=2), BATCHES[batch]
    module = canonical(spec)
    lift(module, spec)
    assert_same(run(build(spec), spec, step), run(module, spec, step), step, tolerance=1e-5)


def test_second_run_changes_nothing() -> None:
    """Also where some calls, but not all, were lifted before."""
    spec = Spec("native", layers=2)
    module = canonical(spec)
    attention = edits.attention(module, 1)
    query = attention.kwargs["q"]
    edits.set_argument(attention, q=edits.add(module, attention, edits.aten.clone.default, query))
    assert len(lift(module, spec).rewritten) == 1
    edits.set_argument(attention, q=query)
    assert list(lift(module, spec).rewritten) == [attention.name]
    before = printed(module)
    assert not lift(module, spec).rewritten
    assert printed(module) == before
