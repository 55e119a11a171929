"""Whether ops treat every token alike, decided by sizes and schemas without running anything."""

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns.nodes import LOOKUPS, arguments, lookup, tensors

aten = torch.ops.aten

# They take sizes; a size may depend on the number of tokens.
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
# Their `dim` is one of the result that the inputs do not have.
_NEW_DIM = {aten.unsqueeze.default, aten.stack.default}


class _Mixed(Exception):
    """An op does not keep the tokens apart, or it cannot be told."""


def mixes(interior: Iterable[fx.Node]) -> bool:
    """True if a node of a cone does not treat every token alike, or may not.

    A value has at most one token dimension: the one whose size is a multiple of the number of
    tokens, which is a symbol. An op keeps the tokens apart if token t of its result is a function
    of token t of its inputs, the same function for every t and for every number of tokens; then so
    does a cone of such ops. It rests on the sizes in the metadata and on the names of an op's
    arguments in its schema. An op that acts along the token dimension is refused unless it takes
    all of it, from 0 to the end; so is one whose numbers depend on the number of tokens.

    Where no size is a symbol the graph has one number of tokens, and is probed with that."""
    unit: Any = None
    try:
        for node in interior:
            shapes = (tensor.shape for n in (node, *node.all_input_nodes) for tensor in _tensors(n))
            sizes: list[Any] = [size for shape in shapes for size in shape if _is_symbolic(size)]
            for size in (size.node.expr for size in sizes):
                # The least size so far of which all others are multiples.
                if unit is None or (_times(unit, size) and not _times(size, unit)):
                    unit = size
                if not _times(size, unit):
                    return True
            _check(node)
    except _Mixed:
        return True
    return False


def _times(size: Any, unit: Any) -> bool:
    """True if `size` is a whole multiple of `unit`."""
    return size == unit or bool((size / unit).cancel().is_Integer)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors of a node: one, several, or none for a size."""
    if node.meta.get("val") is None:
        raise _Mixed
    return tensors(node)


def _is_symbolic(size: Any) -> bool:
    """True if a size depends on the number of tokens."""
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
    of_tokens = any(dim is not None for dim in given)
    expanded = made is not None and node.target is aten.expand.default
    if of_tokens != (made is not None) and not expanded:
        raise _Mixed  # some rows of a value without tokens, or one row of all
    named = arguments(node)
    _check_dim(node, named)
    _check_sizes(node, named)
    # Tokens may be what is looked up, not what is looked up in.
    if node.target is aten.index.Tensor:
        dim, places = _token_dim(named["self"]), named["indices"]
        if dim is not None and dim < len(places) and places[dim] is not None:
            raise _Mixed
    if node.target is aten.embedding.default and _token_dim(named["weight"]) is not None:
        raise _Mixed
    if node.target in _RESHAPES and made is not None:
        before, after = inputs[0].meta["val"].shape, node.meta["val"].shape
        if math.prod(before[: given[0]]) != math.prod(after[:made]):
            raise _Mixed


def _check_dim(node: fx.Node, named: dict[str, Any]) -> None:
    """An op along one dimension: not along that of the tokens, unless it takes all of it."""
    if "dim" not in named or node.target in _NEW_DIM:
        return
    dims = named["dim"] if isinstance(named["dim"], tuple | list) else [named["dim"]]
    read = [lookup(node)[0]] if node.target in LOOKUPS else node.all_input_nodes
    rank = max(tensor.dim() for n in read for tensor in _tensors(n))
    along = {_token_dim(n) for n in read}
    if any(dim % rank in along for dim in dims) and not _takes_all(node, named):
        raise _Mixed


def _takes_all(node: fx.Node, named: dict[str, Any]) -> bool:
    """True if a slice, or a scatter into one, is of all rows."""
    if not {"start", "end", "step"} <= named.keys():
        return False
    whole = [*node.all_input_nodes[:1], node, named.get("src", node)]
    rows = {str(_tensors(each)[0].shape[_token_dim(each) or 0]) for each in whole}
    return named["start"] in (None, 0) and named["step"] == 1 and len(rows) == 1


def _check_sizes(node: fx.Node, named: dict[str, Any]) -> None:
    """A number that is computed from the number of tokens is a size, or the end of all rows."""
    if node.target in _RESHAPES or node.target is aten.expand.default:
        return
    for name, value in named.items():
        found: list[fx.Node] = []
        fx.node.map_arg(value, found.append)
        sized = not all(_tensors(n) for n in found)
        if sized and not (name == "end" and _takes_all(node, named)):
            raise _Mixed
