"""Recognizes what a piece of graph computes by computing it.

The same RoPE is written in many ways, so a cone of the graph is run, on a few random tokens in
float64, and its result compared with the formula. The cone may hold only the ops below: data
movement, and addition, negation and multiplication. Its result is then a polynomial of the inputs,
and two polynomials that agree at a random point are the same one (Schwartz-Zippel lemma), up to
float64 rounding.

That holds for the number of tokens that is run. It holds for every number because the same
polynomials make every token of the result from that token of the inputs, which `patterns.rows`
decides without running anything; a graph of one number of tokens is run with that one. No two
tokens of a probe are at the same position, so none stands for another.
"""

import math
import operator
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns import rows
from mla_fusion.patterns.nodes import dtype_of, is_float, walk

aten, prims = torch.ops.aten, torch.ops.prims

TOKENS = 3
TABLE_ROWS = 7

VIEWS = {
    operator.getitem,
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.alias.default,
}
MOVES = {
    aten.cat.default,
    aten.stack.default,
    aten.clone.default,
    aten.copy.default,
    aten.slice_scatter.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.embedding.default,
}
ARITHMETIC = {
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.neg.default,
}
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
SIZES = {aten.sym_size.int}
PURE = VIEWS | MOVES | ARITHMETIC | CASTS | SIZES
LOOKUPS = {
    aten.index.Tensor: lambda node: (node.args[0], node.args[1][0]),
    aten.index_select.default: lambda node: (node.args[0], node.args[2]),
    aten.embedding.default: lambda node: (node.args[0], node.args[1]),
}


def cone(
    outputs: Iterable[fx.Node], stop: Iterable[fx.Node] = (), ops: AbstractSet[Any] = PURE
) -> tuple[list[fx.Node], list[fx.Node]]:
    """(interior nodes in order, leaves) of what `outputs` are computed from by `ops`.

    `stop` are nodes to treat as leaves although they are of `ops`.
    """
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
    """Values of `outputs` and of all in their `cone`, for random leaves.

    Casts are no-ops if they lose no more than a value of type `activation` would. None: a node does
    not run on the probing values, casts to a lesser type, or does not treat every token alike.
    """
    interior, leaves = cone(outputs, stop)
    casts = (node for node in interior if node.target in CASTS)
    if rows.mixing(interior) or not all(_keeps_precision(cast, activation) for cast in casts):
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
    """Sizes, positions (distinct rows of the tables) or float64 numbers, the same ones at every
    call; None if a leaf has none."""
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


def same(a: Any, b: torch.Tensor) -> bool:
    """Whether two float64 results are equal up to the rounding of a handful of operations."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def unmodified(node: fx.Node) -> fx.Node | None:
    """The value of `node`'s shape, among those it is computed from, that is a mere view.

    For a rotated query that is the query before rotation, a view of its projection.
    """
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
