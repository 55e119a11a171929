"""What the Triton decode does not take is refused in Python, before a kernel is compiled for it."""

import itertools
from typing import Any

import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention import triton as provider
from tests.attention.decodes import BF16, FN, FNUZ, FP16, FP32, arguments

E5M2 = torch.float8_e5m2
TAKEN = {
    (BF16, BF16), (FP16, FP16), (FN, FN), (FNUZ, FNUZ),
    (BF16, FN), (BF16, FNUZ), (FP16, FN), (FP16, FNUZ),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """The arguments of each launch, which is not made."""
    made: list[Any] = []
    attention.get_provider.cache_clear()
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(provider, "launch", lambda *args: made.append(args))
    return made


def decode(q_dtype, kv_dtype, **widths):
    given = arguments([1], [3], q_dtype=q_dtype, kv_dtype=kv_dtype, **widths)
    out = torch.empty(1, 20, given["plan"].settings.v_head_dim, dtype=BF16)
    attention.persistent_mla_decode(**given, out=out, provider="triton")


@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
@pytest.mark.parametrize("q_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
def test_types(launches, q_dtype, kv_dtype):
    if (q_dtype, kv_dtype) in TAKEN:
        decode(q_dtype, kv_dtype)
        assert len(launches) == 1
        return
    with pytest.raises(ValueError, match=f"got {q_dtype} over {kv_dtype}; convert, or use"):
        decode(q_dtype, kv_dtype)
    assert not launches


@pytest.mark.parametrize("latent, rope", [(1088, 64), (200, 64), (512, 0), (512, 192)])
def test_widths_that_are_refused(launches, latent, rope):
    why = f"a kv_lora_rank that is a multiple of 16 up to 1024, not {latent}"
    if latent == 512:
        why = f"a qk_rope_head_dim that is a multiple of 16 up to 128, not {rope}"
    with pytest.raises(ValueError, match=f"{why}; convert, or use provider 'reference'"):
        decode(BF16, BF16, v_head_dim=latent, rope=rope)
    assert not launches


def test_widths_that_are_taken(launches):
    for latent, rope in itertools.product((*range(64, 1025, 64), 16), (32, 64, 96, 128)):
        assert not provider.unsupported(BF16, BF16, latent, rope)
    for latent, rope in ((16, 32), (1024, 128)):
        decode(BF16, BF16, v_head_dim=latent, rope=rope)
    assert len(launches) == 2
