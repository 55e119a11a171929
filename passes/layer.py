"""The last layer of a graph, read for the report: the ops behind the attention before it.

Those before the first attention count only in a model of one layer.
"""

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns.nodes import values
from mla_fusion.patterns.site import functionalized_op, op_name
from mla_fusion.report.layer_graph import Node

# What is cut from the name of a type, in this order.
_CUT = {
    "bfloat": "bf",
    "float": "fp",
    "uint": "u",
    "int": "i",
    "_e4m3fnuz": "fnuz",
    "_e4m3fn": "",
}


def of_last_layer(calls: Sequence[fx.Node]) -> list[Node]:
    """The ops of the last layer; `calls` are all attention calls of the graph, in order."""
    found: list[Node] = []
    node = calls[-1] if calls else None
    while node is not None and node.op != "root":
        # A getitem is no op: it names one output of its producer.
        if node.op == "call_function" and node.users and node.target is not operator.getitem:
            found.append(_describe(node))
        node = node.prev
        if node in calls:
            break
    return found[::-1]


def _describe(node: fx.Node) -> Node:
    name = functionalized_op(node) or op_name(node.target)
    label = name or getattr(node.target, "__name__", str(node.target))
    results = [_tensor(value) for value in values(node) if isinstance(value, torch.Tensor)]
    return Node(node.name, label, [_input(n) for n in node.all_input_nodes], ", ".join(results))


def _input(node: fx.Node) -> str:
    if node.target is operator.getitem:
        producer: Any = node.args[0]
        return f"{producer.name}.{node.args[1]}"
    return node.name


def _tensor(value: torch.Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    for long, short in _CUT.items():
        dtype = dtype.replace(long, short)
    # The one symbol of a decode graph is the token count.
    shape = re.sub(r"\bs\d+\b", "T", ", ".join(str(size) for size in value.shape))
    return f"{dtype}[{shape}]"
