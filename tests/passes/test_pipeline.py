"""Passes 2 to 4 together, on graphs traced from vLLM's own RoPE code: the seven cases."""

from __future__ import annotations

import pytest
import torch

from mla_fusion import ops
from mla_fusion.patterns.site import functionalized_op
from tests.passes import edits, graphs
from tests.passes.fake_engine import BATCHES, assert_same, fuse, reasons, run
from tests.passes.graphs import ROPES, Spec, build, find, find_all, printed

FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"
ATTENTION = f"{ops.NAMESPACE}::{ops.ATTENTION}"

SPELLINGS = [Spec(rope, neox) for rope in ROPES for neox in (False, True)]
VARIANTS = [
    *(Spec(rope, q_lora=True, layer_name="constant", dynamic=False) for rope in ROPES),
    Spec("native", dtype=torch.bfloat16, table_dtype=torch.float32),
    Spec("native_late_cast", dtype=torch.bfloat16, table_dtype=torch.float32),
    Spec("flashinfer", dtype=torch.bfloat16, table_dtype=torch.float32),
]
ALL = SPELLINGS + VARIANTS

# A rotation by another kernel, or in another order, differs in the last bits. fp32: 2**-24 times
# a few dozen additions; bf16: one rounding of 2**-9 to either side.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_matched(spec: Spec) -> None:
    module = build(spec)
    record = fuse(module, spec)
    assert (record.layers, record.fused, record.declined) == (1, 1, {})
    fused, attention = find(module, FUSED), find(module, ATTENTION)
    assert fused.kwargs["is_neox"] is (spec.is_neox and spec.rope != "nope")
    assert attention.kwargs["prepared_q"].args == (fused, 3)
    assert attention.kwargs["q"].args == (fused, 1)
    assert attention.kwargs["k_pe"].args == (fused, 2)
    left = {functionalized_op(node) for node in module.graph.nodes} - {""}
    assert left == {FUSED, ATTENTION}
    assert not find_all(module, edits.UPDATE)


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_fused_node_reads_the_query_before_rotation(spec: Spec) -> None:
    module = build(spec)
    fuse(module, spec)
    q = find(module, FUSED).kwargs["q"]
    assert q.target is torch.ops.aten.reshape.default
    assert q.args[0].target is torch.ops.aten.mm.default


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_nothing_dead_is_left_behind(spec: Spec) -> None:
    module = build(spec)
    # What AOT autograd itself leaves unread is not ours to count.
    module.graph.eliminate_dead_code()
    fuse(module, spec)
    before = printed(module)
    module.graph.eliminate_dead_code()
    assert printed(module) == before


@pytest.mark.parametrize("name", edits.NEAR_MISSES)
def test_near_miss_is_kept(name: str) -> None:
    module, spec, reason = edits.near_miss(name)
    before = printed(module)
    record = fuse(module, spec)
    assert record.fused == 0
    assert reasons(record) == [reason]
    assert printed(module) == before


@pytest.mark.parametrize("spec", SPELLINGS, ids=str)
@pytest.mark.parametrize("argument", ["q", "kv_c_normed", "k_pe", "output"])
def test_missing_metadata_is_skipped_with_the_reason(spec: Spec, argument: str) -> None:
    module = build(spec)
    del edits.attention(module).kwargs[argument].meta["val"]
    before = printed(module)
    record = fuse(module, spec)
    assert reasons(record) == ["missing-metadata"]
    assert printed(module) == before


@pytest.mark.parametrize("spec", [s for s in SPELLINGS if s.rope != "nope"], ids=str)
@pytest.mark.parametrize("argument", ["q", "k_pe"])
def test_rotated_value_with_several_users_is_kept(spec: Spec, argument: str) -> None:
    module = build(spec)
    edits.read_also(module, edits.attention(module).kwargs[argument])
    before = printed(module)
    assert reasons(fuse(module, spec)) == ["shared-rotation"]
    assert printed(module) == before


@pytest.mark.parametrize("spec", SPELLINGS, ids=str)
def test_cache_update_with_several_users_is_kept(spec: Spec) -> None:
    module = build(spec)
    edits.read_also(module, edits.attention(module).kwargs["kv_cache_dummy_dep"])
    before = printed(module)
    assert reasons(fuse(module, spec)) == ["shared-rotation"]
    assert printed(module) == before


def test_unrotated_values_may_have_other_users(plain_kernels: None) -> None:
    spec = Spec("native")
    module = build(spec)
    for projection in find_all(module, torch.ops.aten.mm.default):
        edits.read_also(module, projection)
    before = graphs.copy(module)
    assert fuse(module, spec).fused == 1
    assert_same(run(before, spec), run(module, spec), BATCHES["decode"])


def test_nope_may_have_other_users() -> None:
    """Nothing is rotated, so q and k_pe are the same values before and after."""
    spec = Spec("nope")
    module = build(spec)
    for argument in ("q", "k_pe"):
        edits.read_also(module, edits.attention(module).kwargs[argument])
    assert fuse(module, spec).fused == 1


@pytest.mark.parametrize("rope", ROPES)
def test_chain_of_layers(rope: str, plain_kernels: None) -> None:
    spec = Spec(rope, layers=4)
    module = build(spec)
    record = fuse(module, spec)
    assert (record.layers, record.fused, record.declined) == (4, 4, {})
    names = [n.kwargs["layer_name"].name for n in find_all(module, FUSED)]
    assert names == [f"layer_name_{i}" for i in range(4)]
    assert [n.kwargs["layer_name"].name for n in find_all(module, ATTENTION)] == names
    batch = BATCHES["mixed"]
    assert_same(run(build(spec), spec, batch), run(module, spec, batch), batch)


def test_one_layer_of_a_chain_is_kept(plain_kernels: None) -> None:
    spec = Spec("deepseek", layers=3)
    module = build(spec)
    kept = edits.attention(module, 1)
    edits.read_also(module, kept.kwargs["q"])
    before = graphs.copy(module)
    record = fuse(module, spec)
    assert record.fused == 2
    assert {name: d.code for name, d in record.declined.items()} == {kept.name: "shared-rotation"}
    assert find(module, edits.ATTENTION) is kept
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch, tolerance=1e-5)


@pytest.mark.parametrize("spec", [Spec("native"), Spec("flashinfer", layers=3)], ids=str)
def test_unchanged_graph_is_the_same_object(spec: Spec) -> None:
    module = build(spec)
    graph, nodes, before = module.graph, list(module.graph.nodes), printed(module)
    metas = [dict(node.meta) for node in nodes]
    record = fuse(module, spec, facts={})
    assert set(reasons(record)) == {"unknown-layer"}
    assert module.graph is graph
    assert list(graph.nodes) == nodes
    assert [dict(node.meta) for node in nodes] == metas
    assert printed(module) == before


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", ALL, ids=str)
def test_numerics_are_equal(spec: Spec, batch: str, plain_kernels: None) -> None:
    """Any batch that is not decode-only is exact; so is fp32 decode of the aten spellings."""
    module, step = build(spec), BATCHES[batch]
    fuse(module, spec)
    bf16 = spec.dtype is torch.bfloat16
    native = spec.rope in ("native", "native_late_cast", "deepseek")
    # Eager torch rounds every product of a bf16 rotation, as a compiled graph does not.
    exact = not step.decode_only and not (bf16 and native)
    tolerance = None if exact else TOLERANCE[spec.dtype]
    assert_same(run(build(spec), spec, step), run(module, spec, step), step, tolerance=tolerance)


@pytest.mark.parametrize("rope", ["flashinfer", "nope"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("quantized_query", [False, True])
def test_fp8_cache(rope: str, batch: str, quantized_query: bool, plain_kernels: None) -> None:
    """Equal to the byte, but for a rotated value: it is rounded once, and not twice as before."""
    spec = Spec(rope, dtype=torch.bfloat16, kv_cache_dtype="fp8")
    module, step = build(spec), BATCHES[batch]
    record = fuse(module, spec, quantized_query=quantized_query)
    assert record.fused == 1
    wanted = torch.float8_e4m3fn if quantized_query else torch.bfloat16
    assert find(module, FUSED).kwargs["prepared_q"].meta["val"].dtype is wanted
    before = run(build(spec), spec, step, quantized_query)
    tolerance = 0.13 if rope != "nope" and step.decode_only else None  # one step of fp8
    assert_same(before, run(module, spec, step, quantized_query), step, tolerance=tolerance)


@pytest.mark.parametrize("rope", ROPES)
def test_second_run_changes_nothing(rope: str) -> None:
    spec = Spec(rope, layers=2)
    module = build(spec)
    assert fuse(module, spec).fused == 2
    before = printed(module)
    record = fuse(module, spec)
    assert (record.layers, record.fused, record.declined) == (0, 0, {})
    assert printed(module) == before


def test_census_counts_one_layer() -> None:
    spec = Spec("deepseek", layers=3)
    layer = fuse(build(spec), spec).layer
    assert layer is not None
    census = layer.census()
    assert census["before"][edits.ATTENTION] == census["before"][edits.UPDATE] == 1
    assert census["after"][FUSED] == census["after"][ATTENTION] == 1
    assert edits.UPDATE not in census["after"]
    assert sum(census["after"].values()) < sum(census["before"].values())
