"""The spellings of "rotate q and k_pe, then write the cache", and why a layer has none of them.

A spelling is a module with `match(site)`, which returns what is rotated and how, or None. A new
one goes into `SPELLINGS`, most common first; docs/new-rope.md has the steps.

A query multiplied by one factor per token after its rotation, as `llama_4_scaling` does, is taken
for the query before that, so each spelling has it without knowing it:

    q (rotated) [T, H, P + R] ─► (cast) ─────► mul ─► (cast) ─► attention
    factor, T numbers ─► (view, expand, cast) ──┘

The graph may round the query before the product and its result after it, to the activation type."""

import math
import operator
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import inplace, native, probe
from mla_fusion.patterns.nodes import LOOKUPS, dtype_of, holds, is_float, walk
from mla_fusion.patterns.site import FUSED_ROPE_UPDATE, RopeMatch, Site, functionalized_op
from mla_fusion.report.reasons import Declined

SPELLINGS = (native.match, inplace.match, native.match_nope)


def match(site: Site) -> RopeMatch:
    """The first spelling that fits, and the query's factors. Raises Declined if none fits, or the
    cache update does not go with the one that does."""
    site, factors = _unscaled(site)
    found = next(filter(None, (spelling(site) for spelling in SPELLINGS)), None)
    if found is None:
        raise _diagnosis(site)
    for node in (found.q, found.k_pe):
        if "val" not in node.meta:
            raise Declined("missing-metadata", f"node {node.name}")
    rotates = functionalized_op(site.cache_update) == FUSED_ROPE_UPDATE
    if rotates != (found.rope is Rope.CAT_FUSED):
        raise Declined("cache-update", "k_pe is rotated by the cache update and outside of it")
    return replace(found, q_factor=factors)


def _unscaled(site: Site) -> tuple[Site, fx.Node | None]:
    """The site with the query before a product with factors, and these; else (site, None)."""
    call = _product(site)
    if call is None or dtype_of(call) in (None, torch.float64):
        return site, None
    first, second = call.args[:2]
    for query, factor in ((first, second), (second, first)):
        rotated, factors = _rotated(query, site.q), _factors(factor, site.q)
        if rotated and factors and _is_the_product(site.q, rotated, factors):
            return replace(site, q=rotated), factors
    return site, None


def _product(site: Site) -> fx.Node | None:
    """The product that the query of `site` is, if it is one."""
    node = probe.strip(site.q, probe.CASTS | probe.VIEWS)
    return node if node.target is torch.ops.aten.mul.Tensor else None


def _sources(node: Any) -> Iterator[fx.Node]:
    """`node`, and what it shows in another shape or in a wider type, nearest first."""
    while isinstance(node, fx.Node) and dtype_of(node):
        yield node
        if node.target not in probe.VIEWS and not _widens(node):
            return
        node = node.args[0]


def _widens(node: fx.Node) -> bool:
    """True if `node` is a cast that rounds nothing."""
    if node.target not in probe.CASTS:
        return False
    source, dtype = node.all_input_nodes[0], dtype_of(node)
    return is_float(source) and dtype is not None and holds(dtype, source.meta["val"].dtype)


def _rotated(node: Any, query: fx.Node) -> fx.Node | None:
    """The value of the shape and the type of `query` among the sources of `node`."""
    alike = (source for source in _sources(node) if dtype_of(source) == dtype_of(query))
    shape = probe.concrete_shape(query)
    return next((source for source in alike if probe.concrete_shape(source) == shape), None)


def _factors(node: Any, query: fx.Node) -> fx.Node | None:
    """One number per token among the sources of `node`, of [T] if there is such a one."""
    tokens, dtypes = probe.concrete_shape(query)[0], (torch.float32, dtype_of(query))
    typed = (source for source in _sources(node) if dtype_of(source) in dtypes)
    plain = (source for source in typed if source.meta["val"].is_contiguous())
    found = (source for source in plain if math.prod(probe.concrete_shape(source)) == tokens)
    return min(found, key=lambda source: source.meta["val"].dim() != 1, default=None)


def _is_the_product(query: fx.Node, rotated: fx.Node, factors: fx.Node) -> bool:
    """True if `query` is `rotated`, each token times its factor."""

    def formula(values: probe.Values, minus: probe.Minus) -> probe.Values:
        return {query: values[rotated] * values[factors].reshape(-1, 1, 1)}

    runs = probe.run([query], stop=[rotated, factors])
    return runs is not None and probe.same(runs, formula)


def _diagnosis(site: Site) -> Declined:
    """Why no spelling fits."""
    interior, leaves = probe.cone([site.q, site.k_pe])
    if not any(node.target in LOOKUPS for node in interior) and _has_angles(site.k_pe):
        return Declined("computed-angles")
    calls = {leaf.args[0] for leaf in leaves if leaf.target is operator.getitem}
    inner, sources = probe.cone(node for call in calls for node in call.all_input_nodes)
    for node in (*leaves, *interior, *calls, *inner, *sources):
        if "val" not in node.meta:
            return Declined("missing-metadata", f"node {node.name}")
    if _product(site):
        return Declined("scaled-query", _origin(site.q))
    return Declined("unknown-rope", f"q comes from {_origin(site.q)}")


def _origin(node: fx.Node) -> str:
    """The op that made a value, less views and casts, and the line of vLLM that called it."""
    node = probe.strip(node, probe.CASTS | probe.VIEWS)
    # The innermost frame is the last.
    frames = re.findall(r'File "(.*)", line (\d+)', node.meta.get("stack_trace") or "")
    if not frames:
        return str(node.target)
    file, line = frames[-1]
    return f"{node.target} at {file.rpartition('/site-packages/')[2]}:{line}"


def _has_angles(node: fx.Node) -> bool:
    """True if a cosine, or a complex number from an angle, is computed anywhere before `node`."""
    angles = torch.ops.aten.cos.default, torch.ops.aten.polar.default
    return any(each.target in angles for each in walk([node], lambda n: n.all_input_nodes))
