"""RMSNorm: the spellings that `patterns.norms` reads, and near misses that it must not."""

import operator

import pytest
import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from vllm import ir

from mla_fusion.patterns.norms import read_rms_norm
from tests.passes import declare, recorded
from tests.passes.graphs import find, find_all, functionalized

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPSILON, COLUMNS = 1e-6, 48


def _root(wide, epsilon=EPSILON):
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)


def vllm(x, weight):
    wide = x.float()
    return (wide * _root(wide)).to(x.dtype) * weight


def transformers(x, weight):
    """Llama's: the weight first, and the root before the row."""
    wide = x.to(FP32)
    return weight * (_root(wide) * wide).to(x.dtype)


def squares(x, weight):
    wide = x.float()
    root = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True).add(EPSILON))
    return weight * (wide * root).to(x.dtype)


def ir_op(x, weight):
    return ir.ops.rms_norm(x, weight, EPSILON)


def epsilon_before_mean(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt((wide.pow(2) + EPSILON).mean(-1, keepdim=True))).to(x.dtype) * weight


def epsilon_behind_root(x, weight):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)) + EPSILON
    return (wide * root).to(x.dtype) * weight


def one_rounding(x, weight):
    wide = x.float()
    return (wide * _root(wide) * weight).to(x.dtype)


def rounded_root(x, weight):
    wide = x.float()
    return (wide * _root(wide).to(x.dtype)).to(x.dtype) * weight


def narrow_squares(x, weight):
    root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
    return (x.float() * root.float()).to(x.dtype) * weight


def wide(x, weight):
    double = x.double()
    return (double * _root(double)).to(x.dtype) * weight


def gemma(x, weight):
    return vllm(x, weight + 1)


def gemma_ir(x, weight):
    return ir.ops.rms_norm(x, weight.float() + 1, EPSILON)


def of_a_part(x, weight):
    return ir.ops.rms_norm(x, weight, EPSILON, COLUMNS // 2)


def without_weight(x, weight):
    return ir.ops.rms_norm(x, None, EPSILON)


def with_residual(x, weight):
    return ir.ops.fused_add_rms_norm(x, x + 1, weight, EPSILON)[0]


def centred(x, weight):
    wide = x.float() - x.float().mean(-1, keepdim=True)
    return (wide * _root(wide)).to(x.dtype) * weight


def cubes(x, weight):
    wide = x.float()
    root = torch.rsqrt(wide.abs().pow(3).mean(-1, keepdim=True) + EPSILON)
    return (wide * root).to(x.dtype) * weight


def of_all_rows(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean() + EPSILON)).to(x.dtype) * weight


def of_tokens(x, weight):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(0, keepdim=True) + EPSILON)
    return (wide * root).to(x.dtype) * weight


def twice(x, weight):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON + EPSILON)
    return (wide * root).to(x.dtype) * weight


def other_row(x, weight):
    """The root of one value scales another."""
    return (weight * 2 + x).float().mul(_root(x.float())).to(x.dtype) * weight


def _traced(norm, dtype):
    """(graph of `norm` in Inductor's ops, for any number of tokens; the node that it returns)"""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    rows = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = mode.from_tensor(torch.empty(5, COLUMNS, dtype=dtype), symbolic_context=rows)
    weight = mode.from_tensor(torch.empty(COLUMNS, dtype=dtype), static_shapes=True)
    graph = make_fx(norm, select_decomp_table())(x, weight).graph
    [node] = graph.output_node().all_input_nodes
    return graph, node


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("norm", [vllm, transformers, squares, ir_op], ids=lambda n: n.__name__)
def test_every_spelling_is_read(norm, dtype):
    graph, node = _traced(norm, dtype)
    found = read_rms_norm(node)
    assert found is not None
    x, weight = graph.find_nodes(op="placeholder")
    assert (found.x, found.weight, found.epsilon) == (x, weight, EPSILON)
    assert found.results == (node,)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "norm",
    [
        epsilon_before_mean, epsilon_behind_root, one_rounding, rounded_root, narrow_squares, wide,
        gemma, gemma_ir, of_a_part, without_weight, with_residual, centred, cubes, of_all_rows,
        of_tokens, twice, other_row,
    ],
    ids=lambda n: n.__name__,
)  # fmt: skip
def test_a_near_miss_is_no_norm(norm, dtype):
    assert read_rms_norm(_traced(norm, dtype)[1]) is None


@pytest.mark.parametrize("norm", [epsilon_before_mean, gemma, twice], ids=lambda n: n.__name__)
def test_a_near_miss_without_roundings_is_no_norm_either(norm):
    assert read_rms_norm(_traced(norm, FP32)[1]) is None


@pytest.mark.parametrize("norm", [vllm, ir_op], ids=lambda n: n.__name__)
def test_types_and_metadata_count(norm):
    graph, node = _traced(norm, BF16)
    for each, other in ((1, FP32), (0, FP16)):
        graph, node = _traced(norm, BF16)
        value = graph.find_nodes(op="placeholder")[each].meta
        value["val"] = value["val"].to(other)
        assert read_rms_norm(node) is None, (each, other)
    del graph.find_nodes(op="placeholder")[0].meta["val"]
    assert read_rms_norm(node) is None


def test_a_row_that_is_a_cast_itself_is_not_walked_into():
    _, node = _traced(lambda x, weight: vllm(x.float().mul(2).to(x.dtype), weight), BF16)
    found = read_rms_norm(node)
    assert found is not None and found.x.meta["val"].dtype == BF16
    assert found.x.args[0].target is torch.ops.aten.mul.Tensor


def test_the_kernel_of_vllm_is_read_by_its_arguments():
    if not torch.ops._C.rms_norm.default._schema.arguments:
        declare.op(
            "_C", "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()"
        )
    graph, node = _traced(ir_op, BF16)
    x, weight = graph.find_nodes(op="placeholder")
    with graph.inserting_before(node):
        out = graph.call_function(torch.empty_like, (x,))
        value = (None, x.meta["val"])
        call = functionalized(graph, torch.ops._C.rms_norm.default, (out, x, weight, 1e-5), value)
        reads = [graph.call_function(operator.getitem, (call, 1)) for _ in range(2)]
    for read in reads:
        read.meta["val"] = node.meta["val"]
    found = read_rms_norm(reads[0])
    assert found is not None
    assert (found.x, found.weight, found.epsilon) == (x, weight, 1e-5)
    assert {*found.results} == {*reads}
    assert read_rms_norm(call) is None


def test_the_norms_of_recorded_graphs_are_read():
    module = recorded.read(recorded.FOLDER / "deepseek-q_lora.json.gz")
    norms = find_all(module, "vllm_ir::rms_norm")
    assert len(norms) == 3 and all(map(read_rms_norm, norms))
    assert read_rms_norm(find(module, "vllm_ir::fused_add_rms_norm")) is None
    others = [n for n in module.graph.nodes if n not in norms and isinstance(n, fx.Node)]
    assert not any(map(read_rms_norm, others))
