"""RoPE by an op that rotates q_pe and k_pe in place, functionalized.

    q ────► slice ───────► auto_functionalized(op) ─► [1] ─► slice_scatter(q) ─► attention
    k_pe ─► (unsqueeze) ───────────┘                  [2] ─► cache update, attention

vLLM's `fused_rope_unified_mla_kv_cache_update` also writes the cache. FlashInfer's key is a slice
of the projection and comes back through a slice_scatter on it; so the attention's inputs are
compared by value, as in `probe`, with the op's outputs as free variables."""

from typing import Any

import torch
from torch import fx

from mla_fusion.ops import Rope
from mla_fusion.patterns import probe, site
from mla_fusion.patterns.nodes import arguments
from mla_fusion.patterns.site import RopeMatch, Site, is_rope_table

# Ops, and what they call the query and the key.
OPS = {
    "_C::rotary_embedding": (Rope.VLLM_C, "query", "key"),
    "vllm::flashinfer_rotary_embedding": (Rope.FLASHINFER, "query", "key"),
    "vllm::rocm_aiter_triton_rotary_embedding": (Rope.AITER_TRITON, "query", "key"),
    site.FUSED_ROPE_UPDATE: (Rope.CAT_FUSED, "q_pe", "k_pe"),
}


def match(found: Site) -> RopeMatch | None:
    """The unrotated values if an in-place op of `OPS` rotates q and k_pe of the site, else None."""
    _, leaves = probe.cone([found.q, found.k_pe])
    # Only outputs that reach the attention count: either may be computed and not be used.
    outputs = {leaf.args[1]: leaf for leaf in leaves if site.made_by(leaf) in OPS}
    calls = {leaf.args[0] for leaf in leaves if site.made_by(leaf) in OPS}
    if len(calls) != 1 or not outputs.keys() >= {1, 2}:
        return None
    call: Any = calls.pop()
    args = arguments(call)
    rope, query, key = OPS[site.functionalized_op(call)]
    if rope is Rope.CAT_FUSED and call is not found.cache_update:
        return None
    q, rotated = probe.unmodified(found.q), (outputs[1], outputs[2])
    if q is None or not _rotates_whole_heads(args, found):
        return None
    if not _is_all_that_changes(found, q, args[query], args[key], rotated):
        return None
    found_by = args["positions"], args["cos_sin_cache"]
    every = *site.outputs(call, 1), *site.outputs(call, 2)
    return RopeMatch(rope, args["is_neox"], q, args[key], *found_by, rotated=every)


def _rotates_whole_heads(args: dict[str, Any], found: Site) -> bool:
    """True if the op rotates all R columns it is given, forwards, at the positions it is given."""
    width = probe.concrete_shape(found.k_pe)[-1]
    return (
        not any(args.get(name) for name in ("rope_dim_offset", "inverse", "offsets"))
        and args.get("head_size", width) == width
        and is_rope_table(args["cos_sin_cache"], args["positions"], found)
    )


def _is_all_that_changes(
    found: Site, q: fx.Node, query: fx.Node, k_pe: fx.Node, rotated: tuple[fx.Node, fx.Node]
) -> bool:
    """True if `query` is the tail of q, and q and k_pe of the site have `rotated` in its place."""
    width = probe.concrete_shape(found.k_pe)[-1]

    def formula(values: probe.Values, minus: probe.Minus) -> probe.Values:
        tail = values[rotated[0]].reshape(*values[q].shape[:-1], width)
        return {
            query: values[q][..., -width:].reshape(values[query].shape),
            found.q: torch.cat((values[q][..., :-width], tail), dim=-1),
            found.k_pe: values[rotated[1]].reshape(values[found.k_pe].shape),
        }

    runs = probe.run([found.q, found.k_pe, query, k_pe, q])
    return runs is not None and probe.same(runs, formula)
