"""Which product has a kernel of ours."""

import dataclasses
import functools
import json

import pytest
import torch

from mla_fusion import projections
from mla_fusion.ops import Product
from mla_fusion.projections import measured, reference, shapes
from mla_fusion.projections.plans import PLANS, Plan
from tests.gpus import imitate

BF16 = torch.bfloat16
ROW, PAIR = Product(2048, (1024,)), Product(2048, (1024, 512))
TIMES = {1: (4.0, 6.0), 4: (5.0, 6.0), 16: (6.0, 6.2)}  # ours, cuBLAS
PLAN_OF = {1: (8, 4), 4: (16, 4), 16: (8, 8)}
WHERE = torch.device("cuda:0")


@pytest.fixture
def plan_for(monkeypatch, tmp_path):
    """plan_for(of, tokens) on a GPU for which a table was written."""
    rows = [
        {"tokens": n, "plan": ["matrix", *PLAN_OF[n]], "ours": [0, ours, 9], "torch": [0, of, 9]}
        for n, (ours, of) in TIMES.items()
    ]
    shapes = [{"k": of.k, "sizes": of.sizes, "rows": rows} for of in (ROW, PAIR)]
    (tmp_path / "a.json").write_text(json.dumps({"gpu": "Imagined", "shapes": shapes}))
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    imitate(monkeypatch, "sm_90", name="Imagined")
    caches = measured.shipped, measured.chosen
    [cache.cache_clear() for cache in caches]
    yield functools.partial(projections.plan_for, WHERE)
    [cache.cache_clear() for cache in caches]


def test_the_next_larger_measured_number_of_tokens_decides(plan_for):
    chosen = {tokens: plan_for(ROW, tokens) for tokens in range(1, 18)}
    assert chosen[1] == Plan("matrix", 8, 4)
    assert {chosen[n] for n in (2, 3, 4)} == {Plan("matrix", 16, 4)}
    assert {chosen[n] for n in range(5, 18)} == {None}  # 3 % faster at 16; nothing above


@pytest.mark.parametrize(
    "sizes, k, known",
    [((1024, 512), 2048, True), ((2000,), 1100, True), ((2100,), 2048, False),
     ((1024,), 900, False), ((900, 200), 2048, True)],
)  # fmt: skip
def test_a_shape_that_was_not_measured_goes_by_one_within_a_factor_of_two(
    plan_for, sizes, k, known
):
    assert (plan_for(Product(k, sizes), 1) is not None) == known


def test_what_was_not_measured_must_promise_more(plan_for, monkeypatch):
    assert plan_for(other := Product(2048, (1000,)), 4)
    measured.chosen.cache_clear()
    monkeypatch.setattr(measured, "ESTIMATED_GAIN", 1.21)
    assert plan_for(ROW, 4) and not plan_for(other, 4)


def test_nothing_is_known_of_another_gpu_or_type(plan_for, monkeypatch):
    assert plan_for(ROW, 1) and plan_for(dataclasses.replace(ROW, bits=32), 1) is None
    imitate(monkeypatch, "sm_90", name="Another")
    assert plan_for(ROW, 1) is None


def test_two_products_of_one_launch_are_not_named_apart(plan_for):
    found = [PAIR, ROW, Product(2048, (512,)), Product(2048, (4000,))]
    assert shapes.faster("Imagined", found) == {PAIR: 4}
    assert shapes.faster("Imagined", found[1:]) == {ROW: 4, Product(2048, (512,)): 4}


def test_shipped_rows():
    """Each is legal: its plan serves its tokens, and is one of those that are measured."""
    assert measured.shipped()
    for gpu in measured.shipped():
        for shape, rows in measured.shapes(gpu).items():
            assert [row.tokens for row in rows] == sorted({row.tokens for row in rows})
            for row in rows:
                assert row.plan in PLANS and row.plan.fits(shape.k, row.tokens, shape.bits)


def test_reference_against_float64():
    x, weight = torch.randn(3, 64).to(BF16), torch.randn(5, 64).to(BF16)
    [got], [want] = (f(x, [weight]) for f in (reference.project, reference.in_float64))
    torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.05)
    torch.testing.assert_close(want, x.double() @ weight.double().t())
