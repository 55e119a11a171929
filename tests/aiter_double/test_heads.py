"""Which kernels there are: what the library plans has one, and what has none is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from mla_fusion.attention import selection
from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES, Aborted, heads

BF16 = torch.bfloat16
PLACES = list(itertools.product(ARCHITECTURES, RELEASES))


@pytest.mark.parametrize("arch, release", PLACES)
def test_what_the_library_plans_has_a_kernel(arch: str, release: str) -> None:
    """The two tables were written apart: `selection` is the library's, `heads` the double's."""
    planned = 0
    with aiter_double.installed(arch, release) as double:
        fp8 = double.arch.fp8
        for query, cache in ((BF16, BF16), (BF16, fp8), (fp8, fp8)):
            for count, qlen, lse in itertools.product(range(1, 145), range(1, 9), (False, True)):
                verdict = selection.aiter_verdict(
                    count, qlen, query, cache, 1, arch, return_lse=lse
                )
                if verdict.unsupported or (lse and not double.release.split_budget):
                    continue  # the adapter asks for v0.1.16 where a log-sum-exp is wanted
                at = (double.arch, double.release, verdict.layout.padded, qlen)
                kind = heads.kinds(query, cache)
                assert verdict.layout.padded % double.release.heads_multiple == 0
                assert kind != "mixed" or verdict.layout.padded == 16
                heads.check_supported(*at, kind)
                heads.check_planned(*at, kind)
                heads.check_persistent(*at, kind, lse, True)
                planned += 1
    assert planned > 300


# architecture, release, heads, query length, types, LSE, causal, why there is no kernel
KERNELS = [
    ("gfx942", "v0.1.20", 16, 4, "bf16", False, True, ""),
    ("gfx942", "v0.1.20", 16, 5, "bf16", False, True, "no persistent"),
    ("gfx942", "v0.1.20", 8, 2, "bf16", False, True, ""),
    ("gfx942", "v0.1.20", 8, 1, "bf16", False, True, "no persistent"),
    ("gfx942", "v0.1.20", 16, 3, "fp8", False, True, "no persistent"),
    ("gfx942", "v0.1.20", 16, 1, "bf16", True, True, "no LSE from"),
    ("gfx942", "v0.1.20", 64, 1, "fp8", True, True, ""),
    ("gfx942", "v0.1.10.post2", 64, 1, "fp8", False, True, ""),  # folded to 16
    ("gfx942", "v0.1.10.post2", 64, 1, "fp8", True, True, "no LSE from"),
    ("gfx942", "v0.1.20", 16, 4, "fp8", False, False, "no non-causal"),
    ("gfx950", "v0.1.20", 8, 1, "bf16", False, True, "no persistent"),
    ("gfx950", "v0.1.20", 48, 2, "bf16", True, True, ""),
    ("gfx950", "v0.1.20", 32, 4, "bf16", True, True, "no LSE from"),
    ("gfx950", "v0.1.20", 128, 1, "bf16", False, True, ""),
    ("gfx950", "v0.1.20", 16, 2, "fp8", True, True, "no LSE from"),
    ("gfx950", "v0.1.20", 16, 4, "fp8", True, True, ""),
    ("gfx950", "v0.1.10.post2", 16, 4, "fp8", True, True, "no LSE from"),
    ("gfx950", "v0.1.20", 32, 2, "fp8", False, True, "no persistent"),
    ("gfx950", "v0.1.20", 16, 4, "fp8", False, False, ""),
    ("gfx950", "v0.1.20", 32, 1, "mixed", False, True, "no persistent"),
]


@pytest.mark.parametrize("arch, release, count, qlen, kind, lse, causal, why", KERNELS)
def test_kernels_of_the_manifests(
    arch: str, release: str, count: int, qlen: int, kind: str, lse: bool, causal: bool, why: str
) -> None:
    with aiter_double.installed(arch, release) as double:
        at = (double.arch, double.release, count, qlen, kind, lse, causal)
        if why:
            with pytest.raises(Aborted if double.release.aborts else RuntimeError, match=why):
                heads.check_persistent(*at)
        else:
            heads.check_persistent(*at)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_without_a_plan(arch: str) -> None:
    with aiter_double.installed(arch) as double:
        at = (double.arch, double.release)
        heads.check_plain(*at, 16, 8, "bf16", 1)
        with pytest.raises(Aborted, match="no plain bf16 kernel for 16 heads, 2 tokens"):
            heads.check_plain(*at, 16, 2, "bf16", None)
        with pytest.raises(Aborted, match="no plain fp8 kernel for 32 heads, 1 tokens"):
            heads.check_plain(*at, 32, 1, "fp8", None)
        with pytest.raises(KeyError, match="80"):
            heads.check_plain(*at, 16, 5, "fp8", None)
        with pytest.raises(Aborted, match="5 tokens"):
            heads.check_plain(*at, 16, 5, "fp8", 4)
