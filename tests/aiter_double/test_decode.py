"""The double's planner and decode: right where they answer, and strict where AITER is not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import aiter_double
from tests.aiter_double import RELEASES, Aborted, SilentlyWrong, calls, heads
from tests.aiter_double.decode_rules import DECODE_RULES, PLAN_RULES

if TYPE_CHECKING:
    pass


FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BF16 = torch.bfloat16


def dense(a: dict[str, Any]) -> torch.Tensor:
    """Causal attention of every query to its sequence in float64, apart from the double."""
    fp8 = a["q"].dtype != BF16
    q = a["q"].double() * (a["q_scale"].double() if fp8 else 1)
    keys = a["kv_buffer"].flatten(0, 2).double()
    keys = keys * (a["kv_scale"].double() if a["kv_buffer"].dtype != BF16 else 1)
    out = torch.empty(a["o"].shape, dtype=torch.float64)
    n = a["max_seqlen_q"]
    for b in range(len(a["kv_indptr"]) - 1):
        first, end = a["kv_indptr"][b : b + 2].tolist()
        own = keys[a["kv_indices"][first:end].long()]
        for i in range(n):
            seen = own[: end - first - (n - 1 - i)]
            weights = torch.softmax(q[b * n + i] @ seen.T * a["sm_scale"], dim=-1)
            out[b * n + i] = weights @ seen[:, : calls.L]
    return out


# architecture, heads, query length, query, cache
SHAPES = [
    ("gfx942", 16, 1, BF16, BF16),
    ("gfx942", 16, 4, BF16, BF16),
    ("gfx942", 128, 1, FNUZ, FNUZ),
    ("gfx942", 64, 1, BF16, BF16),  # folded to 16
    ("gfx942", 64, 2, FNUZ, FNUZ),  # folded to 16
    ("gfx942", 16, 1, BF16, FNUZ),
    ("gfx950", 16, 1, BF16, BF16),
    ("gfx950", 64, 3, BF16, BF16),
    ("gfx950", 32, 4, FN, FN),
    ("gfx950", 48, 1, FN, FN),  # folded to 16
]


@pytest.mark.parametrize("arch, count, qlen, query, cache", SHAPES)
def test_equal_to_dense_attention(
    arch: str, count: int, qlen: int, query: torch.dtype, cache: torch.dtype
) -> None:
    with aiter_double.installed(arch) as double:
        a = calls.decode(double.modules["aiter"], count, (70, 5, 400), qlen, query, cache)["decode"]
        double.modules["aiter.mla"].mla_decode_fwd(**a)
        split = a["work_info_set"][: int(a["work_indptr"][-1]), 1]
    torch.testing.assert_close(a["o"].double(), dense(a), rtol=2**-8, atol=1e-6)
    assert (split >= 0).any(), "no sequence was split, and the merge was not tried"
    assert (split < 0).any()


def test_the_plan_is_not_used_for_a_batch_of_32_on_gfx950() -> None:
    """The gate of v0.1.18; the answer is the same."""
    with aiter_double.installed("gfx950") as double:
        a = calls.decode(double.modules["aiter"], 16, (9,) * 32)["decode"]
        a["work_info_set"].fill_(-7)
        double.modules["aiter.mla"].mla_decode_fwd(**a)
        with pytest.raises(SilentlyWrong, match="stale"):
            double.modules["aiter.mla"].mla_decode_fwd(**{**a, "num_kv_splits": 256})
    torch.testing.assert_close(a["o"].double(), dense(a), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("release", ["v0.1.10.post2", "v0.1.20"])
@pytest.mark.parametrize("rule", DECODE_RULES)
def test_a_decode_that_breaks_a_rule(rule: str, release: str) -> None:
    change, words = DECODE_RULES[rule]
    with aiter_double.installed("gfx942", release) as double:
        aiter = double.modules["aiter"]
        a = calls.decode(aiter, query=FNUZ, cache=FNUZ)["decode"]
        decode = sys.modules["aiter.mla"].mla_decode_fwd
        decode(**a)
        fault: type[BaseException] = SilentlyWrong
        if words.startswith("!"):
            fault = Aborted if double.release.aborts else RuntimeError
        with pytest.raises(fault, match=words.removeprefix("!")):
            decode(**{**a, **change(a)})


@pytest.mark.parametrize("rule", PLAN_RULES)
def test_a_plan_that_breaks_a_rule(rule: str) -> None:
    change, words = PLAN_RULES[rule]
    with aiter_double.installed("gfx942") as double:
        aiter = double.modules["aiter"]
        a = calls.decode(aiter)["plan"]
        fault = Aborted if words.startswith("!") else SilentlyWrong
        with pytest.raises(fault, match=words.removeprefix("!")):
            aiter.get_mla_metadata_v1(**{**a, **change(a)})


def test_sizes_want_a_multiple_of_8_or_16_heads() -> None:
    for release, good, bad in (("v0.1.10.post2", 16, 8), ("v0.1.16", 8, 12)):
        with aiter_double.installed("gfx942", release) as double:
            info = double.modules["aiter"].get_mla_metadata_info_v1
            info(4, 1, good, BF16, BF16, False)
            with pytest.raises(AssertionError, match="multiple"):
                info(4, 1, bad, BF16, BF16, False)


def test_the_plan_keeps_the_bounds_of_its_buffers() -> None:
    generator = torch.Generator().manual_seed(3)
    with aiter_double.installed("gfx950") as double:
        for batch in (1, 2, 7, 85, 300):
            lengths = torch.randint(1, 120, (batch,), generator=generator).tolist()
            a = calls.decode(double.modules["aiter"], 16, tuple(lengths))["decode"]
            works = int(a["work_indptr"][-1])
            assert works <= a["work_info_set"].shape[0]
            assert int(a["reduce_indptr"][-1]) <= a["reduce_partial_map"].shape[0]
            assert (a["work_indptr"].diff() >= 0).all()


def test_reduce_merges_pieces_by_their_sums() -> None:
    with aiter_double.installed() as double:
        out, pieces = torch.empty((1, 2, 4), dtype=BF16), torch.randn(3, 2, 4)
        sums = torch.randn(3, 2)
        maps = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [[0, 1]], [0, 1, 2])]
        double.modules["aiter"].mla_reduce_v1(pieces, sums, *maps, 1, 0, out)
    weights = sums.softmax(0).unsqueeze(-1)
    torch.testing.assert_close(out[0].float(), (weights * pieces).sum(0), rtol=2**-8, atol=1e-3)


# argument -> the op, and the first release of the double that takes it
ADDED = {
    "compute_all_q_rope": ("fused_qk_rope_concat_and_cache_mla", "v0.1.19.post1"),
    "max_split_per_batch": ("get_mla_metadata_info_v1", "v0.1.16"),
    "is_cp_round_robin": ("get_mla_metadata_v1", "v0.1.18"),
    "dtype_q_nope": ("get_mla_metadata_v1", "v0.1.18"),
    "dtype_q": ("get_mla_metadata_v1", "v0.1.10.post2"),
    "g_kv_indptr": ("mla_decode_fwd", "v0.1.18"),
    "causal": ("mla_decode_fwd", "v0.1.20"),
    "num_kv_splits": ("mla_reduce_v1", "v0.1.16"),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("argument", ADDED)
def test_an_argument_is_there_from_its_release_on(argument: str, release: str) -> None:
    name, since = ADDED[argument]
    order = list(RELEASES)
    with aiter_double.installed("gfx942", release) as double:
        taken = argument in double.signatures[name].parameters
    assert taken == (order.index(release) >= order.index(since))


def test_an_argument_that_a_release_does_not_take_is_a_type_error() -> None:
    with aiter_double.installed("gfx942", "v0.1.18") as double:
        a = calls.decode(double.modules["aiter"])["decode"]
        with pytest.raises(TypeError, match="causal"):
            double.modules["aiter.mla"].mla_decode_fwd(**a, causal=True)


def test_kernels_without_a_plan() -> None:
    with aiter_double.installed("gfx942") as double:
        heads.check_plain(double.arch, double.release, 16, 4, "bf16")
        with pytest.raises(Aborted):
            heads.check_plain(double.arch, double.release, 64, 1, "fp8")
