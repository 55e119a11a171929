"""No RoPE in the attention (NoPE): q and k_pe reach it as they left their projections.

    q_proj(...) ──► reshape ──────────► attention
    kv_proj(...) ─► split ─► unsqueeze ─► cache update, attention

An unknown op that rotates looks the same from here, so no producer may take token positions: an
integer tensor with one element per token.
"""

from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import dtype_of, is_float
from mla_fusion.patterns.rope import RopeMatch
from mla_fusion.patterns.site import Site


def match(site: Site) -> RopeMatch | None:
    """q and k_pe as they are if they are views of values computed without positions."""
    for node in (site.q, site.k_pe):
        source, leaves = probe.cone([node])
        if any(n.target not in probe.VIEWS for n in source):
            return None
        if any(_takes_positions(leaf) for leaf in leaves):
            return None
    return RopeMatch(rope=Rope.NONE, is_neox=False, q=site.q, k_pe=site.k_pe)


def _takes_positions(leaf: fx.Node) -> bool:
    if dtype_of(leaf) is None:
        return False
    producer = leaf.args[0] if leaf.args and isinstance(leaf.args[0], fx.Node) else leaf
    sources = (source for node in (leaf, producer) for source in node.all_input_nodes)
    integers = (s.meta["val"].shape for s in sources if dtype_of(s) and not is_float(s))
    tokens = leaf.meta["val"].shape[0]
    return any(len(shape) == 1 and shape[0] == tokens for shape in integers)
