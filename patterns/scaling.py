"""A query multiplied by one factor per token after its rotation, as `llama_4_scaling` does.

    q (rotated) [T, H, P + R] ─► (cast) ─────► mul ─► (cast) ─► attention
    factor, T numbers ─► (view, expand, cast) ──┘

The product is taken off in front of the spellings of RoPE, so each of them has it without knowing
it. The graph may round the query before it and its result after it, to the activation type.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import dtype_of
from mla_fusion.patterns.site import Site


def unscaled(site: Site) -> tuple[Site, fx.Node | None]:
    """The site with the query before such a product, and the factors; else (site, None)."""
    call = product(site)
    if call is None or "val" not in call.meta or call.meta["val"].dtype == torch.float64:
        return site, None
    first, second = call.args[:2]
    for query, factor in ((first, second), (second, first)):
        rotated, factors = _rotated(query, site.q), _factors(factor, site.q)
        if rotated and factors and _is_the_product(site.q, rotated, factors):
            return dataclasses.replace(site, q=rotated), factors
    return site, None


def product(site: Site) -> fx.Node | None:
    """The product that the query of `site` is, if it is one."""
    node = probe.strip(site.q, probe.CASTS | probe.VIEWS)
    return node if node.target is torch.ops.aten.mul.Tensor else None


def _sources(node: Any) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    """`node`, and what it shows in another shape or in a wider type, nearest first."""
    while isinstance(node, fx.Node) and isinstance(value := node.meta.get("val"), torch.Tensor):
        yield node, value
        if node.target not in probe.VIEWS and not _widens(node):
            return
        node = node.args[0]


def _widens(node: fx.Node) -> bool:
    """Whether `node` is a cast that rounds nothing."""
    if node.target not in probe.CASTS:
        return False
    before = dtype_of(node.all_input_nodes[0])
    wider = before is not None and before.itemsize < node.meta["val"].dtype.itemsize
    return wider and before.is_floating_point


def _rotated(node: Any, query: fx.Node) -> fx.Node | None:
    """The value of the shape and the type of `query` among the sources of `node`."""
    shape, dtype = probe.concrete_shape(query), query.meta["val"].dtype
    alike = (source for source, value in _sources(node) if value.dtype == dtype)
    return next((source for source in alike if probe.concrete_shape(source) == shape), None)


def _factors(node: Any, query: fx.Node) -> fx.Node | None:
    """One number per token among the sources of `node`, of [T] if there is such a one."""
    tokens, dtypes = probe.concrete_shape(query)[0], (torch.float32, query.meta["val"].dtype)
    found = (
        source
        for source, value in _sources(node)
        if math.prod(probe.concrete_shape(source)) == tokens
        and value.dtype in dtypes
        and value.is_contiguous()
    )
    return min(found, key=lambda source: source.meta["val"].dim() != 1, default=None)


def _is_the_product(query: fx.Node, rotated: fx.Node, factors: fx.Node) -> bool:
    """Whether `query` is `rotated`, each token times its factor."""
    values = probe.run([query], query.meta["val"].dtype, stop=[rotated, factors])
    return values is not None and probe.same(
        values[query], values[rotated] * values[factors].reshape(-1, 1, 1)
    )
