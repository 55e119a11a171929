"""The spellings of "rotate q and k_pe, then write the cache", and why a layer has none of them.

A spelling is a module with `match(site)`, which returns what is rotated and how, or None. A new
one goes into `SPELLINGS`, most common first; docs/new-rope.md has the steps.
"""

import dataclasses
import operator
import re

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import inplace, native, nope, probe, scaling
from mla_fusion.patterns.nodes import walk
from mla_fusion.patterns.rope import RopeMatch
from mla_fusion.patterns.site import FUSED_ROPE_UPDATE, Site, functionalized_op
from mla_fusion.report.reasons import Declined

SPELLINGS = (native.match, inplace.match, nope.match)


def match(site: Site) -> RopeMatch:
    """The first spelling that fits, and the query's factors.

    Raises Declined if none fits, or the cache update does not go with the one that does.
    """
    site, factors = scaling.unscaled(site)
    for spelling in SPELLINGS:
        if found := spelling(site):
            break
    else:
        raise _diagnosis(site)
    for node in (found.q, found.k_pe):
        if "val" not in node.meta:
            raise Declined("missing-metadata", f"node {node.name}")
    rotates = functionalized_op(site.cache_update) == FUSED_ROPE_UPDATE
    if rotates != (found.rope is Rope.CAT_FUSED):
        raise Declined("cache-update", "k_pe is rotated by the cache update and outside of it")
    return dataclasses.replace(found, q_factor=factors)


def _diagnosis(site: Site) -> Declined:
    """Why no spelling fits."""
    interior, leaves = probe.cone([site.q, site.k_pe])
    if not any(node.target in probe.LOOKUPS for node in interior) and _has_angles(site.k_pe):
        return Declined("computed-angles")
    calls = {leaf.args[0] for leaf in leaves if leaf.target is operator.getitem}
    inner, sources = probe.cone(node for call in calls for node in call.all_input_nodes)
    for node in (*leaves, *interior, *calls, *inner, *sources):
        if "val" not in node.meta:
            return Declined("missing-metadata", f"node {node.name}")
    if scaling.product(site):
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
    """Whether a cosine, or a complex number from an angle, is computed anywhere before `node`."""
    angles = torch.ops.aten.cos.default, torch.ops.aten.polar.default
    return any(each.target in angles for each in walk([node], lambda n: n.all_input_nodes))
