"""The library plans only shapes that have a kernel."""

import itertools

import torch

from mla_fusion.attention.aiter import selection
from tests.aiter_double import heads

BF16 = torch.bfloat16


def test_every_shape_that_the_library_plans_has_a_kernel(double):
    """The two tables were written apart: `selection` is the library's, `heads` the double's."""
    planned, at, arch, fp8 = 0, double.at, double.arch.name, double.arch.fp8
    for query, cache in ((BF16, BF16), (BF16, fp8), (fp8, fp8)):
        for count, qlen, lse in itertools.product(range(1, 145), range(1, 9), (False, True)):
            verdict = selection.aiter_verdict(count, qlen, query, cache, arch, return_lse=lse)
            if verdict.unsupported or (lse and not at.has("split_budget")):
                continue  # the adapter asks for v0.1.16 where a log-sum-exp is wanted
            assert verdict.query_len >= qlen
            kind = heads.kinds(query, cache)
            shape = heads.Shape(at, verdict.layout.padded, verdict.query_len, kind)
            assert shape.heads % at.heads_multiple == 0
            assert shape.kind != "mixed" or shape.heads == 16
            shape.check_supported()
            shape.check_planned()
            shape.check_persistent(lse)
            planned += 1
    assert planned > 300
