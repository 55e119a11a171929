"""The reference against the definition: plain softmax attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_fusion.attention import PersistentDecodePlan, persistent_mla_decode
from mla_fusion.attention.validate import Inputs, validate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LATENT, ROPE, SCALE = 32, 8, 0.2


def arguments(
    query_lens: list[int],
    seq_lens: list[int],
    heads: int = 20,
    q_dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
    page: int = 16,
    **options: Any,
) -> dict[str, Any]:
    """A decode over random values; every cache entry that no sequence owns is NaN."""
    g = torch.Generator().manual_seed(len(query_lens) + heads)
    batch, width = len(seq_lens), LATENT + ROPE
    qo_indptr = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(qo_indptr[-1])
    longest = max(1, *query_lens)
    plan = PersistentDecodePlan.allocate(
        max_batch=batch + 1, max_query_len=longest, num_heads=heads, q_dtype=q_dtype,
        kv_dtype=kv_dtype, device="cpu", v_head_dim=LATENT, **{"workers": 7, **options},
    )  # fmt: skip
    plan.refresh(
        qo_indptr=qo_indptr, seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_tokens=tokens, max_query_len=longest,
    )  # fmt: skip
    pages = [-(-length // page) for length in seq_lens]
    order = torch.randperm(sum(pages) + 1, generator=g, dtype=torch.int32)
    table = torch.full((batch, max(1, *pages)), -1, dtype=torch.int32)
    cache = torch.full((sum(pages) + 1, page, width), torch.nan).to(kv_dtype)
    for b, (length, count) in enumerate(zip(seq_lens, pages, strict=True)):
        table[b, :count] = order[sum(pages[:b]) :][:count]
        for token in range(length):
            row = torch.randn(width, generator=g).to(kv_dtype)
            cache[table[b, token // page], token % page] = row
    return {
        "q": torch.randn((tokens, heads, width), generator=g).to(q_dtype),
        "kv_cache": cache,
        "plan": plan,
        "block_table": table,
        "softmax_scale": SCALE,
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([1.5]),
    }


def definition(
    given: dict[str, Any], query_lens: list[int], seq_lens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64, one query row at a time."""

    def wide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x.double() * (scale.double() if x.dtype.itemsize == 1 else 1.0)

    q, cache = wide(given["q"], given["q_scale"]), wide(given["kv_cache"], given["kv_scale"])
    page, row = cache.shape[1], 0
    out = torch.zeros((*q.shape[:2], LATENT), dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for b, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        at = torch.arange(length)
        keys = cache[given["block_table"][b, at // page].long(), at % page]
        for i in range(rows):
            visible = keys[: max(0, length - (rows - 1 - i))]
            if len(visible):
                scores = q[row] @ visible.T * SCALE
                out[row] = scores.softmax(-1) @ visible[:, :LATENT]
                lse[row] = scores.logsumexp(-1)
            row += 1
    return out, lse


RAGGED = [
    ([1, 1, 1], [500, 3, 90]),
    ([3, 1, 3, 0], [700, 33, 2, 9]),
    ([0, 2, 8], [5, 0, 260]),
    ([1] * 9, [1, 16, 17, 0, 400, 15, 31, 33, 64]),
]


@pytest.mark.parametrize("query_lens, seq_lens", RAGGED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overhead": 1, "workers": 33},
        {"heads_per_work": 16, "overhead": 1, "page": 1},
        {"q_dtype": FN, "kv_dtype": FN, "overhead": 1, "page": 64},
        {"q_dtype": BF16, "kv_dtype": FNUZ, "max_split_per_batch": 2, "overhead": 1},
        {"heads": 8, "q_dtype": FP16, "kv_dtype": FP16, "workers": 1},
    ],
)
def test_equal_to_softmax_attention(
    query_lens: list[int], seq_lens: list[int], options: dict[str, Any]
) -> None:
    given = arguments(query_lens, seq_lens, **options)
    expected, expected_lse = definition(given, query_lens, seq_lens)
    exact = torch.empty(expected.shape)
    for out, tolerance in ((None, 4e-3), (exact, 1e-6)):
        got, lse = persistent_mla_decode(**given, out=out, return_lse=True)
        assert got.dtype == (FP32 if out is not None else FP16 if got.dtype == FP16 else BF16)
        assert (got.double() - expected).norm() <= tolerance * expected.norm()
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        assert not got[expected_lse.isneginf()].any(), "rows that see no key are zero"


def test_split_and_whole_sequences_agree() -> None:
    """One worker splits nothing; forty with no overhead split everything."""
    lens = [300, 40, 77]
    whole = arguments([2, 1, 2], lens, workers=1)
    split = arguments([2, 1, 2], lens, workers=40, overhead=1)
    assert int(whole["plan"].reduce_indptr[-1]) == 0 < int(split["plan"].reduce_indptr[-1])
    (a, a_lse), (b, b_lse) = (
        persistent_mla_decode(**given, out=torch.empty(5, 20, LATENT), return_lse=True)
        for given in (whole, split)
    )
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a_lse, b_lse)


def test_rows_behind_the_batch_are_not_written() -> None:
    given = arguments([1, 1], [20, 30])
    plan = given["plan"]
    plan.refresh(
        qo_indptr=plan.qo_indptr[:3].clone(), seq_lens=torch.tensor([20, 30], dtype=torch.int32),
        num_tokens=4, max_query_len=1,
    )  # fmt: skip
    given["q"] = torch.cat((given["q"], given["q"]))
    out = torch.full((4, 20, LATENT), 7.0)
    persistent_mla_decode(**given, out=out)
    assert out[2:].eq(7).all() and not out[:2].eq(7).any()


BAD = [
    ({"q": torch.zeros(3, 20, 40).to(BF16)}, "refreshed for 2 query rows in 2 sequences, q has 3"),
    ({"q": torch.zeros(2, 16, 40).to(BF16)}, "q must be of 20 heads"),
    ({"q": torch.zeros(2, 20, 40)}, "q must be torch.bfloat16"),
    ({"q": torch.zeros(2, 40, 20).to(BF16).mT}, "q must be dense in its last"),
    ({"q": torch.zeros(2, 20, 24).to(BF16)}, "q must be 32 wide or wider"),
    ({"kv_cache": torch.zeros(4, 16, 32).to(BF16)}, r"kv_cache must be \[blocks, page_size, 40\]"),
    ({"kv_cache": torch.zeros(4, 16, 40)}, "kv_cache must be torch.bfloat16"),
    ({"block_table": torch.zeros(3, 2).int()}, "refreshed for 2 sequences"),
    ({"block_table": torch.zeros(2, 2).long()}, "block_table must be int32"),
    ({"block_table": torch.zeros(2, 2).int().T}, "block_table must be dense"),
    ({"out": torch.zeros(2, 20, 40)}, "out must be"),
    ({"out": torch.zeros(2, 20, 32).to(FN)}, "out must be bf16, fp16 or fp32"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be finite"),
    ({"provider": "cuda"}, "unknown provider 'cuda'"),
    ({"provider": "aiter"}, 'planner="aiter" for aiter'),
]


@pytest.mark.parametrize("change, message", BAD)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        persistent_mla_decode(**{**arguments([1, 1], [20, 30]), **change})


def test_refused_without_scales() -> None:
    given = arguments([1], [20], q_dtype=FN, kv_dtype=FN)
    for change in ({"q_scale": None}, {"kv_scale": torch.ones(2)}):
        with pytest.raises(ValueError, match="must be one fp32 element"):
            persistent_mla_decode(**{**given, **change})


class NoOperation(TorchDispatchMode):
    """Refuses every operation on a tensor: inside a graph capture some are errors."""

    def __torch_dispatch__(self, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("dtype", [BF16, FN])
def test_validation_reads_nothing_from_the_device(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    given = arguments([1, 2], [20, 30], q_dtype=dtype, kv_dtype=dtype)
    given["out"] = torch.empty(3, 20, LATENT, dtype=BF16)

    def printed(*_: Any, **__: Any) -> str:
        raise AssertionError("a tensor was printed")

    # Printing reads values past the mode above.
    monkeypatch.setattr(torch._tensor_str, "_str", printed)
    with NoOperation():
        validate(Inputs(**given, lse=None))


def test_refused_without_a_refresh() -> None:
    given = arguments([1], [20])
    given["plan"].step = None
    with pytest.raises(ValueError, match="never refreshed"):
        persistent_mla_decode(**given)
