"""The arithmetic that the product shares, and that of its specification, by formulas."""

import math

import numpy as np
import pytest
import torch

from mla_fusion.kernels import arithmetic, reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[arithmetic, reference], ids=["shared", "reference"])
def module(request):
    return request.param


def rotated(row, angles, neox):
    """RoPE of one row, pair by pair, with every operation rounded to fp32."""
    half, out = len(row) // 2, list(row)
    for pair in range(half):
        i, j = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
        a, b, cos, sin = np.float32([row[i], row[j], angles[pair], angles[half + pair]])
        out[i], out[j] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8)], ids=["key", "query"])
@pytest.mark.parametrize("types", [(BF16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP32)], ids=str)
def test_rotate(module, neox, shape, types):
    x, table = torch.randn(shape).to(types[0]), torch.randn(11, 8).to(types[1])
    positions = torch.tensor([4, 0, 10, 4, 7])
    before = x.clone()
    got = module.rotate(x, positions, table, neox)
    want = [
        rotated(row.tolist(), table[position].tolist(), neox)
        for token, position in zip(x, positions.tolist(), strict=True)
        for row in token.reshape(-1, 8)
    ]
    assert got.dtype == FP32 and torch.equal(got, torch.tensor(want).view(shape))
    assert torch.equal(x, before)


@pytest.mark.parametrize("act", [BF16, FP16, FP32], ids=str)
def test_absorb(module, act):
    """Sums of whole numbers below 2^24: exact in fp32 in any order, so rounded once."""
    q = torch.randint(-30, 31, (3, 2, 20))[..., :17].to(act)
    w = torch.randint(-30, 31, (2, 17, 5)).to(act)
    got = module.absorb(q, w)
    want = torch.empty(3, 2, 5, dtype=torch.float64)
    for t, h, c in np.ndindex(want.shape):
        want[t, h, c] = math.fsum(float(q[t, h, p]) * float(w[h, p, c]) for p in range(17))
    assert got.dtype == act and torch.equal(got, want.to(act))
    assert got.is_contiguous() or module is reference


def nearest(x, codes):
    """The code nearest to each of `x`, of all 256 `codes` of an fp8 type, in float64. It saturates.

    torch gives only the values of the codes. Of two that are as near the even one is meant, and of
    two zeros that with the sign of the input.
    """
    values = codes.float().double().numpy()
    finite = np.flatnonzero(np.isfinite(values))
    values, x = values[finite], x.astype(np.float64)[:, None]
    distance = np.abs(values - x.clip(values.min(), values.max()))
    keys = np.signbit(values) != np.signbit(x), finite % 2 + 0 * distance, distance
    return torch.from_numpy(finite[np.lexsort(keys)[:, 0]].astype(np.uint8))


def hard_values(codes):
    """fp32 inputs: all fp8 values, their midpoints and neighbours, extremes and random ones."""
    values = codes.float()
    values = values[values.isfinite()].sort().values
    middle = (values[1:] + values[:-1]) / 2
    around = torch.cat((middle, values, middle.nextafter(middle + 1), middle.nextafter(middle - 1)))
    large = 465.0, 1e38, -1e38, torch.inf, -torch.inf, torch.nan
    extremes = torch.tensor([0.0, -0.0, 1e-45, -1e-40, *large])
    random = torch.randn(1024) * torch.exp2(torch.randint(-14, 12, (1024,)).float())
    x = torch.cat((around, extremes, random))
    return torch.nn.functional.pad(x, (0, 4096 - len(x)))


@pytest.mark.parametrize("scale", [1.0, 0.031])
@pytest.mark.parametrize("dtype", arithmetic.FP8_DTYPES, ids=str)
def test_cast_to_fp8(module, dtype, scale):
    codes = torch.arange(256).to(torch.uint8).view(dtype)
    x = hard_values(codes)
    got = module.cast(x, dtype, torch.tensor([scale])).view(torch.uint8)
    with np.errstate(over="ignore", under="ignore"):
        scaled = x.numpy() * (np.float32(1) / np.float32(scale))
    want, nan = nearest(scaled, codes), x.isnan()
    assert torch.equal(got[~nan], want[~nan])
    assert nan.any() and got[nan].view(dtype).float().isnan().all()


def test_cast_to_other_types_rounds_once_and_does_not_scale(module):
    x = torch.tensor([1 + 3 / 512, 1 + 1 / 256, -1e30, torch.nan])
    got = module.cast(x, BF16, torch.tensor([0.5]))
    assert got.dtype == BF16 and got[:2].tolist() == [1.0078125, 1.0]
    assert got[2] == x[2].to(BF16) and got[3].isnan()
