"""Building blocks of the passes: what they take and return, new nodes, going back, and dead code.
A rewrite lets readers read new nodes and leaves the old ones, dead, to `drop_dead` at the end."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from mla_fusion.config.eligibility import LayerFacts
from mla_fusion.patterns.nodes import is_aten, walk
from mla_fusion.report.reasons import Decline

# The facts of the layer that an op's argument names; it raises Declined where there are none.
FactsOf = Callable[[Any], LayerFacts]


@dataclass
class PassResult:
    """The calls that a pass looked at. `rewritten`: new node by the replaced call's name. `dead`:
    the replaced nodes."""

    rewritten: dict[str, fx.Node] = field(default_factory=dict)
    declined: list[Decline] = field(default_factory=list)
    dead: list[fx.Node] = field(default_factory=list)


def call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], val: Any, /, **kwargs: Any
) -> fx.Node:
    """A call at the insertion point, with its metadata."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = val
    return node


def empty(graph: fx.Graph, value: torch.Tensor, rows_of: Any) -> fx.Node:
    """An empty tensor like `value`, with as many rows as the node `rows_of`."""
    tokens: Any = value.shape[0]
    if not isinstance(tokens, int):
        tokens = call(graph, torch.ops.aten.sym_size.int, (rows_of, 0), tokens)
    kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    shape = [tokens, *value.shape[1:]]
    return call(graph, torch.ops.aten.empty.memory_format, (shape,), value, **kwargs)


def mutated(op: Any) -> list[str]:
    """Names of the arguments that `op` writes to, in schema order."""
    return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]


def functionalized_call(
    graph: fx.Graph, op: Any, kwargs: Mapping[str, Any], returned: torch.Tensor | None = None
) -> tuple[fx.Node, list[Any]]:
    """`auto_functionalized(op, ...)` at the insertion point, and a getitem for each output: what
    the op returns, of the fake value `returned`, or None; then its mutated arguments."""
    values = [returned, *(fake_like(kwargs[name].meta["val"]) for name in mutated(op))]
    return call_of_several(graph, auto_functionalized, (op,), values, **kwargs)


def call_of_several(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], values: list[Any], /, **kwargs: Any
) -> tuple[fx.Node, list[Any]]:
    """A call at the insertion point, and a getitem for each of its fake results, None for None."""
    node = call(graph, target, args, values, **kwargs)
    return node, [
        None if value is None else call(graph, operator.getitem, (node, index), value)
        for index, value in enumerate(values)
    ]


def fake_like(value: torch.Tensor) -> torch.Tensor:
    """A new value with the shape, strides and type of `value`, fake if `value` is."""
    return value.new_empty_strided(value.shape, value.stride())


def replace(graph: fx.Graph, old: Iterable[fx.Node], value: fx.Node) -> None:
    """Let readers of each of `old` read `value`, and erase them."""
    for node in old:
        node.replace_all_uses_with(value)
        graph.erase_node(node)


class Snapshot:
    """A graph as it is now: its nodes in their order, and their arguments."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.saved = {node: (node.args, node.kwargs) for node in graph.nodes}

    def restore(self) -> None:
        """Make the graph what it was; a node that was erased comes back as another of its name."""
        now = {node: self.graph.node_copy(node) if node._erased else node for node in self.saved}
        for node, given in self.saved.items():
            now[node].name = node.name
            now[node].args, now[node].kwargs = fx.node.map_arg(given, now.__getitem__)
        kept = set(now.values())
        added = [node for node in self.graph.nodes if node not in kept]
        for node in added:
            node.args, node.kwargs = (), {}
        for node in added:
            self.graph.erase_node(node)
        for node in now.values():
            self.graph._root.prepend(node)  # in front of what ends the list: at its end


def drop_dead(graph: fx.Graph, replaced: Iterable[fx.Node] = ()) -> None:
    """Erase every op that nothing reads: all but those that are `live`."""
    kept = set(live(graph, replaced))
    graph.eliminate_dead_code(kept.__contains__)


def live(graph: fx.Graph, replaced: Iterable[fx.Node] = ()) -> list[fx.Node]:
    """The nodes whose results are read, or that may write a KV cache beside their results, the last
    one first. An op may that is none of torch's, or is functionalized, unless it is one of
    `replaced`, or of what they read."""
    old = set(walk(replaced, lambda node: node.all_input_nodes))

    def stays(node: fx.Node) -> bool:
        if node in old:
            return node.is_impure() and node.target is not auto_functionalized
        return node.is_impure() or not (is_aten(node) or node.target is operator.getitem)

    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if any(user in found for user in node.users) or stays(node):
            found[node] = None
    return [*found]
