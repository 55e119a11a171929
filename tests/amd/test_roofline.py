"""The static roofline: assembly whose cost is known, and what it says of the library's kernels."""

import pytest

pytest.importorskip("triton")


import amd_cost
import amd_roofline

from mla_fusion.kernels.dispatch import Plan
from tests.amd import assembly
from tests.amd.compile import Kernel

TEXT = """
\t.globl\tloop_kernel
loop_kernel:
.LBB0_0:
\ts_mov_b64 s[2:3], -1
\ts_cbranch_scc0 .LBB0_3
\tbuffer_store_dwordx4 v[0:3], v4, s[4:7], 0 offen
\tv_exp_f32_e32 v9, v9
\ts_mov_b64 s[2:3], 0
.LBB0_3:
\ts_and_b64 s[2:3], s[2:3], exec
\ts_cselect_b32 s2, 1, 0
\ts_cmp_lg_u32 s2, 1
\ts_cbranch_scc1 .LBB0_9
.LBB0_4:
\tv_add_u32_e32 v1, v1, v2
.LBB0_5:
\tglobal_load_dwordx4 v[10:13], v1, s[0:1]
\ts_waitcnt vmcnt(0)
\tds_write_b128 v2, v[10:13]
\ts_barrier
\tds_read2st64_b32 v[20:21], v2 offset1:1
\ts_waitcnt lgkmcnt(0)
\tv_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[20:21], v[10:11], v[0:3]
\tv_mfma_f32_32x32x8_bf16 v[30:45], v[20:21], v[10:11], v[30:45]
\tv_mul_lo_u32 v5, v5, v6
\ts_cbranch_scc1 .LBB0_5
\tv_mul_f32_e32 v1, v1, v2
\ts_cbranch_scc1 .LBB0_4
\tglobal_store_short v1, v5, s[0:1]
.LBB0_9:
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_next_free_vgpr 90
"""
GPU = amd_cost.GPUS["gfx942"]


def cost(text=TEXT, trips=(3, 5)):
    program = assembly.parse(text)
    product = amd_cost.kinds(program)[1]
    return amd_cost.count(program, GPU, trips, product)


def test_the_cost_of_a_loop_in_a_loop():
    """Fifteen runs of the inner loop, three of the outer one, none of the other kind of program."""
    got = cost()
    assert got.instructions == {
        "matrix": 30, "vector": 15 + 6, "lds": 30, "global": 15 + 1, "barrier": 15,
        "other": 15 * 3 + 3 + 7,
    }  # fmt: skip
    assert got.matrix == 15 * (16 + 32)
    assert got.vector == 15 * 16 + 6 * 4
    assert got.lds == 15 * 64 * (16 + 8)
    assert got.moved == 15 * 64 * 16 + 64 * 2
    assert got.products == 15 * (16 * 16 * 32 + 32 * 32 * 8)


def test_latency():
    """A run of the inner loop waits for memory, then for LDS, then for a product; the other one
    starts when the matrix unit is free, and the next run loads after both have ended."""
    one, many = (cost(trips=(1, trips)).latency for trips in (1, 11))
    memory = amd_cost.MEMORY_SECONDS * GPU.clock
    load, lds, pipe = memory, amd_cost.LDS_CYCLES, 16
    issued = 8 + 4 + 4 + 4 + 16 + 4  # write, barrier, read, the second product, v_mul_lo, branch
    assert many - one == pytest.approx(10 * (load + lds + pipe + issued), rel=0.02)


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ("v_mfma_f32_16x16x32_fp8", "v_mfma_f32_32x32x16_fp8", "matrix"),
        ("v_mul_lo_u32 v5, v5, v6", "v_add_u32_e32 v5, v5, v6", "vector"),
        ("ds_write_b128", "ds_write_b64", "lds"),
        ("ds_read2st64_b32", "ds_read_b32", "lds"),
        ("global_load_dwordx4", "global_load_dwordx2", "moved"),
        ("s_cbranch_scc1 .LBB0_5", "s_nop 0", "matrix"),
        ("s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)", "latency"),
        ("v_mul_lo_u32 v5, v5, v6", "v_mul_lo_u32 v5, v30, v6", "latency"),  # the product's result
    ],
)  # fmt: skip
def test_a_changed_instruction_is_counted(before, after, field):
    assert before in TEXT
    assert getattr(cost(), field) != getattr(cost(TEXT.replace(before, after)), field)


def test_an_unknown_matrix_instruction_is_an_error():
    with pytest.raises(ValueError, match="add it to PASSES"):
        cost(TEXT.replace("32x32x8_bf16", "32x32x4_xf32"))


@pytest.mark.parametrize(
    ("registers", "lds", "warps", "wanted"),
    [(90, 0, 4, (5, 5)), (64, 0, 4, (8, 8)), (65, 0, 4, (7, 7)), (300, 0, 4, (1, 1)),
     (90, 0, 8, (2, 4)), (90, 16384, 4, (4, 4)), (90, 20000, 4, (3, 3)), (90, 0, 2, (10, 5))],
)  # fmt: skip
def test_waves_that_fit(registers, lds, warps, wanted):
    program = assembly.parse(TEXT.replace("next_free_vgpr 90", f"next_free_vgpr {registers}"))
    kernel = Kernel("gfx942", program, (), warps, lds)
    assert amd_cost.waves(kernel, GPU) == wanted


@pytest.mark.parametrize("target", amd_cost.GPUS)
def test_region(target):
    """The product's own matrix instructions, each needed; four waves a SIMD, a short tail."""
    got = amd_roofline.region(target, 64, 128)
    assert got.repeats == 1.0
    depth = 8 if target == "gfx942" else 16
    # A wave has a quarter of 64 tokens by 64 latents, 128 deep.
    assert got.instructions["matrix"] == 64 * 64 * 128 / 4 / (32 * 32 * depth)
    assert got.waves >= 4 and got.tail <= 0.1, got


def test_the_side_of_a_matrix_instruction():
    """Eight warps have 32 by 128 results: instructions of 32 by 32 are too few for them."""
    plan = Plan(block_m=32, block_n=128, num_warps=8)
    assert amd_roofline.region("gfx942", 32, 8, plan=plan).repeats > 1.0
