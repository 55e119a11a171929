"""A graph as the report has it: the ops of a layer, the number of calls of each op, and the
properties of fused nodes."""

import operator
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import fx

from mla_fusion import config, ops
from mla_fusion.config import vllm_compat
from mla_fusion.passes.rewrite import live
from mla_fusion.patterns.nodes import arguments, dtype_of, tensors
from mla_fusion.patterns.site import called
from mla_fusion.report.graphs import LayerGraph, Node

# What is cut from the name of a type for the report, in this order.
_CUT = {"bfloat": "bf", "float": "fp", "uint": "u", "int": "i", "_e4m3fnuz": "fnuz", "_e4m3fn": ""}


def counts(graph: fx.Graph, replaced: Iterable[fx.Node] = ()) -> Counter[str]:
    """The number of calls of each op, without dead code and `replaced`, as `drop_dead` has it."""
    kept = live(graph, replaced)
    return Counter(_label(node) for node in kept if _is_op(node))


def variant(fused: fx.Node) -> ops.Variant:
    """The properties of a fused node that a warm-up compiles kernels for."""
    args: dict[str, Any] = dict(fused.kwargs)
    typed = (args[name] for name in ("cos_sin_cache", "prepared_q", "q_factor"))
    table, query, factor = (str(dtype_of(n) if n else "").removeprefix("torch.") for n in typed)
    rope_dim = args["k_pe"].meta["val"].shape[-1]
    normed = args.get("kv_norm_weight") is not None
    epsilon = args["kv_norm_epsilon"] if normed else None
    kept = args["is_neox"], rope_dim, table, query, args["kv_cache_dtype"]
    return ops.Variant(*kept, factor, epsilon)


def layer_of(attention: fx.Node, calls: Container[fx.Node]) -> list[Node]:
    """The ops of a layer: those behind the attention before it, or, of the first one, all in front.
    `calls` are all attention calls of the graph."""
    found: list[Node] = []
    node = attention
    while node.op != "root":
        if _is_op(node) and node.users:
            found.append(_describe(node))
        node = node.prev
        if node in calls:
            break
    return found[::-1]


def _is_op(node: fx.Node) -> bool:
    """True for a call; a getitem is none, but names one output of its producer."""
    return node.op == "call_function" and node.target is not operator.getitem


def _label(node: fx.Node) -> str:
    return called(node) or getattr(node.target, "__name__", str(node.target))


def _describe(node: fx.Node) -> Node:
    results = ", ".join(map(_result, tensors(node)))
    inputs = [
        f"{n.args[0].name}.{n.args[1]}" if n.target is operator.getitem else n.name
        for n in node.all_input_nodes
    ]
    return Node(node.name, _label(node), inputs, results, _bounds(node))


def _bounds(node: fx.Node) -> str:
    """Those of a slice, as Python writes them; empty for any other op."""
    if _label(node) not in ("aten::slice", "aten::slice_scatter"):
        return ""
    args = arguments(node)
    ends = (args["start"] or "", "" if args["end"] in (None, sys.maxsize) else args["end"])
    span = ":".join(map(str, ends)) + (f":{args['step']}" if args["step"] != 1 else "")
    return f"[{':, ' * args['dim']}{span}]"


def named(layer: LayerGraph, fused: fx.Node) -> LayerGraph:
    """`layer` where inputs of the graph have names that tell what they are: the arguments of the
    fused node, the layer's index, and T for the token count."""
    names = {}
    for node in fused.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.SymInt):
            names[node.name] = "T"
    for argument, node in fused.kwargs.items():
        if isinstance(node, fx.Node) and node.op == "placeholder":
            name = vllm_compat.traced_layer_name(node)
            names[node.name] = f"layer {config.layer_index(name)}" if name else argument
    return LayerGraph(*(
        [node._replace(inputs=[names.get(each, each) for each in node.inputs]) for node in nodes]
        for nodes in (layer.before, layer.after)
    ))  # fmt: skip


def _result(value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    for long, short in _CUT.items():
        dtype = dtype.replace(long, short)
    # The one symbol of a decode graph is the token count.
    shape = re.sub(r"\bs\d+\b", "T", ", ".join(map(str, value.shape)))
    return f"{dtype}[{shape}]"
