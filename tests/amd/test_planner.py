"""The planner on the device, executed: every element of a plan equals that of the specification."""

import pytest

pytest.importorskip("triton")

from mla_fusion.cli.selftest import planner
from tests.amd.execute import Settings
from tests.amd.provider import machine
from tests.nightly import daily

# Sequences at most, heads, CTAs, kv_granularity and overhead.
SHAPES = [
    *planner.THOROUGH, (8, 16, 1, 16, 2), (8, 16, 8, 16, 2), (8, 128, 16, 16, 2),
    (256, 16, 304, 16, 2), (256, 16, 256, 16, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape", daily(SHAPES, (7, 128, 256, 16, 4), (256, 16, 304, 16, 2)), ids=str
)
@pytest.mark.parametrize("backwards", daily([False, True], False))
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_plans_as_the_specification(target, shape, backwards):
    with machine(target, Settings(backwards=backwards)) as launches:
        found = [*planner.check([shape], "cpu", plans=6)]
    assert len(launches) == 12
    assert all(each.right for each in found), found
