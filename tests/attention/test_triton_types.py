"""What the Triton decode does not take is refused in Python, before a kernel is compiled for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from mla_fusion import attention
from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.attention import triton as provider

if TYPE_CHECKING:
    from collections.abc import Iterator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ, E5M2 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2
TAKEN = {
    (BF16, BF16), (FP16, FP16), (FN, FN), (FNUZ, FNUZ),
    (BF16, FN), (BF16, FNUZ), (FP16, FN), (FP16, FNUZ),
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each launch, which is not made."""
    made: list[Any] = []
    attention.get_provider.cache_clear()
    monkeypatch.setattr(provider, "require", lambda: None)
    monkeypatch.setattr(provider, "launch", lambda *args: made.append(args))
    yield made
    attention.get_provider.cache_clear()


def decode(q_dtype: torch.dtype, kv_dtype: torch.dtype, latent: int = 512, rope: int = 64) -> None:
    plan = PersistentDecodePlan.allocate(
        max_batch=1, max_query_len=1, num_heads=16, q_dtype=q_dtype, kv_dtype=kv_dtype,
        device="cpu", workers=2, v_head_dim=latent,
    )  # fmt: skip
    plan.refresh(
        qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([3], dtype=torch.int32), num_tokens=1, max_query_len=1,
    )  # fmt: skip
    one = torch.ones(1)
    attention.persistent_mla_decode(
        torch.zeros(1, 16, latent + rope).to(q_dtype),
        torch.zeros(2, 16, latent + rope).to(kv_dtype),
        plan,
        block_table=torch.zeros((1, 1), dtype=torch.int32),
        softmax_scale=0.1,
        q_scale=one,
        kv_scale=one,
        out=torch.empty(1, 16, latent, dtype=BF16),
        provider="triton",
    )


@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
@pytest.mark.parametrize("q_dtype", [BF16, FP16, FP32, FN, FNUZ, E5M2])
def test_types(launches: list[Any], q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if (q_dtype, kv_dtype) in TAKEN:
        decode(q_dtype, kv_dtype)
        assert len(launches) == 1
        return
    with pytest.raises(ValueError, match=f"got {q_dtype} over {kv_dtype}; convert, or use"):
        decode(q_dtype, kv_dtype)
    assert not launches


@pytest.mark.parametrize("latent, rope", [(448, 64), (512, 48), (512, 0), (8, 64)])
def test_widths(launches: list[Any], latent: int, rope: int) -> None:
    with pytest.raises(ValueError, match="a power of two from 16 on, got"):
        decode(BF16, BF16, latent, rope)
    assert not launches
