"""What a node of a graph stands for, and what is reached from it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized


def values(node: fx.Node) -> list[Any]:
    """One value or several; None without metadata."""
    value = node.meta.get("val")
    return list(value) if isinstance(value, tuple | list) else [value]


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The type of the one tensor that a node stands for."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_float(node: fx.Node) -> bool:
    """Whether a node stands for one tensor of a floating-point type."""
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def is_aten(node: fx.Node) -> bool:
    """Whether a node is a call of one of torch's own ops."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, direct or functionalized, by their names in the schema."""
    if node.target is auto_functionalized:
        return dict(node.kwargs)
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update({a.name: value for a, value in zip(schema, node.args, strict=False)})
    named.update(node.kwargs)
    return named


def walk(
    nodes: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """`nodes`, their neighbours, theirs and so on, each once and before its own."""
    stack = list(dict.fromkeys(nodes))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        new = dict.fromkeys(each for each in neighbours(node) if each not in seen)
        seen.update(new)
        stack += new
