"""RoPE written out in aten ops: NeoX, GPT-J and DeepSeek's scaling form, whatever its spelling.

    q ──────────────► reshape ─► slice ─► rotate ─► slice_scatter ─► attention
    cos_sin_cache ──► index(positions) ─────┤
    k_pe ───────────────────────────────► rotate ─────────────────► cache update, attention

vLLM assigns the rotated part into a slice of q, which functionalization turns into
`slice_scatter`; both sides are recognized by what they compute.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.rope import RopeMatch, expected_rotation, is_rope_table

if TYPE_CHECKING:
    from torch import fx

    from mla_fusion.patterns.site import Site

# signature of a probed cone -> is_neox, or None if it is not RoPE
_known: dict[probe.Signature, bool | None] = {}


def match(site: Site) -> RopeMatch | None:
    """The unrotated values if q and k_pe of `site` are RoPE in aten ops, else None."""
    interior, leaves = probe.cone([site.q, site.k_pe])
    sources = {probe.LOOKUPS[n.target](n) for n in interior if n.target in probe.LOOKUPS}
    q, k_pe = probe.unmodified(site.q), probe.unmodified(site.k_pe)
    if len(sources) != 1 or q is None or k_pe is None:
        return None
    table, positions = sources.pop()
    if not is_rope_table(table, positions, site):
        return None
    if probe.strip(table, probe.CASTS).op not in ("placeholder", "get_attr"):
        return None
    rounded = _rounded(interior, table, site.q.meta["val"].dtype)
    if rounded is None:
        return None
    is_neox = _judge(interior, leaves, site, q, k_pe, table, positions)
    if is_neox is None:
        return None
    return RopeMatch(
        rope=Rope.NATIVE if rounded else Rope.NATIVE_FP32,
        is_neox=is_neox,
        q=q,
        k_pe=k_pe,
        positions=positions,
        cos_sin_cache=probe.strip(table, probe.CASTS),
        rotated=(site.q, site.k_pe),
    )


def _rounded(interior: list[fx.Node], table: fx.Node, activation: torch.dtype) -> bool | None:
    """Whether cosines and sines are rounded to the activation type; None if some of them are.

    Wherever the cast stands, before or after the lookup, it rounds the same numbers.
    """
    angles = {table: table.meta["val"].dtype == activation}
    used: set[bool] = set()
    for node in interior:
        inputs = [n for n in node.all_input_nodes if n in angles]
        if not inputs:
            continue
        others = [n for n in node.all_input_nodes if n not in angles and _is_float(n)]
        if others:
            used.update(angles[n] for n in inputs)
        else:
            value = node.meta.get("val")
            cast = isinstance(value, torch.Tensor) and value.dtype == activation
            angles[node] = cast or all(angles[n] for n in inputs)
    return used.pop() if len(used) == 1 else None


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _judge(
    interior: list[fx.Node],
    leaves: list[fx.Node],
    site: Site,
    q: fx.Node,
    k_pe: fx.Node,
    table: fx.Node,
    positions: fx.Node,
) -> bool | None:
    """is_neox if the cone rotates the tail of q and k_pe, else None."""
    key = probe.signature(interior, leaves, [site.q, q, site.k_pe, k_pe, table, positions])
    if key in _known:
        return _known[key]
    verdict = None
    with contextlib.suppress(probe.NotPolynomial):
        values = probe.run(interior, probe.leaf_values(leaves), site.q.meta["val"].dtype)
        for is_neox in (False, True):
            want_q, want_k = expected_rotation(
                values[q], values[k_pe], values[table], values[positions], is_neox
            )
            if probe.same(values[site.q], want_q) and probe.same(values[site.k_pe], want_k):
                verdict = is_neox
    _known[key] = verdict
    return verdict
