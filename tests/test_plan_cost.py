"""`benchmarks/plan_cost.py`: costs come back from times that were made of them."""

import csv
import sys

import numpy as np
import plan_cost
import pytest

COSTS = np.array([2.0, 7.0, 1.5, 0.03, 0.05])
SHAPES = [(b, n, r) for b in (1, 4, 16, 64) for n in (1024, 8192) for r in (0, 1) if b > 4 or not r]
COLUMNS = ("batch", "context", "ragged", "heads", "queries", "dtype", "candidate", "p50_us")


@pytest.fixture
def rows(tmp_path):
    """A file of times by COSTS, and others that do not count."""
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for batch, context, ragged in SHAPES:
            case = plan_cost.Case(batch, context, 64, None, bool(ragged))
            plan = plan_cost.loads(case, plan_cost.OVERHEAD, 132, None)
            us = plan_cost.predict(plan, COSTS)
            writer.writerow((batch, context, ragged, 64, 1, "fp8", "ours", us))
            writer.writerow((batch, context, ragged, 64, 1, "fp8", "flashmla", 1))
            writer.writerow((batch, context, ragged, 64, 2, "fp8", "ours", 1))
    return path


def test_the_costs_come_back(rows):
    cases = plan_cost.read(rows, 64, "fp8")
    assert len(cases) == len(SHAPES)
    timed = [(plan_cost.loads(case, plan_cost.OVERHEAD, 132, None), us) for case, us in cases]
    assert np.allclose(plan_cost.fit(timed), COSTS, rtol=1e-2)


def test_loads_are_those_of_the_plan():
    """Three sequences of two tiles: one for each of three workers, all for one. One and two of 16
    tiles for eight workers are cut, the two into as many pieces each."""
    case = plan_cost.Case(3, 128, 64, None)
    three = plan_cost.loads(case, 4, 3, None)
    assert (three.items.tolist(), three.tiles.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert (three.deepest, three.pieces) == (0, 0)
    one = plan_cost.loads(case, 4, 1, None)
    assert (one.items.tolist(), one.tiles.tolist()) == ([3], [6])
    split = plan_cost.loads(plan_cost.Case(1, 1024, 64, None), 4, 8, None)
    assert split.tiles.sum() == 16 and split.deepest == split.pieces > 1
    both = plan_cost.loads(plan_cost.Case(2, 1024, 64, None), 4, 8, None)
    assert both.tiles.sum() == 32 and 2 * both.deepest == both.pieces > 2


def test_the_busiest_worker_counts():
    """Whose items and tiles cost most, not who has most of either."""
    plan = plan_cost.Loads(np.array([1, 2, 3]), np.array([9, 8, 1]), 4, 5)
    assert plan.terms(COSTS) == [1, 2, 8, 4, 5]


def test_it_predicts_and_says_what_is_missing(rows, monkeypatch, capsys):
    command = ["plan_cost.py", "--rows", str(rows), "--dtype", "fp8", "--overheads", "4", "8"]
    monkeypatch.setattr(sys, "argv", [*command, "--heads", "64"])
    plan_cost.main()
    printed = capsys.readouterr().out
    assert "an item is 4.7 tiles; off by 0." in printed
    assert "overhead 4: 1.000 of the time of 4 in the mean, 1.000 at" in printed
    monkeypatch.setattr(sys, "argv", [*command, "--heads", "16"])
    with pytest.raises(SystemExit):
        plan_cost.main()
    assert "has 0 times of 16 heads in fp8; 5 costs need more" in capsys.readouterr().err
