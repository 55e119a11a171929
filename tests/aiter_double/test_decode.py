"""The double's planner and decode: right where they answer, and strict where AITER is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import aiter_double
from tests.aiter_double import RELEASES, SilentlyWrong, calls

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


def test_sizes_take_multiples_of_8_heads_from_one_release_on() -> None:
    for release, taken in (("v0.1.10.post2", (16,)), ("v0.1.16", (16, 8))):
        with aiter_double.installed("gfx942", release) as double:
            info = double.modules["aiter"].get_mla_metadata_info_v1
            for count in (16, 8, 12):
                if count in taken:
                    info(4, 1, count, BF16, BF16, False)
                else:
                    with pytest.raises(AssertionError, match="must be a multiple"):
                        info(4, 1, count, BF16, BF16, False)


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


@pytest.mark.parametrize("release", RELEASES)
def test_reduce_merges_pieces_by_their_sums(release: str) -> None:
    with aiter_double.installed("gfx942", release) as double:
        a = calls.reduce(double.arch.fp8)
        if not double.release.reduce_splits:
            del a["num_kv_splits"]
        double.ops["mla_reduce_v1"](**a)
    sums = a["partial_lse"].view(3, 16, 1)
    merged = (sums.softmax(0) * a["partial_output"].view(3, 16, -1)).sum(0)
    torch.testing.assert_close(a["final_output"][0].float(), merged, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(a["final_lse"][0], sums.logsumexp(0)[:, 0])
    assert not a["final_output"][1].any(), "a tile of one piece was not split"


def test_reduce_takes_even_tiles_without_a_map() -> None:
    with aiter_double.installed() as double:
        with_map, without = calls.reduce(FNUZ), calls.reduce(FNUZ) | {"reduce_final_map": None}
        for a in (with_map, without):
            double.ops["mla_reduce_v1"](**a)
    assert torch.equal(with_map["final_output"], without["final_output"])


def test_a_row_without_a_key_is_rubbish() -> None:
    """NaN, and a sum of +inf, from both."""
    with aiter_double.installed() as double:
        a = calls.reduce(FNUZ)
        a["partial_lse"].fill_(-torch.inf)
        double.ops["mla_reduce_v1"](**a)
        assert a["final_output"][0].isnan().all() and a["final_lse"][0].isposinf().all()
    with aiter_double.installed("gfx950") as double:
        b = calls.decode(double.modules["aiter"], 16, (70, 1, 200), 2)["decode"]
        _, lse = double.ops["mla_decode_fwd"](**b, return_lse=True)
    assert b["o"][2].isnan().all() and lse[2].isposinf().all()
    assert b["o"][[0, 1, 3, 4, 5]].isfinite().all() and lse[[0, 1, 3, 4, 5]].isfinite().all()


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
