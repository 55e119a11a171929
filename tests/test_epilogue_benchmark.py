"""`benchmarks/epilogue.py` without its GPU: the rows, and the lines about them."""

import csv
import dataclasses
from types import SimpleNamespace

import epilogue as bench_epilogue
import pytest
import torch
from epilogue import WRONG, Case

from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.measure import records, timing

FACTS = dict.fromkeys(records.FACTS, "x")


@pytest.mark.parametrize(("step", "right"), [(1, True), (2, False)])
def test_rows_are_written_and_judged(monkeypatch, tmp_path, capsys, step, right):
    """Ours takes 2 us and vLLM's 3, but 1 in eight splits."""

    def measure(case, rounds):
        assert rounds == 5
        times = {"ours": 2.0, "vllm": 1.0 if case.pieces == 8 else 3.0}
        rows = [
            {**dataclasses.asdict(case), "place": place, "candidate": name,
             **dict.fromkeys(timing.TIMES, us), "worst_step": step if name == "ours" else 0}
            for place in ("back", "behind") for name, us in times.items()
        ]  # fmt: skip
        bench_epilogue.show(rows)
        return rows

    monkeypatch.setattr(bench_epilogue, "measure", measure)
    monkeypatch.setattr(records, "environment", lambda commit, program: FACTS)
    path = tmp_path / "rows.csv"
    sizes = ["--tokens", "1", "--heads", "16", "--splits", "1", "8", "--rounds", "5", "--csv"]
    assert bench_epilogue.main([*sizes, str(path)]) == (not right)
    printed = capsys.readouterr().out
    mark = "" if right else "!"
    assert f"T=1 H=16 S=8 none back: ours 2.00 (2.00-2.00){mark} | vllm 1.00" in printed
    assert "(1, 16, 8, 128, 'none', 'back'): ours 2.00, vllm 1.00" in printed
    assert "geometric mean 0.87, least 0.50" in printed
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24 and set(rows[0]) == {*records.FACTS, *bench_epilogue.RESULT}


LATENTS = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def one_layer(monkeypatch):
    """A step of two tokens whose latents are there, on a CPU; times are 2 us, the decode's 1."""
    plan = SimpleNamespace(reduce_indptr=torch.tensor([0, 3, 6]), fresh=True)
    w_uv = torch.randn(1, 16, 128).bfloat16()
    epilogue = Epilogue(w_uv, torch.empty(2, 128).to(bench_epilogue.FP8), torch.empty(2, 1))
    given = SimpleNamespace(plan=plan, epilogue=epilogue, out=LATENTS.clone())
    nothing = SimpleNamespace(decode=lambda _: None, merge=lambda _: None)
    monkeypatch.setattr(bench_epilogue, "make", lambda case: [given])
    monkeypatch.setattr(bench_epilogue, "provider", nothing)
    monkeypatch.setattr(bench_epilogue, "capture_calls", lambda call, count: call(0))

    def interleave(graphs, *_):
        return {n: dict.fromkeys(timing.TIMES, 1.0 if "alone" in n else 2.0) for n in graphs}

    monkeypatch.setattr(bench_epilogue, "interleave", interleave)
    return given


def finish(given):
    bench_epilogue.reference.finish(given.out, given.epilogue)


def then(change):
    """The reference, and then `change`."""

    def step(given):
        finish(given)
        change(given.epilogue)

    return step


def two_steps_off(epilogue):
    stored = epilogue.out.view(torch.uint8)
    stored += (epilogue.out.float().abs() < 400).byte() * 2


DIFFERENT = iter(range(100))
STEPS = {
    "right": (finish, 0),
    "two steps off": (then(two_steps_off), 2),
    "another result each time": (
        then(lambda epilogue: epilogue.out.view(torch.uint8).fill_(next(DIFFERENT))),
        WRONG,
    ),
    "scales off": (then(lambda epilogue: epilogue.scale.mul_(1.1)), WRONG),
    "no scales": (then(lambda epilogue: epilogue.scale.fill_(torch.nan)), WRONG),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_result_is_checked(monkeypatch, one_layer, name, capsys):
    step, wrong = STEPS[name]
    monkeypatch.setattr(bench_epilogue, "CANDIDATES", {"ours": step})
    rows = bench_epilogue.measure(Case(128, 1, 3, 128, "group"), 3)
    found = [(r["place"], r["p50_us"], r["pieces"]) for r in rows]
    assert found == [("back", 2, 3), ("behind", 1, 3)]
    assert {row["worst_step"] for row in rows} == {wrong}
    mark = "!" if wrong else ""
    assert f"behind: ours 1.00 (1.00-1.00){mark}\n" in capsys.readouterr().out
