"""Decode kernels and the planner's kernel under the repaired interpreter, by the checks of
`mla-fusion selftest`, which need no GPU but for their graphs; test_interpreted.py runs this.
"""

import pytest
import torch

from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.buffers import PLANNED
from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.cli.selftest import decode, planner, sparse
from mla_fusion.cli.selftest.decode import Shape
from mla_fusion.cli.selftest.sparse import Variant
from tests.attention.decodes import BF16, FN, FNUZ, FP16, plan_for
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
    found = [*decode.check("triton.decode_kernel", [shape], "cpu", 70, repeats=0)]
    assert all(each.right for each in found), found


@pytest.mark.parametrize("quantization", daily(["none", "tensor", "group", "group_ue8m0"], "group"))
def test_epilogue(quantization):
    shape = Shape(8, 1, 16, 64, 16, values=128, batch=2, quantization=quantization)
    found = [*decode.check("", [shape], "cpu", 40, repeats=0)]
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


PLANNERS = [(7, 128, 12, 16, 4), (9, 8, 5, 1, 1), (6, 32, 12, 64, 16), (1, 16, 7, 16, 2)]


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
