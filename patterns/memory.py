"""Which nodes may show the same memory, decided by what torch knows of them.

Two sources speak: an op's schema, whose alias annotations name the arguments that a result may be a
view of, and fake values, whose storage is that of what they are views of. Neither speaks about a
Python function, a method, a module or a higher-order op: their results may show any argument. The
price of a wrong "may" is one copy.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from mla_fusion.patterns.nodes import arguments, values, walk

_NUMBERS = (int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool)


class Memory:
    """Who shows whose memory in one graph. Nodes made later are known by their schema alone."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of_storage: dict[int, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            for storage in _storages(node):
                self.of_storage[storage].append(node)

    def origins(self, node: fx.Node) -> set[fx.Node]:
        """`node` and all whose memory it may show."""
        return set(walk([node], lambda each: [*_shown(each), *self._twins(each)]))

    def viewers(self, nodes: Iterable[fx.Node], besides: Collection[fx.Node]) -> set[fx.Node]:
        """`nodes` and all that may show memory of one of them, without what is in `besides`."""

        def showing(node: fx.Node) -> list[fx.Node]:
            views = (user for user in node.users if node in _shown(user))
            return [each for each in (*views, *self._twins(node)) if each not in besides]

        return set(walk(nodes, showing))

    def _twins(self, node: fx.Node) -> list[fx.Node]:
        """What has the same storage, as far as it is still in the graph."""
        found = (twin for storage in _storages(node) for twin in self.of_storage[storage])
        return [twin for twin in found if not twin._erased]


def is_view(node: fx.Node) -> bool:
    """Whether all that `node` does is to show memory of its inputs."""
    schema = _schema(node)
    if schema is None or node.target is auto_functionalized:
        return node.target is operator.getitem
    return not schema.is_mutable and any(result.alias_info for result in schema.returns)


def _shown(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the value of `node` may show."""
    if isinstance(node.meta.get("val", node), _NUMBERS):
        return []
    schema = _schema(node)
    if schema is None:
        return node.all_input_nodes
    # A functionalized op becomes an op in place: its results then are what it writes to.
    if node.target is not auto_functionalized and not any(r.alias_info for r in schema.returns):
        return []
    given = arguments(node)
    found: list[fx.Node] = []
    for argument in schema.arguments:
        if argument.alias_info:
            fx.node.map_arg(given.get(argument.name), found.append)
    return found


def _schema(node: fx.Node) -> Any:
    target = node.args[0] if node.target is auto_functionalized else node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def _storages(node: fx.Node) -> set[int]:
    return {
        each.untyped_storage()._cdata
        for each in values(node)
        if isinstance(each, torch.Tensor) and torch._C._has_storage(each)
    }
