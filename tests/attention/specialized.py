"""A dense decode by a kernel for Hopper, executed on a CPU."""

import torch

from mla_fusion.attention import reference
from mla_fusion.attention.hopper import warp_specialized
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.cli.bench.kit import distance
from tests.attention.decodes import BF16, arguments, definition, same_lse
from tests.attention.gluon_warps import Machine

TOLERANCE = 3.5e-3


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
