"""Building blocks of the passes: new nodes with metadata, going back, and dropping dead code.

A rewrite lets readers read new nodes and leaves the old nodes where they are, dead, until
`drop_dead` at the end of the pipeline. So a `Snapshot` of all arguments undoes every rewrite.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from mla_fusion.patterns import probe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
    """A call at the insertion point, with its metadata."""
    node = graph.call_function(target, args)
    node.meta["val"] = val
    return node


def empty(graph: fx.Graph, value: torch.Tensor, rows_of: Any) -> fx.Node:
    """An empty tensor like `value`, with as many rows as the node `rows_of`."""
    tokens: Any = value.shape[0]
    if not isinstance(tokens, int):
        tokens = call(graph, torch.ops.aten.sym_size.int, (rows_of, 0), tokens)
    node = graph.call_function(
        torch.ops.aten.empty.memory_format,
        ([tokens, *value.shape[1:]],),
        {"dtype": value.dtype, "device": value.device, "pin_memory": False},
    )
    node.meta["val"] = value
    return node


def functionalized_call(
    graph: fx.Graph,
    op: torch._ops.OpOverload,
    kwargs: Mapping[str, Any],
    returned: Sequence[Any],
    mutated: Sequence[str],
) -> tuple[fx.Node, list[Any]]:
    """`auto_functionalized(op, ...)` at the insertion point, and a getitem for each output.

    Args:
        returned: fake values of what the op returns; (None,) if it returns nothing, and then the
            first output is None too.
        mutated: names of its mutated arguments, in schema order; they follow the returned values.
    """
    values = (*returned, *(fake_like(kwargs[name].meta["val"]) for name in mutated))
    node = graph.call_function(auto_functionalized, (op,), dict(kwargs))
    node.meta["val"] = values
    outputs = [
        None if value is None else call(graph, operator.getitem, (node, index), value)
        for index, value in enumerate(values)
    ]
    return node, outputs


def fake_like(value: torch.Tensor) -> torch.Tensor:
    """A new value with the shape, strides and type of `value`, fake if `value` is."""
    return value.new_empty_strided(value.shape, value.stride())


class Snapshot:
    """The arguments of every node of a graph; valid until an old node is erased."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.saved = {node: (node.args, node.kwargs) for node in graph.nodes}

    def restore(self) -> None:
        """Give the old nodes their arguments back and erase the new nodes."""
        for node, (args, kwargs) in self.saved.items():
            node.args, node.kwargs = args, kwargs
        for node in reversed([n for n in self.graph.nodes if n not in self.saved]):
            self.graph.erase_node(node)


def _unread_users(node: fx.Node) -> list[fx.Node] | None:
    """All that is computed from `node`, last first; None if any of it is read."""
    found: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target not in probe.PURE:
                return None
            if user not in found:
                found[user] = None
                stack.append(user)
    return sorted(found, reverse=True)


def drop_dead(graph: fx.Graph, roots: Iterable[fx.Node], *, functionalized: bool = False) -> None:
    """Erase those of `roots` that nothing uses any more, and what only they used.

    A view that nothing reads (AOT autograd leaves some) does not keep its source. A functionalized
    op may write more than its results, such as a KV cache: it is erased only if `functionalized`
    says that another op took its place.
    """
    worklist = list(roots)
    while worklist:
        node = worklist.pop()
        stays = not functionalized if node.target is auto_functionalized else node.is_impure()
        if node._erased or stays:
            continue
        unread = _unread_users(node)
        if unread is None:
            continue
        for dead in (*unread, node):
            worklist.extend(dead.all_input_nodes)
            graph.erase_node(dead)
