"""No RoPE in the attention (NoPE): q and k_pe reach it as they left their projections.

    q_proj(...) ──► reshape ──────────► attention
    kv_proj(...) ─► split ─► unsqueeze ─► cache update, attention

An unknown op that rotates looks the same from here, so no producer may take token positions: an
integer tensor with one element per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.rope import RopeMatch

if TYPE_CHECKING:
    from mla_fusion.patterns.site import Site


def match(site: Site) -> RopeMatch | None:
    """q and k_pe as they are if they are views of values computed without positions."""
    for node in (site.q, site.k_pe):
        source, leaves = probe.cone([node])
        if any(n.target not in probe.VIEWS for n in source):
            return None
        if any(_takes_positions(leaf) for leaf in leaves):
            return None
    return RopeMatch(
        rope=Rope.NONE,
        is_neox=False,
        q=site.q,
        k_pe=site.k_pe,
        positions=None,
        cos_sin_cache=None,
        rotated=(),
    )


def _takes_positions(leaf: fx.Node) -> bool:
    if not isinstance(leaf.meta.get("val"), torch.Tensor):
        return False
    producer = leaf.args[0] if leaf.args and isinstance(leaf.args[0], fx.Node) else leaf
    for node in {leaf, producer}:
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if (
                isinstance(value, torch.Tensor)
                and value.dim() == 1
                and not value.dtype.is_floating_point
                and value.shape[0] == leaf.meta["val"].shape[0]
            ):
                return True
    return False
