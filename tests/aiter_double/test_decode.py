"""The double's planner and decode: right where they answer, and strict where AITER is not."""

import itertools

import pytest
import torch

from tests import aiter_double
from tests.aiter_double import RELEASES, SilentlyWrong, calls, uses
from tests.aiter_double.versions import DECODE, FUSED, INFO, PLANNER, REDUCE

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
BF16 = torch.bfloat16


def expected(a):
    """Attention of every query to its sequence, apart from the double."""
    q = a["q"].double() * (1 if a["q"].dtype == BF16 else a["q_scale"].double())
    wide = 1 if a["kv_buffer"].dtype == BF16 else a["kv_scale"].double()
    cache = a["kv_buffer"].flatten(0, 2).double() * wide
    ends = itertools.pairwise(a["kv_indptr"].tolist())
    keys = [cache[a["kv_indices"][first:end].long()] for first, end in ends]
    return uses.causal_attention(q, keys, a["qo_indptr"].tolist(), a["sm_scale"])


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
def test_equal_to_dense_attention(arch, count, qlen, query, cache):
    with aiter_double.installed(arch) as double:
        a = calls.decode(double.modules["aiter"], count, (70, 5, 400), qlen, query, cache)["decode"]
        double.ops[DECODE](**a)
        split = a["work_info_set"][: int(a["work_indptr"][-1]), 1]
    torch.testing.assert_close(a["o"].double(), expected(a), rtol=2**-8, atol=1e-6)
    assert (split >= 0).any(), "no sequence was split, and the merge was not tried"
    assert (split < 0).any()


def test_the_plan_is_not_used_for_a_batch_of_32_on_gfx950():
    """The gate of v0.1.18; the answer is the same."""
    with aiter_double.installed("gfx950") as double:
        a = calls.decode(double.modules["aiter"], 16, (9,) * 32)["decode"]
        a["work_info_set"].fill_(-7)
        double.ops[DECODE](**a)
        with pytest.raises(SilentlyWrong, match="stale"):
            double.ops[DECODE](**{**a, "num_kv_splits": 256})
    torch.testing.assert_close(a["o"].double(), expected(a), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("release, taken", [("v0.1.10.post2", {16}), ("v0.1.16", {16, 8})])
def test_sizes_take_multiples_of_8_heads_from_one_release_on(release, taken):
    with aiter_double.installed("gfx942", release) as double:
        for count in taken:
            double.ops[INFO](4, 1, count, BF16, BF16, False)
        for count in {16, 8, 12} - taken:
            with pytest.raises(AssertionError, match="must be a multiple"):
                double.ops[INFO](4, 1, count, BF16, BF16, False)


def test_the_plan_keeps_the_bounds_of_its_buffers():
    generator = torch.Generator().manual_seed(3)
    with aiter_double.installed("gfx950") as double:
        for batch in (1, 2, 7, 85, 300):
            lengths = torch.randint(1, 120, (batch,), generator=generator).tolist()
            a = calls.decode(double.modules["aiter"], 16, tuple(lengths))["decode"]
            assert int(a["work_indptr"][-1]) <= a["work_info_set"].shape[0]
            assert int(a["reduce_indptr"][-1]) <= a["reduce_partial_map"].shape[0]
            assert (a["work_indptr"].diff() >= 0).all()


@pytest.mark.parametrize("release", RELEASES)
def test_reduce_merges_pieces_by_their_sums(release):
    with aiter_double.installed("gfx942", release) as double:
        a = calls.reduce(double.arch.fp8)
        if not double.at.has("reduce_splits"):
            del a["num_kv_splits"]
        double.ops[REDUCE](**a)
    sums = a["partial_lse"].view(3, 16, 1)
    merged = (sums.softmax(0) * a["partial_output"].view(3, 16, -1)).sum(0)
    torch.testing.assert_close(a["final_output"][0].float(), merged, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(a["final_lse"][0], sums.logsumexp(0)[:, 0])
    assert not a["final_output"][1].any(), "a tile of one piece was not split"


def test_reduce_takes_even_tiles_without_a_map():
    with_map, without = calls.reduce(FNUZ), calls.reduce(FNUZ) | {"reduce_final_map": None}
    with aiter_double.installed() as double:
        for a in (with_map, without):
            double.ops[REDUCE](**a)
    assert torch.equal(with_map["final_output"], without["final_output"])


def test_a_row_without_a_key_is_nan():
    """With a log-sum-exp of +inf, from the reduction and from the decode."""
    with aiter_double.installed() as double:
        a = calls.reduce(FNUZ)
        a["partial_lse"].fill_(-torch.inf)
        double.ops[REDUCE](**a)
        assert a["final_output"][0].isnan().all() and a["final_lse"][0].isposinf().all()
    with aiter_double.installed("gfx950") as double:
        b = calls.decode(double.modules["aiter"], 16, (70, 1, 200), 2)["decode"]
        _, lse = double.ops[DECODE](**b, return_lse=True)
    assert b["o"][2].isnan().all() and lse[2].isposinf().all()
    assert b["o"][[0, 1, 3, 4, 5]].isfinite().all() and lse[[0, 1, 3, 4, 5]].isfinite().all()


# argument -> the op, and the first release of the double that takes it
ADDED = {
    "compute_all_q_rope": (FUSED, "v0.1.19.post1"),
    "max_split_per_batch": (INFO, "v0.1.16"),
    "is_cp_round_robin": (PLANNER, "v0.1.18"),
    "dtype_q_nope": (PLANNER, "v0.1.18"),
    "dtype_q": (PLANNER, "v0.1.10.post2"),
    "g_kv_indptr": (DECODE, "v0.1.18"),
    "causal": (DECODE, "v0.1.20"),
    "num_kv_splits": (REDUCE, "v0.1.16"),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("argument", ADDED)
def test_an_argument_is_there_from_its_release_on(argument, release):
    name, since = ADDED[argument]
    with aiter_double.installed("gfx942", release) as double:
        taken = argument in double.signatures[name].parameters
    assert taken == (RELEASES.index(release) >= RELEASES.index(since))


def test_an_argument_that_a_release_does_not_take_is_a_type_error():
    with aiter_double.installed("gfx942", "v0.1.18") as double:
        a = calls.decode(double.modules["aiter"])["decode"]
        with pytest.raises(TypeError, match="causal"):
            double.ops[DECODE](**a, causal=True)
