"""Invariant 4: a layer is fused, or left as it was with one reason.

Reasons that the graph gives are in test_cases.py, by `edits.NEAR_MISSES`; errors in
test_containment.py.
"""

from typing import Any

import pytest
from torch import fx

from mla_fusion.passes import pipeline
from mla_fusion.passes.rewrite import PassResult
from tests.passes import edits, graphs
from tests.passes.fake_engine import Engine, fuse, reasons
from tests.passes.graphs import Spec, build, printed


def test_invariant_4_invalid_graph_is_put_back(monkeypatch):
    """A graph that does not pass lint counts as an error of a pass."""
    spec = Spec("native")
    module = build(spec)
    before = printed(module)
    monkeypatch.setattr(fx.Graph, "lint", lambda graph: (_ for _ in ()).throw(RuntimeError("x")))
    assert reasons(fuse(module, spec)) == ["pass-error"]
    assert printed(module) == before


@pytest.mark.parametrize(
    "name, op",
    [
        ("query scaled by head", "aten.mul.Tensor"),
        ("sign of q flipped", "aten.slice_scatter.default"),
    ],
)
def test_a_decline_names_the_op_and_its_line(name, op):
    frames = 'File "a.py", line 1, in f', 'File "/site-packages/b/c.py", line 7, in g'
    module, spec, _ = edits.near_miss(name)
    for trace, where in ((None, ""), ("\n".join(frames), " at b/c.py:7")):
        for node in module.graph.nodes:
            node.meta["stack_trace"] = trace
        [decline] = fuse(module, spec).declined
        assert decline.detail.removeprefix("q comes from ") == op + where


# (reason, an attribute of a layer or of its impl, the value for which the layer declines)
LAYERS: list[tuple[str, str, Any]] = [
    ("sparse-attention", "impl.is_sparse", True),
    ("sparse-attention", "use_sparse", True),
    ("hisparse", "hisparse_cache", object()),
    ("context-parallel", "use_pcp", True),
    ("padded-heads", "q_pad_num_heads", 16),
    ("kv-cache-dtype", "kv_cache_dtype", "fp8_ds_mla"),
    ("kv-cache-dtype", "kv_cache_dtype", "bfloat16"),
    ("packed-weights", "is_amx_bmm_enabled", True),
    ("packed-weights", "W_UK_T", None),
]


@pytest.mark.parametrize("reason, attribute, value", LAYERS)
def test_invariant_4_layer_that_cannot_be_served_is_left(reason, attribute, value):
    """One of two layers declines, whole, and the other is fused; then both decline."""
    spec = Spec("deepseek", layers=2)
    names = graphs.layer_names(spec)

    def facts(*declining):
        engine = Engine(spec)
        for name in declining:
            layer: Any = engine.layers[name]
            owner = layer.impl if attribute.startswith("impl.") else layer
            setattr(owner, attribute.removeprefix("impl."), value)
        return engine.facts_of()

    record = fuse(build(spec), spec, facts(names[1]))
    assert (record.fused, reasons(record)) == (1, [reason])
    module = build(spec)
    before = printed(module)
    record = fuse(module, spec, facts(*names))
    assert (record.fused, reasons(record)) == (0, [reason] * 2)
    assert printed(module) == before


@pytest.mark.parametrize("alike", [True, False])
def test_layer_whose_name_is_not_known_gets_the_facts_of_all(alike):
    """A graph input without a value: the layers that it may stand for must agree."""
    spec = Spec("native", layers=2)
    engine, module = Engine(spec), build(spec)
    if not alike:
        next(iter(engine.layers.values())).impl.is_sparse = True
    for node in module.graph.nodes:
        if node.name.startswith("layer_name"):
            del node.meta["val"]
    record = fuse(module, spec, engine.facts_of())
    expected = (2, []) if alike else (0, ["unknown-layer"] * 2)
    assert (record.fused, reasons(record)) == expected


@pytest.mark.parametrize("skipped", ["MLADecodeQPrepLiftPass", "MLAAiterQkRopeKVCacheFusionPass"])
@pytest.mark.parametrize("rope", ["native", "flashinfer", "cat_fused", "nope"])
def test_invariant_4_unfused_pair_is_put_back(rope, skipped, monkeypatch):
    """What pass 2 or 3 changed and the next one left, the graph is put back."""
    spec = Spec(rope, layers=2)
    module = build(spec)
    before = printed(module)
    monkeypatch.setattr(pipeline, skipped, lambda *args: lambda graph: PassResult())
    record = fuse(module, spec)
    assert (record.fused, reasons(record)) == (0, ["unfused-pair"] * 2)
    assert printed(module) == before
