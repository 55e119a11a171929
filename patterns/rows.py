"""Whether a piece of graph does the same to every token, by construction.

A value has at most one token dimension: the one whose size is a multiple of the number of tokens,
which is a symbol. An op keeps the tokens apart if token t of its result is a function of token t of
its inputs, the same function for every t and for every number of tokens. Functions of that kind
compose, so a cone of such ops is one of them, and three random tokens stand for all
(`patterns.probe`). It rests on the sizes in the metadata and on the names of an op's arguments in
its schema. An op that acts along the token dimension is refused unless it takes all of it, from 0
to the end; so is one whose numbers depend on the number of tokens.

Where no size is a symbol the graph has one number of tokens, and is probed with that.
"""

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns.nodes import arguments, values

aten = torch.ops.aten

# They take sizes; a size may depend on the number of tokens.
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
# Their `dim` is one of the result that the inputs do not have.
_NEW_DIM = {aten.unsqueeze.default, aten.stack.default}


class _Mixed(Exception):
    """An op does not keep the tokens apart, or it cannot be told."""


def mixing(interior: Iterable[fx.Node]) -> fx.Node | None:
    """The first node of a cone that does not treat every token alike; None if all do."""
    unit: Any = None
    for node in interior:
        try:
            for size in (s for n in (node, *node.all_input_nodes) for s in _symbolic(n)):
                # The least size so far of which all others are multiples.
                if unit is None or (_times(unit, size) and not _times(size, unit)):
                    unit = size
                if not _times(size, unit):
                    raise _Mixed
            _check(node)
        except _Mixed:
            return node
    return None


def _times(size: Any, unit: Any) -> bool:
    """Whether `size` is a whole multiple of `unit`."""
    return size == unit or bool((size / unit).cancel().is_Integer)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node stands for: one tensor or several; none for a size."""
    every = values(node)
    if any(each is None for each in every):
        raise _Mixed
    return [each for each in every if isinstance(each, torch.Tensor)]


def _symbolic(node: fx.Node) -> list[Any]:
    """The sizes of a node's value that depend on the number of tokens."""
    sizes: list[Any] = [size for tensor in _tensors(node) for size in tensor.shape]
    return [size.node.expr for size in sizes if _is_symbolic(size)]


def _is_symbolic(size: Any) -> bool:
    return not isinstance(size, int) and bool(size.node.expr.free_symbols)


def _token_dim(node: fx.Node) -> int | None:
    """The token dimension of a node's value, or of every one of its values."""
    shapes = [tensor.shape for tensor in _tensors(node)]
    dims = [[dim for dim, size in enumerate(shape) if _is_symbolic(size)] for shape in shapes]
    if any(len(each) > 1 or each != dims[0] for each in dims):
        raise _Mixed
    return dims[0][0] if dims and dims[0] else None


def _check(node: fx.Node) -> None:
    """Raise `_Mixed` unless `node` keeps the tokens apart."""
    made = _token_dim(node)
    inputs = [n for n in node.all_input_nodes if _tensors(n)]
    given = [_token_dim(n) for n in inputs]
    if not _tensors(node) or node.target is operator.getitem:
        return
    assert isinstance(node.target, torch._ops.OpOverload)
    if made is None:
        if any(dim is not None for dim in given):
            raise _Mixed
    elif all(dim is None for dim in given) and node.target is not aten.expand.default:
        raise _Mixed  # some rows of a value without tokens
    named = arguments(node)
    _check_dim(node, named)
    _check_lookup(node.target, named)
    _check_sizes(node, named)
    if node.target in _RESHAPES and made is not None:
        before, after = inputs[0].meta["val"].shape, node.meta["val"].shape
        if math.prod(before[: given[0]]) != math.prod(after[:made]):
            raise _Mixed


def _check_dim(node: fx.Node, named: dict[str, Any]) -> None:
    """An op along one dimension: not along that of the tokens, unless it takes all of it."""
    if "dim" not in named or node.target in _NEW_DIM:
        return
    dim = named["dim"]
    rank = max(tensor.dim() for n in node.all_input_nodes for tensor in _tensors(n))
    along = {_token_dim(n) for n in node.all_input_nodes}
    for each in dim if isinstance(dim, tuple | list) else [dim]:
        if each % rank in along and not _takes_all(node, named):
            raise _Mixed


def _takes_all(node: fx.Node, named: dict[str, Any]) -> bool:
    """Whether a slice, or a scatter into one, is of all rows."""
    if not {"start", "end", "step"} <= named.keys():
        return False
    whole = [*node.all_input_nodes[:1], node, named.get("src", node)]
    rows = {str(_tensors(each)[0].shape[_token_dim(each) or 0]) for each in whole}
    return named["start"] in (None, 0) and named["step"] == 1 and len(rows) == 1


def _check_lookup(target: torch._ops.OpOverload, named: dict[str, Any]) -> None:
    """Tokens may be what is looked up, not what is looked up in."""
    if target is aten.index.Tensor:
        dim, places = _token_dim(named["self"]), named["indices"]
        if dim is not None and dim < len(places) and places[dim] is not None:
            raise _Mixed
    if target is aten.embedding.default and _token_dim(named["weight"]) is not None:
        raise _Mixed


def _check_sizes(node: fx.Node, named: dict[str, Any]) -> None:
    """A number that is computed from the number of tokens is a size, or the end of all rows."""
    for name, value in named.items():
        found: list[fx.Node] = []
        fx.node.map_arg(value, found.append)
        if all(_tensors(n) for n in found):
            continue
        sized = node.target in _RESHAPES or node.target is aten.expand.default
        if not sized and not (name == "end" and _takes_all(node, named)):
            raise _Mixed
