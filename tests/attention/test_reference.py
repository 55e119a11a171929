"""The reference against the definition: plain softmax attention in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mla_fusion.attention import persistent_mla_decode
from mla_fusion.attention.plan.inputs import Inputs, validate
from mla_fusion.measure.distances import distance
from tests.attention.decodes import BF16, FN, FNUZ, FP16, FP32, arguments, definition

RAGGED = [
    ([1, 1, 1], [500, 3, 90]), ([3, 1, 3, 0], [700, 33, 2, 9]), ([0, 2, 8], [5, 0, 260]),
    ([1] * 9, [1, 16, 17, 0, 400, 15, 31, 33, 64]),
]  # fmt: skip


@pytest.mark.parametrize("query_lens, seq_lens", RAGGED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overhead": 1, "ctas": 33},
        {"heads_per_work": 16, "overhead": 1, "page": 1},
        {"q_dtype": FN, "kv_dtype": FN, "overhead": 1, "page": 64},
        {"q_dtype": BF16, "kv_dtype": FNUZ, "max_split_per_batch": 2, "overhead": 1},
        {"num_heads": 8, "q_dtype": FP16, "kv_dtype": FP16, "ctas": 1},
    ],
)
def test_equal_to_softmax_attention(query_lens, seq_lens, options):
    given = arguments(query_lens, seq_lens, **options)
    if (ctas := options.get("ctas")) is not None:
        assert (given["plan"].reduce_indptr[-1] > 0) == (ctas > 1), "one CTA splits nothing"
    expected, expected_lse = definition(given, query_lens, seq_lens)
    exact = torch.empty(expected.shape)
    for out, tolerance in ((None, 4e-3), (exact, 1e-6)):
        got, lse = persistent_mla_decode(**given, out=out, return_lse=True)
        assert got.dtype == (FP32 if out is not None else FP16 if got.dtype == FP16 else BF16)
        assert distance(got, expected) <= tolerance
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        assert not got[expected_lse.isneginf()].any(), "rows that see no key are zero"


BAD = [
    ({"q": torch.zeros(3, 20, 80).to(BF16)}, "refreshed for 2 query rows in 2 sequences.*, got 3"),
    ({"q": torch.zeros(2, 16, 80).to(BF16)}, "q must be of 20 heads"),
    ({"q": torch.zeros(2, 20, 80)}, "q must be torch.bfloat16"),
    ({"q": torch.zeros(2, 80, 20).to(BF16).mT}, "q must be dense in its last"),
    ({"q": torch.zeros(2, 20, 40).to(BF16)}, "q must be 64 wide .the latent width of the plan"),
    ({"q": [[0.0]]}, "q must be a tensor, got"),
    ({"block_table": torch.zeros(2, 1).int()}, "block_table must be 2 blocks wide.*30 KV tokens"),
    ({"kv_cache": torch.zeros(4, 16, 64).to(BF16)}, r"kv_cache must be \[blocks, page_size, 80\]"),
    ({"kv_cache": torch.zeros(4, 16, 80)}, "kv_cache must be torch.bfloat16"),
    ({"block_table": torch.zeros(3, 2).int()}, "max_blocks.: the plan was refreshed for 2"),
    ({"block_table": torch.zeros(2, 2).long()}, "block_table must be int32"),
    ({"block_table": torch.zeros(2, 2).int().T}, "block_table must be dense"),
    ({"out": torch.zeros(2, 20, 80)}, "out must be"),
    ({"out": torch.zeros(2, 20, 64).to(FN)}, "out must be bf16, fp16 or fp32"),
    ({"block_table": torch.full((2, 2), 9).int()}, r"of blocks 0 to 5 of kv_cache, got \[9\]"),
    ({"block_table": torch.full((2, 2), -1).int()}, r"of blocks 0 to 5 of kv_cache, got \[-1\]"),
    ({"kv_cache": torch.zeros(4, 0, 80).to(BF16)}, "kv_cache must be .* page_size 1 or more"),
    ({"softmax_scale": float("nan")}, "softmax_scale must be a finite number"),
    ({"softmax_scale": "1"}, "softmax_scale must be a finite number, got '1'"),
    ({"q_scale": 1.0}, "q_scale must be a tensor of one fp32 element.*, got 1.0"),
    ({"plan": "x"}, "plan must be a PersistentDecodePlan, got 'x'"),
    ({"epilogue": "x"}, "epilogue must be an Epilogue, got 'str'"),
    ({"provider": ["triton"]}, "provider must be a string"),
    ({"provider": "cuda"}, "unknown provider 'cuda'"),
    ({"provider": "aiter"}, 'planner="aiter" for aiter'),
]


FP8 = {"q_dtype": FN, "kv_dtype": FN}


@pytest.mark.parametrize(
    "change, message, types",
    [*((*each, {}) for each in BAD), ({"q_scale": None}, "q_scale must be a tensor of one fp", FP8),
     ({"kv_scale": 1.0}, "kv_scale must be a tensor of one fp32 element.*, got 1.0", FP8)],
)  # fmt: skip
def test_refused(change, message, types):
    with pytest.raises(ValueError, match=message):
        persistent_mla_decode(**{**arguments([1, 1], [20, 30], **types), **change})


@pytest.mark.parametrize("ctas", [1, 8])
def test_a_nan_stays_visible(ctas):
    """Of one head of a query, of one key, and of a key that only the last of three rows sees: where
    plain attention has it, and nowhere else."""
    given = arguments([1, 1, 1, 3], [30, 25, 0, 90], ctas=ctas)
    given["q"][0, 3, 5] = torch.nan
    given["kv_cache"][given["block_table"][1, 0], 2, 7] = torch.nan
    given["kv_cache"][given["block_table"][3, 5], 9, 7] = torch.nan  # token 89
    out, lse = persistent_mla_decode(**given, return_lse=True)
    nan = out.isnan()
    assert nan[0, 3].all() and lse[0, 3].isnan() and not nan[0, :3].any()
    assert nan[1].any(-1).all() and lse[1].isnan().all()
    assert out[2].eq(0).all() and lse[2].eq(-torch.inf).all()
    assert nan[3:].flatten(1).any(1).tolist() == lse[3:].isnan().all(1).tolist() == [0, 0, 1]


class NoOperation(TorchDispatchMode):
    """Refuses every operation on a tensor: inside a graph capture some are errors."""

    def __torch_dispatch__(self, func, *_):
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("dtype", [BF16, FN])
def test_validation_reads_nothing_from_the_device(monkeypatch, dtype):
    given = arguments([1, 2], [20, 30], q_dtype=dtype, kv_dtype=dtype)
    given["out"] = torch.empty(3, 20, 64, dtype=BF16)

    def printed(*_, **__):
        raise AssertionError("a tensor was printed")

    # Printing reads values past the mode above.
    monkeypatch.setattr(torch._tensor_str, "_str", printed)
    with NoOperation():
        validate(Inputs(**given, lse=None))


def test_refused_without_a_refresh():
    given = arguments([1], [20])
    given["plan"].step = None
    with pytest.raises(ValueError, match="never refreshed"):
        persistent_mla_decode(**given)
