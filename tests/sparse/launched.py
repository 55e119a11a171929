"""The sparse decode's kernels on a CPU: the reference in their place."""

from mla_fusion.attention import reference
from mla_fusion.attention.plan.inputs import Scope


def launch(given):
    """The kernels, by the reference, in fp32 and without rounding of keys."""
    plan, tokens, sparse = given.plan, len(given.q), given.sparse
    assert plan.step.num_tokens == tokens
    end = plan.kv_indptr[1 : tokens + 1] - plan.kv_indptr[:tokens]
    scopes = [Scope(sparse.extra.kv_cache, sparse.extra.table, given.layout)]
    lengths = [end.long()]
    if sparse.first:
        scopes = [Scope(given.kv_cache, given.block_table, given.layout), *scopes]
        lengths = [sparse.lens[:tokens].long(), end.long() - sparse.first]
    out, lse = reference.sparse_mla_decode(
        given.q, scopes, lengths, latent=512, softmax_scale=given.softmax_scale,
        kv_dtype=plan.settings.kv_dtype, sink=sparse.sink, q_scale=given.q_scale,
        kv_scale=given.kv_scale,
    )  # fmt: skip
    given.out.copy_(out)
    if given.lse is not None:
        given.lse.copy_(lse)
