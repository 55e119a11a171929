"""Graphs recorded from real engines on a GPU fuse."""

import pytest
import torch

from mla_fusion import ops
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from tests.passes import linears, recorded
from tests.passes.fake_engine import Engine, fuse
from tests.passes.graphs import Spec, find, find_all, layer_names

FILES = sorted(recorded.FOLDER.glob("*.json.gz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_recorded_graph_fuses(path):
    module = recorded.read(path)
    quantized = path.name.split("-")[0].partition("output_")[2]
    spec = Spec(dtype=torch.bfloat16, quantized=quantized) if quantized else Spec()
    facts = Engine(spec).facts_of()(*layer_names(spec))
    record = fuse(module, spec, lambda name: facts)
    assert record.layers >= 1
    if quantized:
        kind = linears.kind(quantized) if quantized in linears.FUSED else "none"
        assert record.outputs == {kind: record.layers}
    assert (record.fused, record.declined) == (record.layers, {})
    module.graph.lint()
    fused = find(module, f"{ops.NAMESPACE}::{ops.FUSED}")
    assert fused.kwargs["rope"]
    copies = len(find_all(module, torch.ops.aten.clone.default))
    MLAFixFunctionalizationPass()(module.graph)
    assert len(find_all(module, torch.ops.aten.clone.default)) == copies, "it makes a copy"
