"""RoPE by an op that rotates q_pe and k_pe in place, functionalized.

    q ────► slice ───────► auto_functionalized(op) ─► [1] ─► slice_scatter(q) ─► attention
    k_pe ─► (unsqueeze) ───────────┘                  [2] ─► cache update, attention

The ops are `_C.rotary_embedding`, `vllm.flashinfer_rotary_embedding`,
`vllm.rocm_aiter_triton_rotary_embedding`, and vLLM's `fused_rope_unified_mla_kv_cache_update`,
which also writes the cache. Where the key is a slice of the projection (FlashInfer), its rotated
value comes back through a slice_scatter on the projection; so what reaches the attention is
compared by value, as in `probe`, with the op's outputs as free variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe, site
from mla_fusion.patterns.rope import RopeMatch

if TYPE_CHECKING:
    from mla_fusion.patterns.site import Site


@dataclass(frozen=True)
class _Op:
    rope: Rope
    query: str
    key: str


OPS = {
    "_C::rotary_embedding": _Op(Rope.VLLM_C, "query", "key"),
    "vllm::flashinfer_rotary_embedding": _Op(Rope.FLASHINFER, "query", "key"),
    "vllm::rocm_aiter_triton_rotary_embedding": _Op(Rope.AITER_TRITON, "query", "key"),
    site.FUSED_ROPE_UPDATE: _Op(Rope.CAT_FUSED, "q_pe", "k_pe"),
}

# Arguments of the newer `_C.rotary_embedding` that change its meaning when set.
_MUST_BE_UNSET = ("rope_dim_offset", "inverse")


def match(found: Site) -> RopeMatch | None:
    """The unrotated values if an in-place op of `OPS` rotates q and k_pe of the site, else None."""
    interior, leaves = probe.cone([found.q, found.k_pe])
    calls = {n.args[0] for n in leaves if n.op == "call_function" and _is_output(n)}
    if len(calls) != 1:
        return None
    call = calls.pop()
    assert isinstance(call, fx.Node)
    op = OPS[site.functionalized_op(call)]
    args = site.arguments(call)
    if any(args.get(name) for name in _MUST_BE_UNSET):
        return None
    q, k_pe = probe.unmodified(found.q), args[op.key]
    rotated_q, rotated_k = site.output(call, 1), site.output(call, 2)
    if q is None or rotated_q is None or rotated_k is None:
        return None
    interior, leaves = probe.cone([found.q, found.k_pe, args[op.query], k_pe, q])
    try:
        values = probe.run(interior, probe.leaf_values(leaves))
    except probe.NotPolynomial:
        return None
    width = values[k_pe].shape[-1]
    tail = values[rotated_q].reshape(*values[q].shape[:-1], width)
    want = {
        args[op.query]: values[q][..., -width:].reshape(values[args[op.query]].shape),
        found.q: torch.cat((values[q][..., :-width], tail), dim=-1),
        found.k_pe: values[rotated_k].reshape(values[found.k_pe].shape),
    }
    if not all(probe.same(values[node], value) for node, value in want.items()):
        return None
    return RopeMatch(
        rope=op.rope,
        is_neox=args["is_neox"],
        q=q,
        k_pe=k_pe,
        positions=args["positions"],
        cos_sin_cache=args["cos_sin_cache"],
        rotated=(rotated_q, rotated_k),
    )


def _is_output(node: fx.Node) -> bool:
    call = node.args[0] if node.args else None
    return site.functionalized_op(call) in OPS
