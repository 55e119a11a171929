"""Pass 7: products of one input that were measured faster here become one launch.

    before   x ─┬► mm(x, permute(w_kv)) ─► kv
                └► mm(x, permute(w_q)) ─► q

    after    x, [w_q, w_kv] ─► projection
                                [0] q, [1] kv

Each product of an activation with a weight is looked at (`patterns.products`), wherever it is:
o_proj, those of a dense MLP and of a router too. Two products of one input that follow each other
become one op if that was measured for their sizes; else each becomes an op of its own, or stays.

Safe because the op is a function of the same values, for any number of rows: beyond
`projections.MAX_TOKENS` it computes what was there before."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from mla_fusion import ops, projections
from mla_fusion.config.eligibility import UNCHOSEN
from mla_fusion.passes.rewrite import FactsOf, PassResult, call_of_several
from mla_fusion.patterns.products import Product, input_of, read_product
from mla_fusion.patterns.site import ATTENTION, functionalized_op
from mla_fusion.report.reasons import Decline, Declined


@dataclass
class MLAProjectionPass:
    """`tokens` are the first and the last number of tokens that the graph serves; the nodes `kept`
    stay as they are."""

    tokens: tuple[int, int]
    kept: Set[fx.Node] = frozenset()

    def __call__(self, graph: fx.Graph) -> PassResult:
        result, slower = PassResult(), list[str]()
        for products in _by_input(graph, self.kept, result.declined):
            while products:
                launch = next(filter(self._is_faster, _launches(products)), None)
                if launch is None:
                    slower.append(str(products.pop(0)))
                    continue
                new = _rewrite(graph, launch)
                result.rewritten |= {product.node.name: new for product in launch}
                result.dead += [product.node for product in launch]
                del products[: len(launch)]
        widths = ", ".join(dict.fromkeys(slower))
        result.declined += [Decline("product-slower", widths) for _ in slower]
        return result

    def _is_faster(self, launch: Sequence[Product]) -> bool:
        """True if one launch was measured faster for any number of tokens of this graph."""
        value = launch[0].x.meta["val"]
        (rows, k), (first, last) = value.shape, self.tokens
        served: Iterable[int] = range(first, min(last, projections.MAX_TOKENS) + 1)
        if isinstance(rows, int):
            served = {rows}.intersection(served)
        sizes = tuple(product.size for product in launch)
        of = ops.Product(k, sizes, 8 * launch[0].dtype.itemsize)
        return any(projections.plan_for(value.device, of, n) for n in served)


def left_out(graph: fx.Graph, facts_of: FactsOf) -> set[fx.Node]:
    """The nodes in front of the attention of each layer that the option `layers` leaves out, back
    to the attention before. In front of it lies the rest of the layer before, too."""
    found, code = set[fx.Node](), ""
    for node in reversed(graph.nodes):
        if functionalized_op(node) == ATTENTION:
            try:
                decline = facts_of(node.kwargs["layer_name"]).decline
            except Declined as error:
                decline = error.decline
            code = decline.code if decline else ""
        if code == UNCHOSEN:
            found.add(node)
    return found


def _by_input(
    graph: fx.Graph, kept: Set[fx.Node], declined: list[Decline]
) -> Iterator[list[Product]]:
    """The products of each input, in the order of the graph. The others go to `declined`."""
    found: dict[fx.Node, list[Product]] = defaultdict(list)
    for node in graph.nodes:
        try:
            product = read_product(node)
            if product and node in kept:
                raise Declined(UNCHOSEN)
        except Declined as error:
            declined.append(error.decline)
        else:
            if product is not None:
                found[product.x].append(product)
    yield from found.values()


def _launches(products: Sequence[Product]) -> Iterator[list[Product]]:
    """What one launch may compute, with the first of `products`, which have one input. The better
    launch comes first, and in it the product with most columns, as pairs are measured."""
    for count in (2, 1) if products[0].scales is None else (1,):
        if len(group := products[:count]) == count and len({each.dtype for each in group}) == 1:
            yield sorted(group, key=lambda product: product.size, reverse=True)


def _rewrite(graph: fx.Graph, launch: Sequence[Product]) -> fx.Node:
    """One op in front of its first product; what read the products reads its results."""
    first = launch[0]
    x = input_of(first.node)  # of a new launch, if one made it
    values = [product.node.meta["val"] for product in launch]
    weights = [product.weight for product in launch]
    with graph.inserting_before(min(product.node for product in launch)):
        given = (x, weights) if first.scales is None else (x, weights, first.scales, first.e8m0)
        new, results = call_of_several(graph, ops.get(ops.PROJECTION), given, values)
    for product, made in zip(launch, results, strict=True):
        product.node.replace_all_uses_with(made)
    return new


def described(launch: fx.Node) -> ops.Product:
    """What a call of the op reads and makes."""
    args: Any = launch.args
    weights = [weight.meta["val"] for weight in args[1]]
    sizes, bits = tuple(map(len, weights)), 8 * weights[0].dtype.itemsize
    return ops.Product(args[0].meta["val"].shape[1], sizes, bits)
