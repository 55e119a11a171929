"""The sparse decode: the machine code for gfx942 and gfx950, executed."""

import dataclasses
import random

import pytest

pytest.importorskip("triton")

from mla_fusion.attention import triton as provider
from mla_fusion.attention.cdna.fits import why_no_sparse
from mla_fusion.cli.selftest import sparse
from mla_fusion.cli.selftest.sparse import Variant
from tests.amd.provider import compared, machine
from tests.kernels.compiled import FP8
from tests.nightly import daily

VARIANTS = {
    "fp8 cache": Variant(16, (70,), tokens=4, sink=False),
    "bf16": Variant(12, (64,), tokens=4, sink=False),
    "two scopes, sink": Variant(16, (20, 40), tokens=4),
}


@pytest.mark.skipif(bool(why_no_sparse()), reason=why_no_sparse())
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", daily(VARIANTS, "fp8 cache"))
def test_sparse(target, name, monkeypatch):
    monkeypatch.setattr(provider, "require", lambda: None)
    variant = VARIANTS[name]
    if name == "fp8 cache":
        variant = dataclasses.replace(variant, kv=FP8[target])
    bench = sparse.Bench(variant, "cpu", count=128)
    bench.fill(random.Random(0), ragged=True)
    with machine(target) as launches:
        bench.step()
    assert [each.kernel.program.name for each in launches] == ["decode_kernel", "reduce_kernel"]
    assert launches[0].constants["FORM"].SPARSE
    found = bench.judged(name)
    assert found.error <= found.bound, found
    compared(found.wrong, bench.out, bench.lse)
