"""The roofline: instructions whose cost is known, and what it says of the library's kernels."""

import pytest

pytest.importorskip("triton")

import amd_roofline

from tests.amd import assembly
from tests.amd.compile import Kernel

GPU = amd_roofline.GPUS["gfx942"]
# What a run of each adds, and to what.
COSTS = {
    "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[20:21], v[10:11], v[0:3]": ("matrix", 4 * 4),
    "v_mfma_f32_32x32x8_bf16 v[30:45], v[20:21], v[10:11], v[30:45]": ("matrix", 4 * 8),
    "v_add_u32_e32 v1, v1, v2": ("vector", 4),
    "v_exp_f32_e32 v9, v9": ("vector", 16),
    "v_mul_lo_u32 v5, v5, v6": ("vector", 16),
    "ds_write_b128 v2, v[10:13]": ("LDS", 64 * 16),
    "ds_read2st64_b32 v[20:21], v2 offset1:1": ("LDS", 64 * 8),
    "ds_bpermute_b32 v1, v2, v3": ("LDS", 64 * 4),
    "global_load_dwordx4 v[10:13], v1, s[0:1]": ("cache", 64 * 16),
    "buffer_store_dword v0, v4, s[4:7], 0 offen": ("cache", 64 * 4),
    "global_store_short v1, v5, s[0:1]": ("cache", 64 * 2),
    "s_barrier": ("none", 0),
}


@pytest.mark.parametrize("text", COSTS)
def test_the_cost_of_an_instruction(text):
    mnemonic, _, rest = text.partition(" ")
    got = amd_roofline.count([assembly.instruction(1, mnemonic, rest)], [3])
    unit, cost = COSTS[text]
    products = {"16x16x32": 16 * 16 * 32, "32x32x8": 32 * 32 * 8}
    assert got.pop("products") == 3 * sum(products[each] for each in products if each in text)
    assert got == {name: 3 * cost if name == unit else 0 for name in got}


def test_an_unknown_matrix_instruction_is_an_error():
    unknown = assembly.instruction(7, "v_mfma_f32_32x32x4_xf32", "v[0:15], v[20:21], v[10:11], 0")
    with pytest.raises(ValueError, match=r"line 7: .* add it to PASSES"):
        amd_roofline.count([unknown], [1])


@pytest.mark.parametrize(
    ("registers", "lds", "warps", "wanted"),
    [(90, 0, 4, 5), (64, 0, 4, 8), (65, 0, 4, 7), (300, 0, 4, 1), (90, 0, 8, 4),
     (90, 16384, 4, 4), (90, 20000, 4, 3), (90, 0, 2, 5)],
)  # fmt: skip
def test_waves_that_fit(registers, lds, warps, wanted):
    program = assembly.Program("", (), {}, {"next_free_vgpr": registers}, ())
    assert amd_roofline.waves(Kernel("gfx942", program, (), warps, lds), GPU) == wanted


@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("target", amd_roofline.GPUS)
def test_region(target, heads):
    """No product is repeated; four waves a SIMD, and with many heads a short tail."""
    got = amd_roofline.region(target, 64, heads)
    assert got.repeats == 1.0
    assert got.waves >= 4 and (heads == 16 or got.tail <= 0.1), got
