"""Recognizes what a piece of graph computes by computing it.

The same RoPE is written in many ways, so a cone of the graph is run, on a few random tokens in
float64, and its result compared with the formula. The cone may hold only the ops below: data
movement, and addition, negation and multiplication. Its result is then a polynomial of the inputs,
and two polynomials that agree at a random point are the same one (Schwartz-Zippel lemma), up to
float64 rounding.

That holds for the number of tokens that is run, and for every number because the same polynomials
make every token of the result from that token of the inputs, which `mixes` decides without running
anything. No two tokens of a probe are at the same position, so none stands for another."""

import math
import operator
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns.nodes import arguments, dtype_of, is_float, tensors, walk

aten, prims = torch.ops.aten, torch.ops.prims

TOKENS, TABLE_ROWS = 3, 7
VIEWS = {
    operator.getitem, aten.reshape.default, aten.view.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.split.Tensor, aten.split_with_sizes.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.alias.default,
}  # fmt: skip
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
# What is looked up in, and where.
LOOKUPS = {
    aten.index.Tensor: lambda node: (node.args[0], node.args[1][0]),
    aten.index_select.default: lambda node: (node.args[0], node.args[2]),
    aten.embedding.default: lambda node: (node.args[0], node.args[1]),
}
PURE = VIEWS | CASTS | LOOKUPS.keys() | {
    aten.cat.default, aten.stack.default, aten.clone.default, aten.copy.default,
    aten.slice_scatter.default, aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
    aten.sym_size.int,
}  # fmt: skip
# They take sizes; a size may depend on the number of tokens.
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
# Their `dim` is one of the result that the inputs do not have.
_NEW_DIM = {aten.unsqueeze.default, aten.stack.default}


def cone(
    outputs: Iterable[fx.Node], stop: Iterable[fx.Node] = (), ops: AbstractSet[Any] = PURE
) -> tuple[list[fx.Node], list[fx.Node]]:
    """(interior nodes in order, leaves) of what `outputs` are computed from by `ops`; `stop` are
    leaves although they are of `ops`."""
    stops = set(stop)

    def inside(node: fx.Node) -> bool:
        computed = node.op == "call_function" and node.target in ops and node not in stops
        # An output of several: what made them counts.
        return computed and (node.target is not operator.getitem or node.args[0].target in ops)

    found = sorted(walk(outputs, lambda node: node.all_input_nodes if inside(node) else ()))
    return [node for node in found if inside(node)], [node for node in found if not inside(node)]


def concrete(size: Any) -> int:
    """A size of the graph with every symbol, that is the number of tokens, set to `TOKENS`."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, TOKENS)))


def concrete_shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of `node`'s value with the symbols set as in `concrete`."""
    return tuple(concrete(s) for s in node.meta["val"].shape)


def run(
    outputs: Iterable[fx.Node], activation: torch.dtype, stop: Iterable[fx.Node] = ()
) -> dict[fx.Node, Any] | None:
    """Values of `outputs` and of all in their `cone`, for random leaves. Casts are no-ops if they
    lose no more than a value of type `activation` would. None: a node does not run on the probing
    values, casts to a lesser type, or does not treat every token alike."""
    interior, leaves = cone(outputs, stop)
    casts = (node for node in interior if node.target in CASTS)
    if mixes(interior) or not all(_keeps_precision(cast, activation) for cast in casts):
        return None
    values = _leaf_values(leaves)
    return None if values is None else evaluate(interior, values, no_ops=CASTS)


def evaluate(
    interior: Iterable[fx.Node], values: dict[fx.Node, Any], no_ops: AbstractSet[Any] = frozenset()
) -> dict[fx.Node, Any] | None:
    """`values` with those of `interior`; None if a node does not run on them."""
    try:
        for node in interior:
            if node.target in no_ops:
                values[node] = values[node.all_input_nodes[0]]
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError, TypeError, KeyError):
        return None
    return values


def _keeps_precision(cast: fx.Node, activation: torch.dtype) -> bool:
    source, target = cast.all_input_nodes[0], dtype_of(cast)
    if is_float(source):
        return target in (activation, torch.float32, torch.float64)
    return dtype_of(source) is not None and target in (torch.int32, torch.int64)


def _is_table(node: fx.Node) -> bool:
    """Whether rows of `node` are looked up by position; then a probe needs only a few rows."""
    for user in node.users:
        if user.target in CASTS and _is_table(user):
            return True
        if user.target in LOOKUPS and LOOKUPS[user.target](user)[0] is node:
            return True
    return False


def _leaf_values(leaves: list[fx.Node]) -> dict[fx.Node, Any] | None:
    """Sizes, positions (distinct rows of tables) or float64 numbers; None if a leaf has none."""
    # A fixed seed: whether a layer fuses must not depend on luck.
    generator = torch.Generator().manual_seed(0x5EED)
    integer = (leaf for leaf in leaves if dtype_of(leaf) and not is_float(leaf))
    table_rows = max([TABLE_ROWS, *(math.prod(concrete_shape(leaf)) for leaf in integer)])
    values: dict[fx.Node, Any] = {}
    for leaf in leaves:
        value = leaf.meta.get("val")
        if isinstance(value, int | torch.SymInt):
            values[leaf] = concrete(value)
            continue
        shape = concrete_shape(leaf) if isinstance(value, torch.Tensor) else (-1,)
        if any(size < 0 for size in shape):
            return None  # no metadata, or no rows of TOKENS tokens
        if is_float(leaf):
            shape = (table_rows, *shape[1:]) if shape and _is_table(leaf) else shape
            values[leaf] = torch.randn(shape, generator=generator, dtype=torch.float64)
        else:
            places = torch.randperm(table_rows, generator=generator)
            values[leaf] = places[: math.prod(shape)].view(shape)
    return values


def same(values: dict[fx.Node, Any], wanted: dict[fx.Node, torch.Tensor]) -> bool:
    """Whether float64 values are those wanted, up to the rounding of a handful of operations."""
    return all(
        values[node].shape == want.shape and torch.allclose(values[node], want, 1e-9, 1e-9)
        for node, want in wanted.items()
    )


def unmodified(node: fx.Node) -> fx.Node | None:
    """The value of `node`'s shape, among those it is computed from, that is a mere view: of a
    rotated query, that before rotation, a view of its projection."""
    shape = concrete_shape(node)
    interior, leaves = cone([node])
    views = set(leaves)
    for candidate in (*leaves, *interior):
        if candidate.target in VIEWS and all(n in views for n in candidate.all_input_nodes):
            views.add(candidate)
        alike = candidate in views and dtype_of(candidate) == node.meta["val"].dtype
        if alike and concrete_shape(candidate) == shape:
            return candidate
    return None


def strip(node: fx.Node, targets: set[Any]) -> fx.Node:
    """Walk back through single-input ops of `targets`."""
    while node.op == "call_function" and node.target in targets and node.args:
        node = node.args[0]  # type: ignore[assignment]
    return node


class _Mixed(Exception):
    """An op does not keep the tokens apart, or it cannot be told."""


def mixes(interior: Iterable[fx.Node]) -> bool:
    """Whether a node of a cone does not treat every token alike, or may not.

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
    """Whether `size` is a whole multiple of `unit`."""
    return size == unit or bool((size / unit).cancel().is_Integer)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """What a node stands for: one tensor or several; none for a size."""
    if node.meta.get("val") is None:
        raise _Mixed
    return tensors(node)


def _is_symbolic(size: Any) -> bool:
    """Whether a size depends on the number of tokens."""
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
    rank = max(tensor.dim() for n in node.all_input_nodes for tensor in _tensors(n))
    along = {_token_dim(n) for n in node.all_input_nodes}
    if any(dim % rank in along for dim in dims) and not _takes_all(node, named):
        raise _Mixed


def _takes_all(node: fx.Node, named: dict[str, Any]) -> bool:
    """Whether a slice, or a scatter into one, is of all rows."""
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
