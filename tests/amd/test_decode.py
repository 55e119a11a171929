"""The portable decode and the reduction: the machine code for gfx942 and gfx950, executed."""

import pytest

pytest.importorskip("triton")

from tests.amd import decode
from tests.amd.execute import Settings

# All that compile to other machine code: types, tall tiles, pages.
SOME = ("ragged", "fp8", "fp8 cache", "128 heads", "page of one")
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


@pytest.mark.parametrize("name", SOME)
def test_decode(target, name):
    launches = decode.check(target, name)
    assert [each.kernel.program.name for each in launches] == ["decode_kernel", "reduce_kernel"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", decode.CASES)
@pytest.mark.parametrize("rounding", [-1, 0, 1])
def test_decode_backwards_and_with_other_approximations(target, name, rounding):
    decode.check(target, name, Settings(backwards=True, rounding=rounding, seed=7))
