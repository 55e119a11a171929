"""What has to hold with the patch epilogue_groups_few, compiled; test_patched_copies.py runs
this."""

import pytest

from mla_fusion.attention.triton_epilogue import Shape
from tests.attention.test_epilogue_compiled import report
from tests.kernels.compiled import FP8, LDS


@pytest.mark.parametrize("target", FP8)
@pytest.mark.parametrize(
    "shape", [Shape(1, 128, 4, 32, 4, whole=16), Shape(1, 128, 8, 64, 8, whole=16)]
)
def test_few(target, shape):
    """Nothing spills, and W_UV is asked for before the decode has ended."""
    result = report(target, 16, shape, pdl=target == "sm_90", quantization="group")
    assert result.memory_spills == 0 and result.shared <= LDS[target], result
    assert {"atomic", "ATOMG"} & set(result.sync), result
    if target == "sm_90":
        assert result.spills == 0, result
        wide = 2 * shape.columns * 512 // shape.slices // (32 * shape.warps * 16)
        first = result.order[: result.order.index("ACQBULK")]
        assert first.count("LDG.128") == wide and "STG" not in first, result
