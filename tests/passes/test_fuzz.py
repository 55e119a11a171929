"""Random edits of real graphs: no exception, the same results, no layer lost without a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.patterns.site import attention_calls
from mla_fusion.reasons import REASONS
from tests.passes import edits, graphs
from tests.passes.fake_engine import DECODE, HOLES, MIXED, Outcome, assert_same, fuse, run
from tests.passes.graphs import Spec, build, printed

aten = torch.ops.aten

SPECS = [
    Spec("native", layers=2),
    Spec("deepseek", is_neox=True, layers=2, q_lora=True),
    Spec("flashinfer", layers=2),
    Spec("vllm_c", is_neox=True, dynamic=False),
    Spec("cat_fused", layers=2, layer_name="constant"),
    Spec("nope", layers=2),
]


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dim() > 0


def is_pure(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten"


def duplicate(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """Some readers of a node read a twin of it."""
    if not (is_pure(node) or node.target is edits.operator.getitem):
        return
    users = list(node.users)
    with module.graph.inserting_after(node):
        twin = module.graph.node_copy(node)
    for index, user in enumerate(users):
        if pick >> index & 1:
            user.replace_input_with(node, twin)


def read_elsewhere(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """A node has one more reader, whose result leaves the graph."""
    if is_float(node):
        target = (aten.neg.default, aten.clone.default, aten.relu.default)[pick % 3]
        edits.also_return(module, edits.add(module, module.graph.output_node(), target, node))


def splice(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """Readers of a node read another value than before."""
    if not is_float(node) or node.op != "call_function":
        return
    target, *args = (
        (aten.mul.Tensor, 1.0),
        (aten.mul.Tensor, 1.5),
        (aten.neg.default,),
        (aten.clone.default,),
        (aten.tanh.default,),
        (aten.add.Tensor, 0.25),
    )[pick % 6]
    users = list(node.users)
    new = edits.add(module, node.next, target, node, *args)
    for index, user in enumerate(users):
        if pick // 6 >> index & 1 or len(users) == 1:
            user.replace_input_with(node, new)


def bypass(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """A node is dropped: its readers read an input of the same shape and type."""
    if not (is_pure(node) and is_float(node)):
        return
    value = node.meta["val"]
    for source in node.all_input_nodes:
        other = source.meta.get("val")
        same = isinstance(other, torch.Tensor) and other.dtype == value.dtype
        if same and list(map(str, other.shape)) == list(map(str, value.shape)):
            node.replace_all_uses_with(source)
            return


def swap(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """A node moves down as far as its first reader, or a few places."""
    after = node
    for _ in range(pick % 8 + 1):
        following = after.next
        if following in node.users or following.op in ("output", "placeholder"):
            break
        after = following
    if after is not node and is_pure(node):
        after.append(node)


def drop_metadata(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """A node loses its metadata."""
    if not node.name.startswith(("layer_name", "tokens")):
        node.meta.pop("val", None)


def change_constant(module: fx.GraphModule, node: fx.Node, pick: int) -> None:
    """A slice starts elsewhere, halves are swapped, a flag of the op is flipped."""
    if node.target is edits.operator.getitem and node.args[0].target is aten.split.Tensor:
        node.args = (node.args[0], 1 - node.args[1])  # type: ignore[operator]
    elif node.target in (aten.sub.Tensor, aten.add.Tensor):
        node.target = aten.add.Tensor if node.target is aten.sub.Tensor else aten.sub.Tensor
    elif "is_neox" in node.kwargs:
        node.kwargs = {**node.kwargs, "is_neox": not node.kwargs["is_neox"]}


MUTATIONS = (duplicate, read_elsewhere, splice, bypass, swap, drop_metadata, change_constant)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(MUTATIONS), st.integers(0, 1 << 12), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def mutate(module: fx.GraphModule, steps: list[tuple[Any, int, int]]) -> None:
    for mutation, where, pick in steps:
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        try:
            mutation(module, nodes[where % len(nodes)], pick)
        except KeyError:  # an edit that needs the metadata that another one dropped
            continue


def outcome(module: fx.GraphModule, spec: Spec, batch: Any) -> Outcome | None:
    """What the graph computes; None if the edits made one that does not run."""
    try:
        return run(module, spec, batch)
    except RuntimeError:
        return None


@pytest.mark.usefixtures("plain_kernels")
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=st.sampled_from(SPECS), steps=STEPS, batch=st.sampled_from((DECODE, MIXED, HOLES)))
def test_edited_graphs_compute_the_same(
    spec: Spec, steps: list[tuple[Any, int, int]], batch: Any
) -> None:
    module = build(spec)
    mutate(module, steps)
    before = outcome(module, spec, batch)
    if before is None:
        return
    original, code = graphs.copy(module), printed(module)
    names = {call.name for call in attention_calls(module.graph)}
    record = fuse(module, spec)
    module.graph.lint()
    assert record.fused + len(record.declined) == record.layers == len(names)
    assert set(record.declined) <= names
    codes = {decline.code for decline in record.declined.values()}
    assert codes <= set(REASONS) - {"pass-error", "unfused-pair", "unknown-layer"}
    if not record.fused:
        assert printed(module) == code
    assert_same(before, run(module, spec, batch), batch, tolerance=1e-3)
    MLAFixFunctionalizationPass(None)(module.graph)
    module.graph.lint()
    assert_same(before, run(module, spec, batch), batch, tolerance=1e-3)
    # Nothing of it touched the nodes of a graph that shares its fake values.
    assert printed(original) == code
