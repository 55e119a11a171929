"""A graph as the report has it: the ops of a layer, the number of calls of each op, and the
properties of fused nodes."""

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import live
from mla_fusion.patterns.nodes import dtype_of, tensors
from mla_fusion.patterns.site import called
from mla_fusion.report.graphs import Node

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
    return ops.Variant(args["is_neox"], rope_dim, table, query, args["kv_cache_dtype"], factor)


def last_layer(calls: Sequence[fx.Node]) -> list[Node]:
    """The ops of the last layer: those behind the attention before it, or, of a model of one layer,
    all in front. `calls` are all attention calls of the graph, in order."""
    found: list[Node] = []
    node = calls[-1] if calls else None
    while node is not None and node.op != "root":
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
    return Node(node.name, _label(node), inputs, results)


def _result(value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    for long, short in _CUT.items():
        dtype = dtype.replace(long, short)
    # The one symbol of a decode graph is the token count.
    shape = re.sub(r"\bs\d+\b", "T", ", ".join(map(str, value.shape)))
    return f"{dtype}[{shape}]"
