"""The planner, the decodes and the reduction: the machine code for gfx942 and gfx950, executed."""

import dataclasses
import random

import pytest

pytest.importorskip("triton")

from mla_fusion import gpu
from mla_fusion.attention import triton as provider
from mla_fusion.attention.cards import why_no_sparse
from mla_fusion.cli.selftest import planner, sparse
from mla_fusion.cli.selftest.sparse import Variant
from tests.amd import decode
from tests.amd.execute import Settings
from tests.amd.provider import judged, machine
from tests.kernels.compiled import FP8
from tests.nightly import daily

NO_SPARSE = why_no_sparse(gpu.Gpu(arch="gfx942"))
# Both types, sequences of several tiles, and several row blocks.
SOME = ("ragged", "128 heads", "fp8 drafts")
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


@pytest.mark.parametrize("name", SOME)
def test_decode(target, name):
    launches = decode.check(target, name)
    assert [each.kernel.program.name for each in launches] == ["mla_decode_cdna", "mla_reduce"]
    assert launches[0].constants["CDNA"] == (3 if target == "gfx942" else 4)


def test_portable_kernel(target):
    """That of other GPUs, of sparse decode and of other widths."""
    launches = decode.check(target, "fp8 cache", portable=True)
    assert "CDNA" not in launches[0].constants


@pytest.mark.nightly
@pytest.mark.parametrize("name", decode.CASES)
@pytest.mark.parametrize("rounding", [-1, 0, 1])
@pytest.mark.parametrize("portable", [False, True], ids=["cdna", "portable"])
def test_decode_backwards_and_with_other_approximations(target, name, rounding, portable):
    decode.check(target, name, Settings(backwards=True, rounding=rounding, seed=7), portable)


VARIANTS = {
    "fp8 cache": Variant(16, (200,), tokens=4, sink=False),
    "bf16": Variant(12, (64,), tokens=4, sink=False),
    "two scopes, sink": Variant(16, (20, 40), tokens=4),
}


@pytest.mark.skipif(bool(NO_SPARSE), reason=str(NO_SPARSE))
@pytest.mark.parametrize("name", daily(VARIANTS, "fp8 cache"))
def test_sparse(target, name, monkeypatch):
    monkeypatch.setattr(provider, "require", lambda: None)
    variant = VARIANTS[name]
    if name == "fp8 cache":
        variant = dataclasses.replace(variant, kv=FP8[target])
    bench = sparse.Bench(variant, "cpu", count=128)
    bench.fill(random.Random(0), ragged=True)
    launches = judged(bench, target)
    names = ["mla_decode_triton", "mla_reduce"]
    if variant.columns == (64,):  # one block of a plan
        names.pop()
    assert [each.kernel.program.name for each in launches] == names
    assert launches[0].constants["FORM"].SPARSE


# Sequences at most, heads, CTAs, kv_granularity and overhead.
SHAPES = [
    *planner.THOROUGH, (8, 16, 1, 16, 2), (8, 16, 8, 16, 2), (8, 128, 16, 16, 2),
    (256, 16, 304, 16, 2), (256, 16, 256, 16, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape", daily(SHAPES, (7, 128, 256, 16, 4), (256, 16, 304, 16, 2)), ids=str
)
@pytest.mark.parametrize("backwards", daily([False, True], False))
def test_plans_as_the_specification(target, shape, backwards):
    """Every element of a plan."""
    with machine(target, Settings(backwards=backwards)) as launches:
        found = [*planner.check([shape], "cpu", plans=6)]
    assert len(launches) == 18
    assert all(each.right for each in found), found
