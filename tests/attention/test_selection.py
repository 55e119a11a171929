"""Whether AITER's persistent kernel is supported, and faster: each "no" with its reason."""

import pytest
import torch

from mla_fusion.attention.aiter import selection

BF16, FN, FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz

VERDICTS = [
    # heads, query length, query, cache, architecture, part of the reason
    (16, 1, BF16, BF16, "", "kernels for gfx942 and gfx950"),
    (16, 1, FN, FN, "gfx942", "computes in torch.float8_e4m3fnuz"),
    (144, 1, BF16, BF16, "gfx942", "more than the 128"),
    (128, 1, FNUZ, FNUZ, "gfx942", "faults on gfx942"),
    (16, 5, BF16, BF16, "gfx942", "no persistent bf16 kernel for 16 heads and queries of 5"),
    (16, 3, FNUZ, FNUZ, "gfx942", ""),  # by the kernel for 4
    (16, 5, FNUZ, FNUZ, "gfx942", "queries of 5"),
    (64, 2, FNUZ, FNUZ, "gfx942", ""),  # folded to 16 heads
    (16, 1, BF16, FN, "gfx950", "no persistent bf16 over fp8 kernel"),
]


@pytest.mark.parametrize("heads, length, q, kv, arch, reason", VERDICTS)
def test_verdicts(heads, length, q, kv, arch, reason):
    why = selection.aiter_verdict(heads, length, q, kv, arch).unsupported
    assert reason in why and bool(reason) == bool(why)


def test_a_verdict_can_change_with_the_log_sum_exp():
    given = (16, 1, BF16, BF16, "gfx942")
    assert not selection.aiter_verdict(*given).unsupported
    assert "no log-sum-exp" in selection.aiter_verdict(*given, return_lse=True).unsupported
    for heads, length, none in ((64, 1, False), (64, 2, True), (128, 1, True), (16, 4, False)):
        verdict = selection.aiter_verdict(heads, length, BF16, BF16, "gfx950", return_lse=True)
        assert ("no log-sum-exp" in verdict.unsupported) == none


@pytest.mark.parametrize("arch, fp8", selection.FP8_OF.items())
@pytest.mark.parametrize("heads", [8, 12, 16, 20, 40, 64, 128])
def test_a_step_with_drafts_has_a_kernel_of_its_own_or_the_next_length(heads, arch, fp8):
    for length in (1, 2, 3, 4):
        for dtype, exact in ((BF16, True), (fp8, length != 3)):
            verdict = selection.aiter_verdict(heads, length, dtype, dtype, arch)
            if (arch, heads, dtype) == ("gfx942", 128, fp8):
                assert "faults on gfx942" in verdict.unsupported and not verdict.query_len
            elif (arch, verdict.layout.per_work, dtype) == ("gfx950", 32, fp8):
                assert verdict.query_len == (1 if length == 1 else 4)
            else:
                assert verdict.query_len == (length if exact else 4)
