"""Decode kernels, the planner's and that of page indices under the repaired interpreter, most by
the checks of `mla-fusion selftest`; test_interpreted.py runs this.
"""

import random

import pytest
import torch

from mla_fusion.attention import cards, persistent_mla_decode
from mla_fusion.attention.aiter import entries_kernel
from mla_fusion.attention.card import Shape
from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.buffers import PLANNED
from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.attention.sparse import sparse_mla_decode
from mla_fusion.cli.bench.read_kernel import WORDS, read_call
from mla_fusion.cli.selftest import decode, planner, sparse
from mla_fusion.cli.selftest.sparse import Variant
from mla_fusion.measure.distances import distance
from tests.aiter_double import metadata
from tests.attention.decodes import BF16, FN, FNUZ, FP16, SCALE, arguments, plan_for
from tests.attention.packed_cases import Inputs, random_case
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()

DAILY = [
    Shape(8, 1, 16, 64, 16, gap=3, batch=4), Shape(128, 1, 32, 64, 16, batch=2),
    Shape(8, 4, 16, 64, 16, batch=4), Shape(24, 2, 32, 64, 16, FN, FN, batch=2),
    Shape(16, 1, 64, batch=1), Shape(16, 1, 64, 64, 16, kv=FN, batch=2),
    Shape(16, 2, 128, 80, 48, FN, FN, batch=2),
]  # fmt: skip
SHAPES = [
    *DAILY, Shape(16, 1, 1, 64, 16, FP16, FP16, batch=3), Shape(16, 8, 64, 64, 16, batch=2),
    Shape(16, 1, 16, 64, 16, FNUZ, FNUZ, batch=1), Shape(16, 1, 16, 64, 16, FP16, FN, batch=1),
    *(Shape(16, 2, 32, *widths, dtype, dtype, gap=3, batch=2)
      for dtype, *widths in ((BF16, 256, 64), (BF16, 320, 64), (FN, 256, 64), (FN, 256, 32),
                             (BF16, 640, 96), (BF16, 512, 128), (BF16, 1024, 128))),
]  # fmt: skip


@pytest.mark.parametrize("shape", daily(SHAPES, *DAILY))
def test_dense(shape):
    found = [*decode.check(cards.PORTABLE, [shape], "cpu", 70, repeats=0)]
    assert all(each.right for each in found), found


@pytest.mark.parametrize("ctas", [1, 8])
def test_the_lse_is_nan_where_the_output_is(ctas):
    """By a key that only the last of three rows sees, and by one head of a query. The docstring
    leaves the output of the other two rows open."""
    given = arguments([3, 1], [90, 90], ctas=ctas, num_heads=8)
    given["kv_cache"][given["block_table"][0, 5], 9, 7] = torch.nan  # token 89
    given["q"][3, 2, 5] = torch.nan
    out, lse = persistent_mla_decode(**given, return_lse=True, provider="triton")
    assert out[2].isnan().all() and lse[:3].isnan().all(1).tolist() == [0, 0, 1]
    assert lse[3].isnan().tolist() == out[3].isnan().all(1).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("quantization", daily(["none", "tensor", "group", "group_ue8m0"], "group"))
def test_epilogue(quantization):
    shape = Shape(8, 1, 16, 64, 16, values=128, batch=2, quantization=quantization)
    found = [*decode.check(None, [shape], "cpu", 40, repeats=0)]
    assert all(each.right for each in found), found


VARIANTS = [
    Variant(16, (20, 70), latent=64, tokens=5),
    Variant(24, (20, 70), None, FN, FN, latent=64, tokens=5),
    Variant(8, (1,), latent=64, tokens=5, sink=False),
    Variant(8, (300,), latent=64, tokens=4),
    Variant(8, (70,), FP8_DS_MLA, kv=FN, tokens=3),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_sparse(variant):
    found = [*sparse.check([variant], "cpu", steps=1)]
    assert all(each.right for each in found), found


RNG = random.Random(0)
PLANNERS = [
    (7, 128, 12, 16, 4), (9, 8, 5, 1, 1), (6, 32, 12, 64, 16), (1, 16, 7, 16, 2),
    # Any that `Settings` takes, up to its bounds.
    *(tuple(map(RNG.choice, ((1, 9), (8, 24, 128), (1, 3, 40), (1, 7, 2**16), (1, 100, 1024))))
      for _ in range(4)),
]  # fmt: skip


@pytest.mark.parametrize("shape", PLANNERS)
def test_plans(shape):
    found = [*planner.check([shape], "cpu", plans=6)]
    assert all(each.right for each in found), found


def test_the_kernel_cuts_only_what_the_specification_cuts():
    """Whole tiles where they are within the budget, and no single blocks of a long sequence: with
    random lengths neither rule decides."""
    cases = [
        (8, [1100] * 7 + [1600], 8, False), (7, [1100] * 7 + [1300], 8, True),
        (8, [1100] * 7 + [1700], 8, True), (60, [64 * 32], 8, True), (60, [64 * 33], 8, True),
        (16, [1100, 1300], 128, False),  # eight tiles each
        # Small shares.
        (12, [1024] * 6, 8, True), (12, [2256, 2394, 741, 376], 8, True),
        (4, [108, 423, 1038, 638], 8, True), (7, [1000, 2200, 100], 32, True),
    ]  # fmt: skip
    for ctas, lengths, num_heads, is_cut in cases:
        want, got = (
            plan_for(max_batch=9, max_query_len=1, num_heads=num_heads, heads_per_work=16,
                     ctas=ctas, kv_granularity=64, overhead=4, v_head_dim=8)
            for _ in range(2)
        )  # fmt: skip
        indptr = torch.arange(len(lengths) + 1, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        want.refresh(qo_indptr=indptr, seq_lens=seq_lens, num_tokens=len(lengths), max_query_len=1)
        planner_triton.fill(got, indptr, seq_lens, 1)
        assert (want.reduce_indptr[-1] > 0) == is_cut, (ctas, lengths)
        for name in PLANNED:
            assert torch.equal(getattr(want, name), getattr(got, name)), (name, ctas, lengths)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 412), marks=pytest.mark.nightly)], ids=len
)
def test_random_byte_caches(seeds):
    for seed in seeds:
        case = random_case(seed)
        print(f"case {seed}: {case}")  # shown where it fails
        inputs = Inputs(case)
        out = torch.full((case.tokens, case.heads, 512), torch.nan, dtype=BF16)
        _, lse = sparse_mla_decode(
            inputs.q, inputs.scopes, inputs.scratch(), softmax_scale=SCALE, sink=inputs.sink,
            out=out, return_lse=True,
        )  # fmt: skip
        assert distance(out, inputs.expected()[0]) <= 1e-2
        inputs.check(out, lse, 4e-3, BF16)


def test_page_indices_are_those_of_torch(monkeypatch):
    """And nothing else is written; bounds and races are checked."""
    monkeypatch.setattr(entries_kernel, "BLOCK", 32)
    monkeypatch.setattr(entries_kernel, "CTAS", 2)
    rng = random.Random(0)
    for number in range(20):
        page, batch = rng.choice((1, 16, 24, 64)), rng.randint(1, 5)
        lengths = [rng.choice((0, 1, rng.randint(0, 300), 64)) for _ in range(batch)]
        columns = max(1, -(-max(lengths) // page))
        wide = torch.randint(0, 999, (batch, columns + 3), dtype=torch.int32)
        table = wide[:, :columns]  # its rows are strided, as in vLLM
        kv_indptr = torch.tensor([0, *lengths]).cumsum(0).int()
        want = torch.full((sum(lengths) + 7,), -5, dtype=torch.int32)
        got = want.clone()
        metadata.entries(want, kv_indptr, table, page)
        entries_kernel.write_entries(got, kv_indptr, table, page)
        assert torch.equal(want, got), (number, page, lengths)


def test_no_page_index_is_written_behind_the_buffer():
    """Sequences longer than the plan was allocated for break a promise, not other memory."""
    found = torch.zeros(40, dtype=torch.int32)
    kv_indptr = torch.tensor([0, 30, 60], dtype=torch.int32)
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    entries_kernel.write_entries(found, kv_indptr, table, 8)
    assert found[29] == 4 * 8 + 5 and found[39] == 6 * 8 + 1


def test_the_read_of_the_benchmark_reads_every_word_of_its_cache():
    caches = [torch.randint(-128, 128, (3, 64, 576), dtype=torch.int8).view(FN) for _ in range(2)]
    call, sums = read_call(caches)
    call(1)
    parts = caches[1].view(torch.int32).flatten().split(WORDS)
    assert sums.tolist() == [int(part.sum(dtype=torch.int32)) for part in parts] and len(parts) > 1
