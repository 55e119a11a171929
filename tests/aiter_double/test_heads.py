"""Which kernels there are: the library plans only what has one, and the double refuses the rest."""

import itertools

import pytest
import torch

from mla_fusion.attention.aiter import selection
from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, Aborted, heads

BF16 = torch.bfloat16


def test_every_shape_that_the_library_plans_has_a_kernel(double):
    """The two tables were written apart: `selection` is the library's, `heads` the double's."""
    planned, at, arch, fp8 = 0, double.at, double.arch.name, double.arch.fp8
    for query, cache in ((BF16, BF16), (BF16, fp8), (fp8, fp8)):
        for count, qlen, lse in itertools.product(range(1, 145), range(1, 9), (False, True)):
            verdict = selection.aiter_verdict(count, qlen, query, cache, 1, arch, return_lse=lse)
            if verdict.unsupported or (lse and not at.has("split_budget")):
                continue  # the adapter asks for v0.1.16 where a log-sum-exp is wanted
            assert verdict.query_len >= qlen
            kind = heads.kinds(query, cache)
            shape = heads.Shape(at, verdict.layout.padded, verdict.query_len, kind)
            assert shape.heads % at.heads_multiple == 0
            assert shape.kind != "mixed" or shape.heads == 16
            shape.check_supported()
            shape.check_planned()
            shape.check_persistent(lse, True)
            planned += 1
    assert planned > 300


OLD, NEW = "v0.1.10.post2", "v0.1.20"
# architecture, release, heads, query length, types, LSE, causal, why there is no kernel
KERNELS = [
    ("gfx942", NEW, 16, 4, "bf16", False, True, ""),
    ("gfx942", NEW, 16, 5, "bf16", False, True, "no persistent"),
    ("gfx942", NEW, 8, 2, "bf16", False, True, ""),
    ("gfx942", NEW, 8, 1, "bf16", False, True, "no persistent"),
    ("gfx942", NEW, 16, 3, "fp8", False, True, "no persistent"),
    ("gfx942", NEW, 16, 1, "bf16", True, True, "no LSE from"),
    ("gfx942", NEW, 64, 1, "fp8", True, True, ""),
    ("gfx942", OLD, 64, 1, "fp8", False, True, ""),  # folded to 16
    ("gfx942", OLD, 64, 1, "fp8", True, True, "no LSE from"),
    ("gfx942", NEW, 16, 4, "fp8", False, False, "no non-causal"),
    ("gfx950", NEW, 8, 1, "bf16", False, True, "no persistent"),
    ("gfx950", NEW, 48, 2, "bf16", True, True, ""),
    ("gfx950", NEW, 32, 4, "bf16", True, True, "no LSE from"),
    ("gfx950", NEW, 128, 1, "bf16", False, True, ""),
    ("gfx950", NEW, 16, 2, "fp8", True, True, "no LSE from"),
    ("gfx950", NEW, 16, 4, "fp8", True, True, ""),
    ("gfx950", OLD, 16, 4, "fp8", True, True, "no LSE from"),
    ("gfx950", NEW, 32, 2, "fp8", False, True, "no persistent"),
    ("gfx950", NEW, 16, 4, "fp8", False, False, ""),
    ("gfx950", NEW, 32, 1, "mixed", False, True, "no persistent"),
]


@pytest.mark.parametrize("arch, release, count, qlen, kind, lse, causal, why", KERNELS)
def test_kernels_of_the_manifests(arch, release, count, qlen, kind, lse, causal, why):
    with aiter_double.installed(arch, release) as double:
        shape = heads.Shape(double.at, count, qlen, kind)
    if not why:
        shape.check_persistent(lse, causal)
        return
    with pytest.raises(Aborted if shape.at.has("aborts") else RuntimeError, match=why):
        shape.check_persistent(lse, causal)


# heads, query length, types, splits, error, what it says
PLAIN = [
    (16, 2, "bf16", None, Aborted, "no plain bf16 kernel for 16 heads, 2 tokens"),
    (32, 1, "fp8", None, Aborted, "no plain fp8 kernel for 32 heads, 1 tokens"),
    (16, 5, "fp8", None, KeyError, "80"),
    (16, 5, "fp8", 4, Aborted, "5 tokens"),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_without_a_plan(arch):
    with aiter_double.installed(arch) as double:
        heads.Shape(double.at, 16, 8, "bf16").check_plain(1)
        for count, qlen, kind, splits, error, says in PLAIN:
            with pytest.raises(error, match=says):
                heads.Shape(double.at, count, qlen, kind).check_plain(splits)
