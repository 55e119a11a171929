"""Instructions between lanes, of matrices, of fp8, of divisions, and of control."""

import numpy as np
import pytest
import torch

from tests.amd.alone import Wave
from tests.kernels.fp8 import hard_values

LANE = np.arange(64)
RNG = np.random.default_rng(6)


def words(*shape):
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


DPP = {
    "quad_perm:[3,2,1,0]": LANE ^ 3,
    "row_shl:3": np.where(LANE % 16 + 3 < 16, LANE + 3, -1),
    "row_shr:1": np.where(LANE % 16 >= 1, LANE - 1, -1),
    "row_ror:5": LANE // 16 * 16 + (LANE - 5) % 16,
    "row_mirror": LANE ^ 15,
    "row_half_mirror": LANE ^ 7,
    "row_bcast:15": np.where(LANE >= 16, LANE // 16 * 16 - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "row_newbcast:4": LANE // 16 * 16 + 4,
}


@pytest.mark.parametrize("control", DPP)
def test_dpp(control):
    source, values, old = DPP[control], words(64), words(64)
    active = int(RNG.integers(1, 2**63))
    on = np.array([active >> lane & 1 for lane in LANE], bool)
    found = (source >= 0) & on[source]
    for bound in (False, True):
        wave = Wave()
        wave.v[10], wave.v[20] = values, old
        wave.set_pair(126, active)
        end = " bound_ctrl:1" if bound else ""
        assert not wave.run(f"v_mov_b32_dpp v20, v10 {control} row_mask:0xd bank_mask:0x7{end}")
        masked = (LANE // 16 == 1) | (LANE % 16 // 4 == 3)
        want = np.where(found, values[source], 0)
        written = on & ~masked & (found | bound)
        np.testing.assert_array_equal(wave.v[20], np.where(written, want, old), control)


def test_sdwa():
    wave = Wave()
    a, b, old = wave.v[10:13] = words(3, 64)
    old = old.copy()
    assert not wave.run(
        "v_add_u32_sdwa v20, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 "
        "src1_sel:BYTE_2",
        "v_add_u32_sdwa v21, v10, sext(v11) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD "
        "src1_sel:BYTE_3",
        "v_mov_b32_sdwa v12, v10 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD",
    )
    np.testing.assert_array_equal(wave.v[20], (a >> 16) + (b >> 16 & 0xFF))
    signed = (b >> 24).astype(np.uint8).view(np.int8).astype(np.int64)
    np.testing.assert_array_equal(wave.v[21], (a + signed).astype(np.uint32))
    np.testing.assert_array_equal(wave.v[12], old & 0xFFFF00FF | (a & 0xFF) << 8)


@pytest.mark.parametrize("width", [16, 32])
def test_permlane_swap(width):
    wave = Wave()
    a, b = wave.v[10:12] = words(2, 64)
    assert not wave.run(f"v_permlane{width}_swap_b32_e32 v10, v11")
    odd = LANE & width != 0
    np.testing.assert_array_equal(wave.v[10], np.where(odd, b[LANE ^ width], a))
    np.testing.assert_array_equal(wave.v[11], np.where(odd, b, a[LANE ^ width]))


def test_other_moves_between_lanes():
    wave = Wave()
    wave.v[10:12] = 4 * RNG.permutation(64), words(64)
    lanes, values = wave.v[10] // 4, wave.v[11].copy()
    wave.set_pair(126, 2**64 - 8)
    wave.s[20] = 17
    assert not wave.run(
        "ds_bpermute_b32 v20, v10, v11", "ds_swizzle_b32 v21, v11 offset:swizzle(SWAP,4)",
        "v_readfirstlane_b32 s30, v11", "v_readlane_b32 s31, v11, s20",
        "v_writelane_b32 v22, s20, 5", "v_pk_mov_b32 v[24:25], v[10:11], v[10:11] op_sel:[1,0]",
        "s_waitcnt lgkmcnt(0)",
    )  # fmt: skip
    on = LANE >= 3
    np.testing.assert_array_equal(wave.v[20][on], np.where(lanes >= 3, values[lanes], 0)[on])
    np.testing.assert_array_equal(wave.v[21][on], np.where(LANE ^ 4 >= 3, values[LANE ^ 4], 0)[on])
    assert wave.s[30] == values[3] and wave.s[31] == values[17] and wave.v[22][5] == 17
    np.testing.assert_array_equal(wave.v[24][on], values[on])
    np.testing.assert_array_equal(wave.v[25][on], 4 * lanes[on])


MATRICES = {
    "bf16": (2, lambda x: torch.tensor(x).bfloat16(), ((16, 16), (16, 32), (32, 8), (32, 16))),
    "f16": (2, lambda x: torch.tensor(x).half(), ((16, 16), (16, 32), (32, 8), (32, 16))),
    "f32": (4, torch.tensor, ((16, 4), (32, 2))),
    "fp8_fp8": (1, lambda x: torch.tensor(x).to(torch.float8_e4m3fn), ((16, 32), (32, 16))),
}


@pytest.mark.parametrize("shift", [0, 2], ids=["", "result beside"])
@pytest.mark.parametrize(
    "kind, side, depth", [(kind, *shape) for kind in MATRICES for shape in MATRICES[kind][2]]
)
def test_matrix_products(kind, side, depth, shift):
    """The result takes the place of the summand, or of a part of it."""
    size, cast, _ = MATRICES[kind]
    a, b = (
        cast(RNG.standard_normal(shape).astype(np.float32))
        for shape in ((side, depth), (depth, side))
    )
    c = RNG.standard_normal((side, side)).astype(np.float32)
    wave = Wave()
    each, registers = depth * side // 64, side * side // 64

    def put(index, rows):
        """rows [side, depth]: lane l has `each` elements of row l % side, from a block on."""
        raw = rows.contiguous().view(torch.uint8).numpy().reshape(side, 64 // side, each * size)
        raw = raw.transpose(1, 0, 2).reshape(64, -1)
        wave.v[index : index + each * size // 4] = raw.copy().view(np.uint32).T

    put(10, a)
    put(20, b.view(torch.uint8 if size == 1 else b.dtype).T.contiguous().view(b.dtype))
    # Groups of four rows go to the blocks of lanes in turn.
    rows = np.arange(side).reshape(-1, 64 // side, 4)
    place = {int(row): (4 * group + k, block) for group, blocks in enumerate(rows)
             for block, four in enumerate(blocks) for k, row in enumerate(four)}  # fmt: skip
    for row, (register, block) in place.items():
        wave.v[40 + register, block * side : (block + 1) * side] = c[row].view(np.uint32)
    count = max(1, each * size // 4)
    first, second = (f"v[{k}:{k + count - 1}]" if count > 1 else f"v{k}" for k in (10, 20))
    summand, result = (f"v[{k}:{k + registers - 1}]" for k in (40, 40 + shift))
    wave.set_pair(126, 0)  # EXEC does not matter
    assert not wave.run(
        f"v_mfma_f32_{side}x{side}x{depth}_{kind} {result}, {first}, {second}, {summand}"
    )
    want = a.double() @ b.double() + torch.tensor(c).double()
    for row, (register, block) in place.items():
        got = wave.v[40 + shift + register, block * side : (block + 1) * side].view(np.float32)
        np.testing.assert_allclose(got, want[row].numpy(), rtol=2e-7, atol=1e-6)


@pytest.mark.parametrize("fnuz", [False, True])
def test_fp8(fnuz):
    """Every code, and the hard values of tests/kernels; infinities become NaN (see floats.h)."""
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    for start in range(0, 256, 128):
        wave = Wave(fnuz=fnuz)
        wave.v[10] = np.arange(start, start + 128, dtype=np.uint8).view(np.uint16)
        assert not wave.run("v_cvt_pk_f32_fp8_e32 v[20:21], v10", "v_cvt_f32_fp8_e32 v22, v10")
        got = wave.v[20:22].T.copy().view(np.float32).ravel()
        np.testing.assert_array_equal(got, codes[start : start + 128].float().numpy())
        np.testing.assert_array_equal(wave.v[22], wave.v[20])
    values = hard_values(codes)
    largest = torch.finfo(dtype).max
    want = values.clamp(-largest, largest).to(dtype).float()
    want[values.isinf()] = torch.nan
    for some, wanted in zip(values.split(128), want.split(128), strict=True):
        wave = Wave(fnuz=fnuz)
        wave.v[10:12] = some.view(64, 2).T.contiguous().numpy().view(np.uint32)
        wave.v[20] = 0x12345678
        assert not wave.run(
            "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1",
            "v_cvt_pk_fp8_f32 v20, v10, v11 op_sel:[0,0,1]",
        )
        assert (wave.v[20] & 0xFFFF == 0x5678).all()
        got = torch.tensor((wave.v[20] >> 16).astype(np.uint16).view(np.uint8)).view(dtype).float()
        np.testing.assert_array_equal(got.numpy(), wanted.numpy())
    wave = Wave(fnuz=fnuz)
    wave.v[10] = np.float32(1e6).view(np.uint32)
    wave.run("v_cvt_pk_fp8_f32 v20, v10, v10")
    code = torch.tensor([int(wave.v[20][0] & 255)], dtype=torch.uint8)
    assert code.view(dtype).float().isnan()


@pytest.mark.parametrize("rounding", [-1, 0, 1])
def test_division(rounding):
    """LLVM's sequence of an fp32 division is exact, however its reciprocal is rounded."""
    special = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 3e38, 1e-38, 1e-44, -2e-40]
    scale = 10.0 ** RNG.integers(-18, 18, (2, 64))
    a, b = (RNG.standard_normal((2, 64)) * scale).astype(np.float32)
    a[:40], b[:40] = RNG.choice(special, 40), RNG.choice(special, 40)
    wave = Wave()
    wave.machine.rounding = rounding
    wave.v[1], wave.v[2] = a.view(np.uint32), b.view(np.uint32)
    assert not wave.run(
        "v_div_scale_f32 v3, s[0:1], v2, v2, v1", "v_div_scale_f32 v5, vcc, v1, v2, v1",
        "v_rcp_f32_e32 v4, v3", "v_fma_f32 v6, -v3, v4, 1.0", "v_fmac_f32_e32 v4, v6, v4",
        "v_mul_f32_e32 v6, v5, v4", "v_fma_f32 v7, -v3, v6, v5", "v_fmac_f32_e32 v6, v7, v4",
        "v_fma_f32 v3, -v3, v6, v5", "v_div_fmas_f32 v3, v3, v4, v6",
        "v_div_fixup_f32 v3, v3, v2, v1",
    )  # fmt: skip
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wave.v[3].view(np.float32), a / b)


def test_bytes_permuted():
    wave = Wave()
    wave.v[10:12] = words(2, 64)
    wave.v[12] = RNG.integers(0, 14, (64, 4), dtype=np.uint8).view(np.uint32).ravel()
    assert not wave.run("v_perm_b32 v20, v10, v11, v12")
    for a, b, choice, got in zip(*wave.v[10:13], wave.v[20], strict=True):
        pool = np.array([b, a], np.uint32).view(np.uint8)
        signs = [255 if pool[k] & 128 else 0 for k in (1, 3, 5, 7)]
        of = [*pool, *signs, 0, 255]
        want = [of[k] for k in np.array([choice], np.uint32).view(np.uint8)]
        assert list(np.array([got], np.uint32).view(np.uint8)) == want


def test_control():
    wave = Wave()
    wave.s[20] = 5
    wave.set_pair(30, 0xF0)
    assert not wave.run(
        "s_mov_b32 s21, 0", "loop:", "s_add_i32 s21, s21, s20", "s_sub_i32 s20, s20, 1",
        "s_cmp_lg_u32 s20, 0", "s_cbranch_scc1 loop", "s_and_saveexec_b64 s[40:41], s[30:31]",
        "s_cbranch_execz end", "v_mov_b32_e32 v10, 7", "end:", "s_branch over", "s_mov_b32 s21, 1",
        "over:", "s_nop 3",
    )  # fmt: skip
    assert wave.s[21] == 15 and wave.pair(40) == 2**64 - 1 and wave.pair(126) == 0xF0
    np.testing.assert_array_equal(wave.v[10], np.where((LANE >= 4) & (LANE < 8), 7, 0))
    assert wave.s[128] == 1
    assert "runaway" in Wave().run("again:", "s_branch again")


@pytest.mark.parametrize("name, want", [("andn2", 0x0F), ("or", 0xFF), ("and", 0xF0)])
def test_saveexec(name, want):
    wave = Wave()
    wave.set_pair(126, 0xFF if name != "or" else 0x0F)
    wave.set_pair(30, 0xF0)
    # s_andn2_saveexec: the source without EXEC.
    if name == "andn2":
        wave.set_pair(126, 0xF0)
        wave.set_pair(30, 0xFF)
    assert not wave.run(f"s_{name}_saveexec_b64 s[40:41], s[30:31]")
    assert wave.pair(126) == want and wave.s[128] == 1
