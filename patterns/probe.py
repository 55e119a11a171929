"""Recognizes what a piece of graph computes by computing it.

The same RoPE is written in many ways, so a cone of the graph is run, on a few random tokens in
float64, and its result compared with the formula. The cone may hold only the ops below: data
movement, and addition, negation and multiplication. Its result is then a polynomial of the inputs,
and two polynomials that agree at a random point are the same one (Schwartz-Zippel lemma), up to
float64 rounding.

Polynomials round nothing, and the graph does. Three rules keep its rounding that of the formula:

1. No type on the way to an output rounds more than the output's own (`_rounds`), whatever the op.
2. No terms cancel: `(k + p) - p` is k, less all digits below the last of p. The cone is also run
   on the magnitudes of its leaves with every sign positive, and compared with the formula run so.
   The two differ as soon as a term of one node is missing in the result, so every value on the way
   is bounded by the formula's terms, and so is the error.
3. No constant but 1 and -1 multiplies: `k * 1e5 * 1e-5` is k, but leaves the range of fp16.

That holds for the number of tokens that is run, and for every number because the same polynomials
make every token of the result from that token of the inputs, which `tokens.mixes` decides without
running anything. No two tokens of a probe are at the same position, so none stands for another."""

import math
import operator
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns.nodes import (
    LOOKUPS,
    arguments,
    dtype_of,
    holds,
    is_float,
    lookup,
    tensors,
    walk,
)
from mla_fusion.patterns.tokens import mixes

aten, prims = torch.ops.aten, torch.ops.prims

TOKENS, TABLE_ROWS = 3, 7
VIEWS = {
    operator.getitem, aten.reshape.default, aten.view.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int,
    aten.split.Tensor, aten.split_with_sizes.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.alias.default,
}  # fmt: skip
CASTS = {prims.convert_element_type.default, aten._to_copy.default}
ARITHMETIC = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor}
PURE = VIEWS | CASTS | LOOKUPS.keys() | ARITHMETIC | {
    aten.cat.default, aten.stack.default, aten.clone.default, aten.copy.default,
    aten.slice_scatter.default, aten.neg.default, aten.sym_size.int,
}  # fmt: skip

Values = dict[fx.Node, Any]
Minus = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
    outputs: Iterable[fx.Node], stop: Iterable[fx.Node] = ()
) -> list[tuple[Values, Minus]] | None:
    """Values of `outputs` and of all in their `cone`, for random leaves; then their magnitudes, of
    which nothing is subtracted. Each comes with what stands for a subtraction, for `same`. None: a
    node does not run on the probing values, rounds or multiplies by a constant as the formula does
    not, or does not treat every token alike."""
    outputs, stop = list(outputs), list(stop)
    interior, leaves = cone(outputs, stop)
    if mixes(interior) or any(map(_has_constant, interior)):
        return None
    values = None if any(_rounds(each, stop) for each in outputs) else _leaf_values(leaves)
    if values is None:
        return None
    magnitudes = {leaf: abs(v) if is_float(leaf) else v for leaf, v in values.items()}
    signed = evaluate(interior, values, _exact)
    unsigned = evaluate(interior, magnitudes, _unsigned)
    if signed is None or unsigned is None:
        return None
    return [(signed, torch.sub), (unsigned, torch.add)]


def evaluate(
    interior: Iterable[fx.Node],
    values: Values,
    op_of: Callable[[fx.Node], Callable[..., Any]] = operator.attrgetter("target"),
) -> Values | None:
    """`values` with those of `interior`, by the op itself or what `op_of` puts in its place; None
    if a node does not run on them."""
    try:
        for node in interior:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = op_of(node)(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, KeyError):
        return None
    return values


def _same_value(value: Any, *unused: Any, **options: Any) -> Any:
    return value


def _exact(node: fx.Node) -> Any:
    """The op in float64: a cast changes nothing."""
    return _same_value if node.target in CASTS else node.target


def _unsigned(node: fx.Node) -> Any:
    """The op on magnitudes; integers, which are positions, keep their signs."""
    if not is_float(node):
        return _exact(node)
    if node.target is aten.neg.default or (node.target is aten.mul.Tensor and _constants(node)):
        return _same_value
    return aten.add.Tensor if node.target is aten.sub.Tensor else _exact(node)


def _constants(node: fx.Node) -> list[Any]:
    """The numbers among the factors and terms of a product, a sum or a difference."""
    if node.target not in ARITHMETIC:
        return []
    return [each for each in arguments(node).values() if isinstance(each, int | float | complex)]


def _has_constant(node: fx.Node) -> bool:
    """True if a number other than 1 and -1 changes a float value."""
    return is_float(node) and any(abs(number) != 1 for number in _constants(node))


def _rounds(output: fx.Node, stop: list[fx.Node]) -> bool:
    """True if a node before `output` rounds a value, or may, more than the output's type does: its
    type holds neither every number of an input's type nor every one of the output's. Decided by
    types alone, so `copy` and `slice_scatter` into a buffer round like a cast."""
    for node in cone([output], stop)[0]:
        values = [lookup(node)[0]] if node.target in LOOKUPS else node.all_input_nodes
        for source in (tensor.dtype for value in values for tensor in tensors(value)):
            for made in (tensor.dtype for tensor in tensors(node)):
                both_float = made.is_floating_point and source.is_floating_point
                enough = both_float and holds(made, output.meta["val"].dtype)
                if not (enough or holds(made, source)):
                    return True
    return False


def _is_table(node: fx.Node) -> bool:
    """True if rows of `node` are looked up by position; then a probe needs only a few rows."""
    for user in node.users:
        if user.target in CASTS and _is_table(user):
            return True
        if user.target in LOOKUPS and lookup(user)[0] is node:
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


def same(runs: list[tuple[Values, Minus]], formula: Callable[[Values, Minus], Values]) -> bool:
    """True if all nodes that `formula` gives a value for have it in both of `run`, up to the
    float64 rounding of a handful of operations."""
    return all(
        values[node].shape == want.shape and torch.allclose(values[node], want, 1e-9, 1e-9)
        for values, minus in runs
        for node, want in formula(values, minus).items()
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
