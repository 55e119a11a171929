"""The reference provider against formulas written out element by element in float64."""

from __future__ import annotations

import math

import cases
import pytest
import torch

from mla_fusion import kernels
from mla_fusion.kernels import reference


def slow_rope(x: list[float], cos_sin: list[float], neox: bool) -> list[float]:
    """RoPE of one row, pair by pair."""
    half = len(x) // 2
    out = list(x)
    for pair in range(half):
        i, j = (pair, pair + half) if neox else (2 * pair, 2 * pair + 1)
        cos, sin = cos_sin[pair], cos_sin[half + pair]
        out[i], out[j] = x[i] * cos - x[j] * sin, x[j] * cos + x[i] * sin
    return out


@pytest.mark.parametrize("neox", [False, True])
def test_reference_is_the_formula(neox: bool) -> None:
    case = cases.Case(
        act=torch.float32, kv=torch.float32, query=torch.float32, neox=neox, strided=True
    )
    inputs = cases.build(case)
    a = inputs.arguments
    out, storage = cases.run(reference, inputs)
    cache = storage.view(torch.float32).as_strided(a["kv_cache"].shape, a["kv_cache"].stride())
    for t, slot in enumerate(a["slot_mapping"].tolist()):
        if slot < 0:
            assert not out[t].any()
            continue
        angles = a["cos_sin_cache"][a["positions"][t]].tolist()
        row = cache[slot // case.block_size, slot % case.block_size]
        want = a["kv_c"][t].tolist() + slow_rope(a["k_pe"][t].tolist(), angles, neox)
        torch.testing.assert_close(row, torch.tensor(want), rtol=1e-6, atol=1e-6)
        for h in range(case.heads):
            q, w = a["q"][t, h].tolist(), a["w_uk_t"][h].tolist()
            latent = [
                math.fsum(q[p] * w[p][c] for p in range(case.nope)) for c in range(case.latent)
            ]
            want = latent + slow_rope(q[case.nope :], angles, neox)
            torch.testing.assert_close(out[t, h], torch.tensor(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", reference.FP8_DTYPES)
def test_cast_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1e9, -1e9, torch.nan, 0.5, torch.inf])
    got = reference.cast(x, dtype, torch.tensor([0.5])).float()
    limit = torch.finfo(dtype).max
    assert got.nan_to_num(nan=-7).tolist() == [limit, -limit, -7, 1.0, limit]


def test_only_addressed_slots_change() -> None:
    inputs = cases.build(cases.Case(strided=True))
    _, storage = cases.run(reference, inputs)
    cache = inputs.arguments["kv_cache"]
    allowed = torch.zeros_like(storage, dtype=torch.bool)
    view = allowed.as_strided(cache.shape, cache.stride())
    slots = inputs.arguments["slot_mapping"]
    slots = slots[slots >= 0]
    view[slots // cache.shape[1], slots % cache.shape[1]] = True
    assert bool((storage[~allowed] == cases.POISON).all())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("w_uk_t", torch.zeros(3, 32, 64)),
        ("kv_c", torch.zeros(5, 63, dtype=torch.bfloat16)),
        ("slot_mapping", torch.zeros(5, dtype=torch.int32)),
        ("kv_cache", torch.zeros(2, 4, 80, dtype=torch.uint8)),
        ("cos_sin_cache", torch.zeros(8, 16, dtype=torch.float16)),
    ],
)
def test_wrong_arguments_are_named(name: str, value: torch.Tensor) -> None:
    inputs = cases.build(cases.Case())
    out = torch.empty(5, 3, 80, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=name):
        kernels.fused_mla_decode_prep(
            **{**inputs.arguments, name: value}, is_neox=False, q_out=out, provider="reference"
        )
