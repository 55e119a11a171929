"""What a graph is probed with; `programs` takes token dimensions apart."""

import torch

from mla_fusion.patterns import probe
from tests.passes import edits
from tests.passes.fake_engine import fuse
from tests.passes.graphs import Spec, build, find

aten = torch.ops.aten


def test_cosines_of_another_row_are_kept():
    """Whatever positions of a batch may be equal."""
    spec = Spec("native", dynamic=False)
    module = build(spec)
    lookup = find(module, aten.index.Tensor)
    end = next(iter(lookup.users))
    readers = list(lookup.users)
    rows = [edits.add(module, end, aten.select.int, lookup, 0, i) for i in (1, 0, 2, 3, 4)]
    other = edits.add(module, end, aten.stack.default, rows)
    for reader in readers:
        reader.replace_input_with(lookup, other)
    assert fuse(module, spec).fused == 0


def test_only_the_table_is_probed_with_few_rows():
    """Also where it is cast before its lookup."""
    for table_dtype in (torch.bfloat16, torch.float32):
        module = build(Spec("native", dtype=torch.bfloat16, table_dtype=table_dtype))
        given = module.graph.find_nodes(op="placeholder")
        assert [node.name for node in given if probe._is_table(node)] == ["table"]
