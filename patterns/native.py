"""RoPE written out in aten ops: NeoX, GPT-J and DeepSeek's scaling form, whatever its spelling.

    q ──────────────► reshape ─► slice ─► rotate ─► slice_scatter ─► attention
    cos_sin_cache ──► index(positions) ─────┤
    k_pe ───────────────────────────────► rotate ─────────────────► cache update, attention

vLLM assigns the rotated part into a slice of q, which functionalization turns into
`slice_scatter`; both sides are recognized by what they compute.
"""

from collections.abc import Iterable

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import dtype_of, is_float
from mla_fusion.patterns.rope import RopeMatch, expected_rotation, is_rope_table
from mla_fusion.patterns.site import Site


def match(site: Site) -> RopeMatch | None:
    """The unrotated values if q and k_pe of `site` are RoPE in aten ops, else None."""
    interior, _ = probe.cone([site.q, site.k_pe])
    sources = {probe.LOOKUPS[n.target](n) for n in interior if n.target in probe.LOOKUPS}
    q, k_pe = probe.unmodified(site.q), probe.unmodified(site.k_pe)
    if len(sources) != 1 or q is None or k_pe is None:
        return None
    table, positions = sources.pop()
    if not is_rope_table(table, positions, site):
        return None
    given = probe.strip(table, probe.CASTS)
    activation = site.q.meta["val"].dtype
    rounded = _rounded(interior, table, activation)
    if given.op not in ("placeholder", "get_attr") or rounded is None:
        return None
    values = probe.run([site.q, site.k_pe], activation)
    is_neox = None if values is None else _judge(values, site, (q, k_pe, table, positions))
    if is_neox is None:
        return None
    rope = Rope.NATIVE if rounded else Rope.NATIVE_FP32
    return RopeMatch(rope, is_neox, q, k_pe, positions, given, rotated=(site.q, site.k_pe))


def _rounded(interior: list[fx.Node], table: fx.Node, activation: torch.dtype) -> bool | None:
    """Whether cosines and sines are rounded to the activation type; None if only some of them are.

    A cast rounds the same numbers before the lookup and after it.
    """
    angles = {table: table.meta["val"].dtype == activation}
    used: set[bool] = set()
    for node in interior:
        inputs = [n for n in node.all_input_nodes if n in angles]
        if not inputs:
            continue
        others = [n for n in node.all_input_nodes if n not in angles and is_float(n)]
        if others:
            used.update(angles[n] for n in inputs)
        else:
            angles[node] = dtype_of(node) == activation or all(angles[n] for n in inputs)
    return used.pop() if len(used) == 1 else None


def _judge(
    values: dict[fx.Node, torch.Tensor], site: Site, unrotated: Iterable[fx.Node]
) -> bool | None:
    """is_neox if a probe has q and k_pe of `site` as the rotation of `unrotated`, else None."""
    q, k_pe, table, positions = (values[node] for node in unrotated)
    for is_neox in (True, False):
        want_q, want_k = expected_rotation(q, k_pe, table, positions, is_neox)
        if probe.same(values[site.q], want_q) and probe.same(values[site.k_pe], want_k):
            return is_neox
    return None
