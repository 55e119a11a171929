"""A decode by the specialized kernel for Hopper: executed on a CPU, and inputs for its compiler."""

import torch

from mla_fusion.attention import reference
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


def check(dtype, heads, rows, lens, options, loudness=None, module=warp_specialized, **scales):
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
    Machine(seed=tokens).launch(module.kernel, *module.arguments(given))
    want, want_lse = definition(fields, rows, lens)
    reference.merge(given, given.plan.partial_output, given.plan.partial_lse)
    assert distance(given.out, want) <= TOLERANCE
    same_lse(given.lse, want_lse)
