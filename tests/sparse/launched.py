"""The sparse decode's kernels, for benchmarks on a CPU: the reference in their place."""

import hopper_fp8
import torch

from mla_fusion.attention import reference
from mla_fusion.attention.triton import Scope


def narrow(given, scopes, lengths, sink):
    """As the reference over fp8 with one scale, but for scores of Hopper's tensor core."""
    out = torch.zeros(*given.q.shape[:2], 512)
    lse = torch.full(given.q.shape[:2], -torch.inf)
    for token, query in enumerate(given.q.float()):
        slots = [
            scope.table[token, :count]
            for scope, count in zip(scopes, [lens[token] for lens in lengths], strict=True)
        ]
        stored = torch.cat([
            scope.kv_cache.flatten(0, 1)[some[some >= 0].long()].float()
            for scope, some in zip(scopes, slots, strict=True)
        ])  # fmt: skip
        if not len(stored):
            continue
        scores = hopper_fp8.products(query, stored) * given.q_scale * given.kv_scale
        scores *= given.softmax_scale
        lse[token] = scores.logsumexp(-1)
        total = lse[token] if sink is None else torch.logaddexp(lse[token], sink)
        out[token] = (scores - total[:, None]).exp() @ stored[:, :512] * given.kv_scale
    return out, lse


def launch(given, sparse):
    """The kernels, by the reference, in fp32 and without rounding of keys."""
    plan, tokens = given.plan, len(given.q)
    end = plan.kv_indptr[1 : tokens + 1] - plan.kv_indptr[:tokens]
    scopes = [Scope(sparse.extra.kv_cache, sparse.extra.table, given.layout)]
    lengths = [end.long()]
    if sparse.first:
        scopes = [Scope(given.kv_cache, given.block_table, given.layout), *scopes]
        lengths = [sparse.lens[:tokens].long(), end.long() - sparse.first]
    if given.q.dtype == torch.float8_e4m3fn:
        out, lse = narrow(given, scopes, lengths, sparse.sink)
    else:
        out, lse = reference.sparse_mla_decode(
            given.q, scopes, lengths, latent=512, softmax_scale=given.softmax_scale,
            kv_dtype=plan.settings.kv_dtype, sink=sparse.sink, q_scale=given.q_scale,
            kv_scale=given.kv_scale,
        )  # fmt: skip
    given.out.copy_(out)
    if given.lse is not None:
        given.lse.copy_(lse)
