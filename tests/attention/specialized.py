"""A decode by the specialized kernel for Hopper: executed on a CPU, and inputs for its compiler."""

import torch

from mla_fusion.attention.hopper import warp_specialized
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.cli.bench.kit import distance
from tests.attention.decodes import BF16, arguments, definition, plan_for, same_lse
from tests.attention.gluon_warps import Machine

TOLERANCE = 3.5e-3


def inputs(q=(8, 64, 576), page=64, dtype=BF16, columns=128, **plan):
    """A decode of DeepSeek's widths without memory, by default with 64 heads."""

    def meta(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, heads, width = q
    fields = {"num_heads": heads, "q_dtype": dtype, "kv_dtype": dtype, "v_head_dim": width - 64}
    return Inputs(
        meta(*q),
        meta(99, page, width),
        plan_for(**{**fields, **plan}),
        meta(8, columns, dtype=torch.int32),
        0.1,
        None,
        None,
        meta(tokens, heads, width - 64, dtype=BF16),
        meta(tokens, heads, dtype=torch.float32),
    )


def merged(given, query_lens):
    """Output and LSE, float64, with the splits of split sequences merged."""
    plan, out, lse = given.plan, given.out.double(), given.lse.double()
    heads, per_work = out.shape[1], plan.heads_per_work
    partial, partial_lse = plan.partial_output.flatten(0, -2), plan.partial_lse.flatten()
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    for tile in range(len(query_lens) * plan.fold):
        sequence, block = divmod(tile, plan.fold)
        begin, end = plan.reduce_indptr[tile : tile + 2].tolist()
        if begin == end:
            continue
        first, count = block * per_work, query_lens[sequence]
        at = slice(starts[sequence], starts[sequence + 1]), slice(first, first + per_work)
        rows = plan.reduce_partial_map[begin:end, None] * per_work + torch.arange(count * per_work)
        shape = end - begin, count, per_work
        real = slice(0, min(per_work, heads - first))
        splits = partial[rows].double().view(*shape, -1)[:, :, real]
        lses = partial_lse[rows].double().view(shape)[..., real]
        lse[at] = lses.logsumexp(0)
        weights = (lses - lse[at]).exp().nan_to_num(0.0)
        out[at] = (weights[..., None] * splits).sum(0)
    return out, lse


def check(dtype, heads, rows, lens, options, loudness=None, **scales):
    """Run the kernel. loudness: what the queries of each head are multiplied by."""
    fields = arguments(
        rows, lens, 64, 512, 64, num_heads=heads, q_dtype=dtype, kv_dtype=dtype, overhead=1,
        **{"kv_granularity": 64, **options},
    )  # fmt: skip
    fields |= scales
    if loudness is not None:
        fields["q"] = (fields["q"].float() * loudness[:, None]).to(dtype)
    tokens = len(fields["q"])
    out = torch.full((tokens, heads, 512), torch.nan, dtype=BF16)
    given = Inputs(**fields, out=out, lse=torch.full((tokens, heads), torch.nan))
    Machine(seed=tokens).launch(warp_specialized.kernel, *warp_specialized.arguments(given))
    want, want_lse = definition(fields, rows, lens)
    got, got_lse = merged(given, rows)
    assert distance(got, want) <= TOLERANCE
    same_lse(got_lse, want_lse)
