"""Graphs recorded from real engines on a GPU, and the format they are kept in."""

import json

import pytest
import torch

from mla_fusion import ops
from tests.passes import linears, recorded
from tests.passes.fake_engine import Engine, fuse
from tests.passes.graphs import ROPES, Spec, build, find, printed

FILES = sorted(recorded.FOLDER.glob("*.json.gz"))


def reloaded(spec):
    return recorded.load(json.loads(json.dumps(recorded.dump(build(spec).graph))))


# Graphs that test_cases.py traces too: symbolic sizes and names as inputs, and constants for both.
SPECS = [Spec(rope, layers=2) for rope in ROPES]
SPECS += [Spec(rope, q_lora=True, layer_name="constant", dynamic=False) for rope in ROPES]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_graph_survives_the_format(spec):
    module, again = build(spec), reloaded(spec)
    assert printed(again) == printed(module)
    first, second = fuse(module, spec), fuse(again, spec)
    assert (second.fused, second.declined) == (first.fused, first.declined)
    assert (first.fused, first.declined) == (spec.layers, {})
    assert second.layer == first.layer
    assert second.variants == first.variants
    assert printed(again) == printed(module)


def test_what_cannot_be_kept_is_an_error():
    module = build(Spec())
    find(module, "vllm::unified_mla_kv_cache_update").meta["val"] = object()
    with pytest.raises(TypeError, match="cannot record a value"):
        recorded.dump(module.graph)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_recorded_graph_fuses(path):
    module, origin = recorded.read(path)
    assert origin["command"].endswith(f"one {path.name.removesuffix('.json.gz')}")
    quantized = path.name.split("-")[0].partition("output_")[2]
    engine = Engine(Spec(dtype=torch.bfloat16, quantized=quantized) if quantized else Spec())
    [(_, facts)] = engine.facts().items()
    record = fuse(module, Spec(), facts=_Every(facts))
    assert record.layers >= 1
    if quantized:
        kind = linears.kind(quantized) if quantized in linears.FUSED else "none"
        assert record.outputs == {kind: record.layers}
    assert (record.fused, record.declined) == (record.layers, {})
    module.graph.lint()
    fused = find(module, f"{ops.NAMESPACE}::{ops.FUSED}")
    assert fused.kwargs["rope"]


class _Every(dict):
    """The same facts for every layer name."""

    def __init__(self, facts):
        super().__init__(any=facts)
        self.facts = facts

    def get(self, name, default=None):
        return self.facts
