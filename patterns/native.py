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
from mla_fusion.patterns.rope import RopeMatch, expected_rotation

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
    if not _is_rope_table(table, positions, site):
        return None
    is_neox = _judge(interior, leaves, site, q, k_pe, table, positions)
    if is_neox is None:
        return None
    rounded = table.meta["val"].dtype == site.q.meta["val"].dtype
    return RopeMatch(
        rope=Rope.NATIVE if rounded else Rope.NATIVE_FP32,
        is_neox=is_neox,
        q=q,
        k_pe=k_pe,
        positions=positions,
        cos_sin_cache=probe.strip(table, probe.CASTS),
        rotated=(site.q, site.k_pe),
    )


def _is_rope_table(table: fx.Node, positions: fx.Node, site: Site) -> bool:
    value, pos = table.meta.get("val"), positions.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and isinstance(pos, torch.Tensor)
        and value.dim() == 2
        and pos.dim() == 1
        and pos.dtype == torch.int64
        and value.shape[1] == site.k_pe.meta["val"].shape[-1]
        and probe.strip(table, probe.CASTS).op in ("placeholder", "get_attr")
    )


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
        values = probe.run(interior, probe.leaf_values(leaves))
        for is_neox in (False, True):
            want_q, want_k = expected_rotation(
                values[q], values[k_pe], values[table], values[positions], is_neox
            )
            if probe.same(values[site.q], want_q) and probe.same(values[site.k_pe], want_k):
                verdict = is_neox
    _known[key] = verdict
    return verdict
