"""The portable decode and the reduction: the machine code for gfx942 and gfx950, executed."""

import pytest

pytest.importorskip("triton")

from tests.amd import decode
from tests.amd.execute import Settings

# Both types, sequences of several tiles, and several row blocks.
SOME = ("ragged", "128 heads", "fp8 drafts")
PORTABLE = ("fp8 cache",)
pytestmark = pytest.mark.parametrize("target", ["gfx942", "gfx950"])


@pytest.mark.parametrize("name", SOME)
def test_decode(target, name):
    launches = decode.check(target, name)
    assert [each.kernel.program.name for each in launches] == ["decode_kernel", "reduce_kernel"]
    assert launches[0].constants["CDNA"] == (3 if target == "gfx942" else 4)


@pytest.mark.parametrize("name", PORTABLE)
def test_portable_kernel(target, name):
    """That of other GPUs, of sparse decode and of other widths."""
    launches = decode.check(target, name, portable=True)
    assert "CDNA" not in launches[0].constants


@pytest.mark.nightly
@pytest.mark.parametrize("name", decode.CASES)
@pytest.mark.parametrize("rounding", [-1, 0, 1])
@pytest.mark.parametrize("portable", [False, True], ids=["cdna", "portable"])
def test_decode_backwards_and_with_other_approximations(target, name, rounding, portable):
    decode.check(target, name, Settings(backwards=True, rounding=rounding, seed=7), portable)
