"""One layer of a compiled graph, before and after the passes, small enough to store in a report.

The ops of a layer are those between two attention calls. The last layer is taken, so that what
precedes the first attention does not count; a model of one layer shows what precedes it too.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mla_fusion.patterns.site import functionalized_op, op_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

_SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8",
    "float8_e4m3fnuz": "fp8fnuz",
    "int64": "i64",
    "int32": "i32",
    "uint8": "u8",
}


class Node(NamedTuple):
    """One op: its name in the graph, what it calls, what it reads, and its result.

    `inputs` are names of nodes, with ".1" for the second output of an op that has several; some
    lie outside the layer. `result` is text such as "bf16[T, 16, 192]", T being the token count.
    """

    name: str
    op: str
    inputs: list[str]
    result: str


@dataclass
class LayerGraph:
    """The ops of one layer in graph order. A node that was kept has the same name in both."""

    before: list[Node]
    after: list[Node]

    def census(self) -> dict[str, dict[str, int]]:
        """How often each op is called, under "before" and "after"."""
        return {
            stage: dict(Counter(node.op for node in nodes))
            for stage, nodes in (("before", self.before), ("after", self.after))
        }

    def changes(self) -> list[tuple[str, int, int]]:
        """(op, calls before, calls after) of every op whose count changed."""
        before, after = self.census().values()
        ops = sorted({*before, *after})
        return [
            (op, before.get(op, 0), after.get(op, 0))
            for op in ops
            if before.get(op, 0) != after.get(op, 0)
        ]

    @classmethod
    def from_json(cls, stored: dict[str, list[list[Any]]]) -> LayerGraph:
        """What `json.dumps` made of `dataclasses.asdict`."""
        return cls(*([Node(*row) for row in stored[stage]] for stage in ("before", "after")))


def of_last_layer(calls: Sequence[fx.Node]) -> list[Node]:
    """The ops of the last layer; `calls` are all attention calls of the graph, in order."""
    found: list[Node] = []
    node = calls[-1] if calls else None
    while node is not None and node.op != "root":
        # The pieces of an op with several outputs are told by its name.
        if node.op == "call_function" and node.users and node.target is not operator.getitem:
            found.append(_describe(node))
        node = node.prev
        if node in calls:
            break
    return found[::-1]


def _describe(node: fx.Node) -> Node:
    name = functionalized_op(node) or op_name(node.target)
    label = name or getattr(node.target, "__name__", str(node.target))
    results = [text for value in _values(node) if (text := _tensor(value))]
    return Node(node.name, label, [_input(n) for n in node.all_input_nodes], ", ".join(results))


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def _input(node: fx.Node) -> str:
    if node.target is operator.getitem:
        producer: Any = node.args[0]
        return f"{producer.name}.{node.args[1]}"
    return node.name


def _tensor(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    dtype = str(value.dtype).removeprefix("torch.")
    # The one symbol of a decode graph is the token count.
    shape = re.sub(r"\bs\d+\b", "T", ", ".join(str(size) for size in value.shape))
    return f"{_SHORT.get(dtype, dtype)}[{shape}]"
