"""Pass 2: every spelling of "rotate q and k_pe, then write the cache" becomes one node.

    before   q ─► rotate ─────────── (─► mul) ──────► attention
             k_pe ─► rotate ─► cache_update ─► dummy ─►

    after    q, kv_c, k_pe, positions, cos_sin_cache (, q_factor) ─► rope_mla_kv_cache_update
                                    [0] dummy, [1] q, [2] k_pe ─► attention

Safe because the new op rotates, scales and writes exactly what the old nodes did (`patterns/`
proves it) and because nothing else reads the rotated values. Declines, with a reason, a layer whose
spelling is unknown, whose rotated values are shared, or which the fused op cannot serve anyway."""

from dataclasses import dataclass

import torch
from torch import fx

from mla_fusion import ops
from mla_fusion.passes.rewrite import FactsOf, PassResult, call, functionalized_call
from mla_fusion.patterns import probe, spellings
from mla_fusion.patterns.nodes import is_aten, walk
from mla_fusion.patterns.site import RopeMatch, Site, attention_calls, naming, outputs, read_site
from mla_fusion.report.reasons import Declined

aten = torch.ops.aten


@dataclass
class CanonicalizeMLARoPEPass:
    """The facts say which layers decline."""

    facts_of: FactsOf

    def __call__(self, graph: fx.Graph) -> PassResult:
        result = PassResult()
        for attention in attention_calls(graph):
            try:
                site = read_site(attention)
                if decline := self.facts_of(site.layer_name).decline:
                    raise Declined(decline.code, decline.detail)
                match = spellings.match(site)
                _check_alone(site, match)
            except Declined as declined:
                result.declined.append(declined.decline)
                continue
            result.dead += (site.q, site.k_pe, site.cache_update)
            result.rewritten[attention.name] = _rewrite(graph, site, match)
        return result


def _check_alone(site: Site, match: RopeMatch) -> None:
    """Raise Declined if more than the attention reads a rotated value or the cache update, dead
    code aside, or uses the cache in between: the update moves to the attention."""
    allowed = {site.attention, site.cache_update}

    def readers(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in allowed]

    for node in walk(match.rotated, readers):
        for user in readers(node):
            if user.target in probe.PURE:
                continue
            later = walk([user], lambda each: each.users)
            if any(not is_aten(each) or each.is_impure() for each in later):
                raise Declined("shared-rotation", f"{node.name} is read by {user.name}")
    for written in outputs(site.cache_update, 0) or [site.cache_update]:
        for user in written.users:
            if user is not site.attention:
                raise Declined("shared-rotation", f"{written.name} is read by {user.name}")
    for op in naming(site.layer_name, site.cache_update, site.attention):
        raise Declined("cache-update", f"{op} uses the cache between it and the attention")


def _rewrite(graph: fx.Graph, site: Site, match: RopeMatch) -> fx.Node:
    with graph.inserting_before(site.attention):
        k_pe, factor = match.k_pe, match.q_factor
        if k_pe.meta["val"].dim() == 2:
            k_pe = call(graph, aten.unsqueeze.default, (k_pe, 1), k_pe.meta["val"].unsqueeze(1))
        if factor and factor.meta["val"].dim() != 1:
            factor = call(graph, aten.reshape.default, (factor, [-1]), factor.meta["val"].flatten())
        op, returned = ops.get(ops.ROPE_UPDATE), site.kv_c.meta["val"].new_empty(0)
        changed = {"k_pe": k_pe, "q_factor": factor, "rope": str(match.rope)}
        given = vars(site) | vars(match) | changed
        kwargs = {argument.name: given[argument.name] for argument in op._schema.arguments}
        update, (dummy, q, rotated_k) = functionalized_call(graph, op, kwargs, returned)
    read = {"q": q, "k_pe": rotated_k, "kv_cache_dummy_dep": dummy}
    site.attention.kwargs = {**site.attention.kwargs, **read}
    return update
