"""What the probe takes for the formula's arithmetic: types, constants and terms, and lookups."""

import operator

import pytest
import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.patterns import probe
from tests.passes import edits, programs
from tests.passes.fake_engine import BATCHES, assert_same, fuse, reasons, run
from tests.passes.graphs import Spec, build, copy, find, find_all, printed

aten, prims = torch.ops.aten, torch.ops.prims
FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"

# Arguments of each op of the probe: "x" is [3, 4] of a given type, "rows" are places.
ARGUMENTS = {
    aten.reshape.default: ("x", [4, 3]), aten.view.default: ("x", [4, 3]),
    aten._unsafe_view.default: ("x", [4, 3]), aten.unsqueeze.default: ("x", 0),
    aten.squeeze.dim: ("x", 0), aten.squeeze.dims: ("x", [0]), aten.slice.Tensor: ("x", 1),
    aten.select.int: ("x", 1, 0), aten.split.Tensor: ("x", 2, 1), operator.getitem: ("x", 0),
    aten.split_with_sizes.default: ("x", [2, 2], 1), aten.expand.default: ("x", [2, 3, 4]),
    aten.permute.default: ("x", [1, 0]), aten.transpose.int: ("x", 0, 1),
    aten.alias.default: ("x",), prims.convert_element_type.default: ("x", BF16),
    aten._to_copy.default: ("x",), aten.index.Tensor: ("x", ["rows"]),
    aten.index_select.default: ("x", 0, "rows"), aten.embedding.default: ("x", "rows"),
    aten.mul.Tensor: ("x", "x"), aten.add.Tensor: ("x", "x"), aten.sub.Tensor: ("x", "x"),
    aten.cat.default: (["x", "x"], 1), aten.stack.default: (["x", "x"],),
    aten.clone.default: ("x",), aten.copy.default: ("x", "x"),
    aten.slice_scatter.default: ("x", "x", 0), aten.neg.default: ("x",),
    aten.sym_size.int: ("x", 0),
}  # fmt: skip


# The type of the inputs, of an op's result and of what is computed; whether that rounds more.
ROUNDINGS = (
    (FP32, FP32, FP32, False), (FP32, FP8, FP32, True), (FP32, FP16, BF16, True),
    (FP32, BF16, BF16, False), (FP16, BF16, FP32, True), (FP8, BF16, FP32, False),
    (torch.int64, FP32, FP32, True),
)  # fmt: skip


@pytest.mark.parametrize("target", sorted(probe.PURE, key=str), ids=str)
def test_a_result_of_a_narrower_type_is_rounded_by_whatever_op(target):
    graph = fx.Graph()
    x, rows = graph.placeholder("x"), graph.placeholder("rows")
    if target is operator.getitem:
        x = graph.call_function(aten.split.Tensor, (x, 2))
    names = {"x": x, "rows": rows}
    args = [[names.get(a, a) for a in each] if isinstance(each, list) else names.get(each, each)
            if isinstance(each, str) else each for each in ARGUMENTS[target]]  # fmt: skip
    node = graph.call_function(target, tuple(args))
    end = graph.call_function(aten.alias.default, (node,))
    rows.meta["val"] = torch.ones(3, dtype=torch.int64)
    for given, made, output, rounds in ROUNDINGS:
        for each, dtype in ((x, given), (node, made), (end, output)):
            each.meta["val"] = torch.ones(3, 4, dtype=dtype)
        if target is aten.sym_size.int:
            node.meta["val"], rounds = 3, False
        assert probe._rounds(end, [x]) is rounds, (given, made, output)


def _query(*calls):
    """The attention reads its query through `calls`."""

    def edit(module):
        call = edits.attention(module)
        edits.set_argument(call, q=programs.behind(module, call.kwargs["q"], *calls))

    return edit


def _kept(dtype, how):
    """The query is kept in a buffer of another type before the attention reads it."""

    def edit(module):
        call = edits.attention(module)
        edits.set_argument(call, q=programs.kept(module, call.kwargs["q"], dtype, how))

    return edit


NEAR_MISSES = {
    "unknown-rope": (
        _kept(FP8, 0), _kept(FP8, 1), _kept(FP16, 0), _kept(BF16, 1),
        _query((aten.add.Tensor, 1e5), (aten.sub.Tensor, 1e5)),
        _query((aten.add.Tensor, "itself"), (aten.sub.Tensor, "itself")),
    ),
    "scaled-query": (
        _query((aten.mul.Tensor, 1e5), (aten.mul.Tensor, 1e-5)),
        _query((aten.mul.Tensor, 1e-30), (aten.mul.Tensor, 1e30)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rope, scaled", [("native", ""), ("vllm_c", ""), ("native", "in_place")])
@pytest.mark.parametrize("reason, edit", [(r, e) for r, each in NEAR_MISSES.items() for e in each])
def test_what_rounds_cancels_or_overflows_is_kept(reason, edit, rope, scaled):
    """Before the factor of a query too, in fp32, where float64 shows an identity."""
    spec = Spec(rope, scaled=scaled)
    module = build(spec)
    edit(module)
    before = printed(module)
    assert reasons(fuse(module, spec)) in ([reason], ["scaled-query"] * bool(scaled))
    assert printed(module) == before


def test_rows_of_tokens_are_not_looked_up():
    """Tokens selected by positions, where only rows of a table may be."""
    module = build(Spec("native"))
    positions = edits.node_named(module, "positions")
    _query((aten.index_select.default, 0, positions))(module)
    assert reasons(fuse(module, Spec("native"))) == ["unknown-rope"]


@pytest.mark.parametrize("target", [aten.index_select.default, aten.embedding.default])
@pytest.mark.parametrize("rope", ["native", "native_late_cast", "deepseek"])
def test_rows_of_the_table_are_looked_up_by_any_op(target, rope, plain_kernels):
    spec = Spec(rope)
    module = build(spec)
    for node in find_all(module, aten.index.Tensor):
        table, [positions] = node.args
        by_dim = target is aten.index_select.default
        node.target = target
        node.args = (table, 0, positions) if by_dim else (table, positions)
    before = copy(module)
    assert fuse(module, spec).fused == 1
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch, tolerance=1e-5)


@pytest.mark.parametrize("rounded", [programs.cast, programs.kept])
def test_cosines_rounded_by_a_copy_are_rounded(rounded):
    """Those of query and key; the op in place of the graph's rounds them too."""
    spec = Spec("native_late_cast", dtype=BF16, table_dtype=FP32)
    module = build(spec)
    casts = find_all(module, prims.convert_element_type.default)
    casts = [node for node in casts if node.args[0].target is aten.unsqueeze.default]
    assert [node.args[1] for node in casts] == [BF16] * 4
    for node in casts:
        node.replace_all_uses_with(rounded(module, node.args[0], BF16))
    assert fuse(module, spec).fused == 1
    assert find(module, FUSED).kwargs["rope"] == "native"
