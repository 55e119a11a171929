"""The value of a node, the nodes that are reached from it, and the memory that it may show.

Two sources speak of memory: an op's schema, whose alias annotations name the arguments that a
result may be a view of, and fake values, whose storage is that of what they are views of. Neither
speaks about a Python function, a method, a module or a higher-order op: their results may show any
argument. The price of a wrong "may" is one copy."""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

aten = torch.ops.aten

# Their arguments: what is looked up in, and where.
LOOKUPS: dict[Any, tuple[str, str]] = {
    aten.index.Tensor: ("self", "indices"),
    aten.index_select.default: ("self", "index"),
    aten.embedding.default: ("weight", "indices"),
}


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node stands for: one, several or none."""
    value = node.meta.get("val")
    every = value if isinstance(value, tuple | list) else [value]
    return [each for each in every if isinstance(each, torch.Tensor)]


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The type of the one tensor that a node stands for."""
    return getattr(node.meta.get("val"), "dtype", None)


def is_float(node: fx.Node) -> bool:
    """True if a node stands for one tensor of a floating-point type."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def is_number(node: fx.Node) -> bool:
    """True if a node stands for a number, such as a size, or a name."""
    numbers = int | float | str | torch.SymInt | torch.SymFloat | torch.SymBool
    return isinstance(node.meta.get("val", node), numbers)


def holds(wider: torch.dtype, dtype: torch.dtype) -> bool:
    """True if type `wider` has every number of type `dtype`, so that a conversion rounds none.
    Integers are positions and places, which all fit 32 bits."""
    if wider == dtype:
        return True
    if not (wider.is_floating_point and dtype.is_floating_point):
        counts = not any(each.is_floating_point or each.is_complex for each in (wider, dtype))
        return counts and wider.itemsize >= 4
    if wider.itemsize == 1 or dtype is torch.float4_e2m1fn_x2:
        return False  # torch has no such conversion of 4-bit types, nor the eps of each 8-bit one
    a, b = torch.finfo(wider), torch.finfo(dtype)
    # The step of subnormal numbers is tiny * eps.
    return a.eps <= b.eps and a.tiny * a.eps <= b.tiny * b.eps and a.max >= b.max


def lookup(node: fx.Node) -> tuple[Any, Any]:
    """The table of a node of `LOOKUPS`, and its first index."""
    table, rows = (arguments(node)[name] for name in LOOKUPS[node.target])
    return table, rows[0] if isinstance(rows, tuple | list) else rows


def schema_of(node: fx.Node) -> Any:
    """The schema of the op that a node calls, functionalized or not; None if it calls none."""
    target = node.args[0] if node.target is auto_functionalized else node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def is_aten(node: fx.Node) -> bool:
    """True if a node is a call of one of torch's own ops."""
    return getattr(node.target, "namespace", "") in ("aten", "prims")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, direct or functionalized, by their names in the schema."""
    if node.target is auto_functionalized:
        return dict(node.kwargs)
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs


def walk(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """Depth-first order from `nodes`; each node once, before its neighbours."""
    stack = list(dict.fromkeys(nodes))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = dict.fromkeys(each for each in neighbours(node) if each not in seen)
        seen.update(new)
        stack += new


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
        """The nodes of the same storage that are still in the graph."""
        found = (twin for storage in _storages(node) for twin in self.of_storage[storage])
        return [twin for twin in found if not twin._erased]


def is_view(node: fx.Node) -> bool:
    """True if all that `node` does is to show memory of its inputs."""
    schema = schema_of(node)
    if schema is None or node.target is auto_functionalized:
        return node.target is operator.getitem
    return not schema.is_mutable and any(result.alias_info for result in schema.returns)


def _shown(node: fx.Node) -> list[fx.Node]:
    """The inputs whose memory the value of `node` may show."""
    if is_number(node):
        return []
    schema = schema_of(node)
    if schema is None:
        return [] if _is_fresh(node) else node.all_input_nodes
    # A functionalized op becomes an op in place: its results then are what it writes to.
    if node.target is not auto_functionalized and not any(r.alias_info for r in schema.returns):
        return []
    given, found = arguments(node), list[fx.Node]()
    aliased = [given.get(each.name) for each in schema.arguments if each.alias_info]
    fx.node.map_arg(aliased, found.append)
    return found


def _is_fresh(node: fx.Node) -> bool:
    """True if `node` is one of several results of an op that returns no view: its memory is shown
    neither by what the op read nor by the other results."""
    source: Any = node.args[0] if node.target is operator.getitem else node
    schema = schema_of(source)
    is_call = schema is not None and source.target is not auto_functionalized
    return is_call and not any(result.alias_info for result in schema.returns)


def _storages(node: fx.Node) -> set[int]:
    """The storage of a node's value; none of several results, each of which is a node."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not torch._C._has_storage(value):
        return set()
    return {value.untyped_storage()._cdata}
