"""RoPE written out in aten ops: NeoX, GPT-J and DeepSeek's scaling form, whatever its spelling.

    q ──────────────► reshape ─► slice ─► rotate ─► slice_scatter ─► attention
    cos_sin_cache ──► index(positions) ─────┤
    k_pe ───────────────────────────────► rotate ─────────────────► cache update, attention

vLLM assigns the rotated part into a slice of q, which functionalization turns into
`slice_scatter`; both sides are recognized by what they compute. Without RoPE (NoPE) both reach the
attention as they left their projections."""

from functools import partial

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe
from mla_fusion.patterns.nodes import LOOKUPS, dtype_of, is_float, lookup
from mla_fusion.patterns.site import RopeMatch, Site, is_rope_table


def match(site: Site) -> RopeMatch | None:
    """The unrotated values if q and k_pe of `site` are RoPE in aten ops, else None."""
    interior, _ = probe.cone([site.q, site.k_pe])
    sources = {lookup(n) for n in interior if n.target in LOOKUPS}
    q, k_pe = probe.unmodified(site.q), probe.unmodified(site.k_pe)
    if len(sources) != 1 or q is None or k_pe is None:
        return None
    table, positions = sources.pop()
    if not is_rope_table(table, positions, site):
        return None
    given, activation = probe.strip(table, probe.CASTS), site.q.meta["val"].dtype
    rounded = _rounded(interior, table, activation)
    runs = probe.run([site.q, site.k_pe])
    if given.op not in ("placeholder", "get_attr") or rounded is None or runs is None:
        return None
    rope, unrotated = Rope.NATIVE if rounded else Rope.NATIVE_FP32, (q, k_pe, table, positions)
    rotated = site.q, site.k_pe

    def formula(is_neox: bool, values: probe.Values, minus: probe.Minus) -> probe.Values:
        given = (values[node] for node in unrotated)
        return dict(zip(rotated, expected_rotation(is_neox, minus, *given), strict=True))

    for is_neox in (True, False):
        if probe.same(runs, partial(formula, is_neox)):
            return RopeMatch(rope, is_neox, q, k_pe, positions, given, rotated)
    return None


def _rounded(interior: list[fx.Node], table: fx.Node, activation: torch.dtype) -> bool | None:
    """Whether cosines and sines are rounded to the activation type; None if only some are. They
    are rounded where they get into that type, before the lookup or after it, by whatever op."""
    angles = {table: table.meta["val"].dtype == activation}
    used: set[bool] = set()
    for node in interior:
        inputs = [n for n in node.all_input_nodes if n in angles]
        if not inputs:
            continue
        others = any(n not in angles and is_float(n) for n in node.all_input_nodes)
        if others and node.target in probe.ARITHMETIC:
            used.update(angles[n] for n in inputs)
        else:
            angles[node] = dtype_of(node) == activation or all(angles[n] for n in inputs)
    return used.pop() if len(used) == 1 else None


def expected_rotation(
    is_neox: bool,
    minus: probe.Minus,
    q: torch.Tensor,
    k_pe: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE of the last R columns of q [T, H, P + R] and of k_pe [T, 1, R], in float64; `minus`
    subtracts, or adds magnitudes."""
    width = k_pe.shape[-1]
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        if is_neox:
            a, b = x.chunk(2, dim=-1)
            return torch.cat((minus(a * cos, b * sin), b * cos + a * sin), dim=-1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((minus(a * cos, b * sin), b * cos + a * sin), dim=-1).flatten(-2)

    return torch.cat((q[..., :-width], rotate(q[..., -width:])), dim=-1), rotate(k_pe)


def match_nope(site: Site) -> RopeMatch | None:
    """q and k_pe as they are, if views of values made without positions, which rotations take."""
    interior, leaves = probe.cone([site.q, site.k_pe])
    if any(n.target not in probe.VIEWS for n in interior) or any(map(_takes_positions, leaves)):
        return None
    return RopeMatch(Rope.NONE, False, site.q, site.k_pe)


def _takes_positions(leaf: fx.Node) -> bool:
    """True if what makes a value takes an integer tensor with one element per token."""
    if dtype_of(leaf) is None:
        return False
    producer = leaf.args[0] if leaf.args and isinstance(leaf.args[0], fx.Node) else leaf
    sources = (source for node in (leaf, producer) for source in node.all_input_nodes)
    integers = (s.meta["val"].shape for s in sources if dtype_of(s) and not is_float(s))
    tokens = leaf.meta["val"].shape[0]
    return any(len(shape) == 1 and shape[0] == tokens for shape in integers)
