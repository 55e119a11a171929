"""Products of an activation with a weight, an input of the graph: how a linear layer is spelled.

    x [T, K], w [N, K] ─► permute ─► aten.mm ─► [T, N]      what pass 7 takes, or with x in fp32
    x, w, scales ─► vllm.dynamic_..._gemm ─► [T, N]         a weight in block fp8, taken too
    x, w [N, K], ... ─► an op of vLLM ─► [T, N]             an opaque one, as of quantized weights

Data flow finds them, from the product back to its weight, wherever in a layer it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mla_fusion.ops import NAMESPACE
from mla_fusion.patterns.nodes import arguments, dtype_of, is_aten, tensors
from mla_fusion.patterns.probe import CASTS
from mla_fusion.patterns.site import called
from mla_fusion.projections.plans import GROUP
from mla_fusion.report.reasons import Declined

aten = torch.ops.aten
TYPES = (torch.bfloat16, torch.float16)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
BLOCK_FP8 = "vllm::dynamic_flashinfer_deepgemm_blockscale_gemm"  # vLLM's first choice on Hopper
QKV_A = "vllm::min_latency_fused_qkv_a_proj"  # of DeepSeek-V3 and Kimi-K2 on Hopper, in bf16


@dataclass(frozen=True)
class Product:
    """`node` is x [T, K] times the transpose of `weight` [N, K], all of one type of `TYPES`; or x
    is, and the others are fp32, as of a router; or `weight` is in block fp8, and x in bf16. e8m0:
    an argument of vLLM's op."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    scales: fx.Node | None = None
    e8m0: bool = False

    @property
    def size(self) -> int:
        """N."""
        return int(self.weight.meta["val"].shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.meta["val"].dtype

    def __str__(self) -> str:
        return "{1} -> {0}".format(*self.weight.meta["val"].shape)


def read_product(node: fx.Node) -> Product | None:
    """The product that `node` computes; None if it multiplies with no weight. Raises Declined for
    a product that the op `projection` does not take."""
    if node.target not in _PRODUCTS:
        if called(node) == BLOCK_FP8:
            return _read_block_fp8(node)
        if called(node) == QKV_A:
            raise Declined("product-slower", QKV_A)
        if _is_opaque(node):
            raise Declined("product-opaque", called(node))
        return None
    right: Any = arguments(node)["mat2"]
    weight = _source(right)
    if weight.op != "placeholder" or not (_value(weight) is None or _is_matrix(weight)):
        return None
    if node.target is not aten.mm.default:
        raise Declined("product-form", called(node))
    x = input_of(node)
    for each in (node, x, weight):
        if _value(each) is None:
            raise Declined("missing-metadata", f"node {each.name}")
    if not _is_transpose(right) or right.args[0] is not weight:
        raise Declined("product-form", f"{weight.name} is not read as its transpose alone")
    made, *types = (each.meta["val"].dtype for each in (node, weight, x))
    if types[1] not in TYPES or made not in (types[1], torch.float32) or types[0] != made:
        raise Declined("product-form", ", ".join(sorted({str(made), *map(str, types)})))
    if not weight.meta["val"].is_contiguous():
        raise Declined("product-form", f"{weight.name} has strides {weight.meta['val'].stride()}")
    return Product(node, x, weight)


def _read_block_fp8(node: fx.Node) -> Product:
    """The product of vLLM's op, which quantizes x in groups of 128 itself."""
    x, weight, scales, group, e8m0 = arguments(node).values()
    inputs = (node, x, weight, scales)
    if None in map(_value, inputs):
        raise Declined("missing-metadata", f"an input of {BLOCK_FP8}")
    values = [each.meta["val"] for each in inputs]
    types = [value.dtype for value in values]
    blocks = tuple(-(-n // GROUP) for n in values[2].shape)
    if types != [TYPES[0], TYPES[0], torch.float8_e4m3fn, torch.float32]:
        raise Declined("product-form", ", ".join(map(str, types)))
    kept = all(n.op == "placeholder" and n.meta["val"].is_contiguous() for n in inputs[2:])
    if group != GROUP or values[3].shape != blocks or not kept:
        raise Declined("product-form", f"{BLOCK_FP8} of another layout")
    return Product(node, x, weight, scales, e8m0)


def input_of(product: fx.Node) -> fx.Node:
    """What a product multiplies: a value that is converted for it alone to fp32, as it was."""
    x: Any = next(iter(arguments(product).values()))
    narrow = x.all_input_nodes[0] if x.target in CASTS else x
    rounds_none = dtype_of(x) == torch.float32 and dtype_of(narrow) in TYPES
    return narrow if rounds_none else x


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _source(node: fx.Node) -> fx.Node:
    """The node from which ops of torch with one input make `node`."""
    while is_aten(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _is_matrix(node: fx.Node) -> bool:
    """True if a node is an input of the graph with two dimensions, neither the token count."""
    value = _value(node)
    shape = value.shape if node.op == "placeholder" and value is not None else ()
    return len(shape) == 2 and all(isinstance(size, int) for size in shape)


def _is_transpose(node: fx.Node) -> bool:
    """True if all that `node` does is to swap two dimensions."""
    dims = {aten.permute.default: [[1, 0]], aten.transpose.int: [0, 1], aten.t.default: []}
    given = [list(each) if isinstance(each, tuple | list) else each for each in node.args[1:]]
    return node.target in dims and sorted(given, key=str) == dims[node.target]


def _is_opaque(node: fx.Node) -> bool:
    """True if `node` calls an op, neither torch's nor this library's, that reads a matrix [N, K] or
    [K, N] of the graph's inputs and another value [..., K], and makes or writes one [..., N]."""
    name = called(node)
    if not name or is_aten(node) or name.startswith(f"{NAMESPACE}::"):
        return False
    sources = {n: _source(n) for n in node.all_input_nodes}
    matrices = [source for source in sources.values() if _is_matrix(source)]
    others = [n for n, source in sources.items() if source not in matrices]
    read = {value.shape[-1] for n in others for value in tensors(n) if value.dim() > 1}
    made = {value.shape[-1] for value in tensors(node) if value.dim() > 1}
    shapes = (tuple(matrix.meta["val"].shape) for matrix in matrices)
    return any((k in read and n in made) or (n in read and k in made) for n, k in shapes)
