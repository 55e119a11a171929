"""`mla-fusion bench epilogue` without its GPU: rows and what is said of them."""

import argparse
import csv
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.cli.bench import epilogue as bench_epilogue
from mla_fusion.cli.bench import kit
from mla_fusion.cli.bench.epilogue import WRONG, Case

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FACTS = dict.fromkeys(kit.FACTS, "x")


@pytest.mark.parametrize(("step", "right"), [(1, True), (2, False)])
def test_rows_are_written_and_judged(monkeypatch, tmp_path, capsys, step, right):
    """What is chosen takes 2 us and separate launches 3, but 1 in eight pieces."""

    def measure(case, found, rounds):
        assert rounds == 5
        chosen = bench_epilogue.name_of(case.chosen())
        times = {"separate": 1.0 if case.pieces == 8 else 3.0, chosen: 2.0}
        rows = [
            {**dataclasses.asdict(case), "place": place, "candidate": name,
             "chosen": int(name == chosen), **dict.fromkeys(kit.TIMES, times[name]),
             "worst_step": step if name == chosen else 0}
            for place in ("back", "behind") for name in found
        ]  # fmt: skip
        bench_epilogue.show(rows)
        return rows

    monkeypatch.setattr(bench_epilogue, "measure", measure)
    settings = argparse.Namespace(
        tokens=(1,), heads=(16,), splits=(1, 8), rounds=5, csv=tmp_path / "rows.csv"
    )
    assert bench_epilogue.run(settings, FACTS, None) == right
    printed = capsys.readouterr().out
    assert "T=1 H=16 S=8 none back: separate 1.00" in printed
    assert "(1, 16, 8, 128, 'none', 'back'): chosen 2.00, separate 1.00" in printed
    assert "geometric mean 0.87, least 0.50" in printed
    assert ("2.00 (2.00-2.00)!" in printed) == (not right)
    with settings.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and set(rows[0]) == {*kit.FACTS, *bench_epilogue.RESULT}


LATENTS = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def one_layer(monkeypatch):
    """A step of two tokens whose latents are there, on a CPU; times are 2 us, the decode's 1."""
    plan = SimpleNamespace(
        reduce_indptr=torch.tensor([0, 3, 6]), epilogue_counts=torch.zeros(2), fresh=True
    )
    w_uv = torch.randn(1, 16, 128).bfloat16()
    epilogue = Epilogue(w_uv, torch.empty(2, 128).to(bench_epilogue.FP8), torch.empty(2, 1))
    given = SimpleNamespace(plan=plan, epilogue=epilogue, out=LATENTS.clone())
    nothing = SimpleNamespace(decode=lambda _: None, merge=lambda _: None)
    monkeypatch.setattr(bench_epilogue, "make", lambda case: [given])
    monkeypatch.setattr(bench_epilogue, "provider", nothing)
    monkeypatch.setattr(bench_epilogue, "capture_calls", lambda call, count: call(0))

    def interleave(graphs, *_):
        return {n: dict.fromkeys(kit.TIMES, 1.0 if n == "alone" else 2.0) for n in graphs}

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
def test_every_result_is_checked(one_layer, name, capsys):
    step, wrong = STEPS[name]
    rows = bench_epilogue.measure(Case(128, 1, 3, 128, "group"), {"separate": step}, 3)
    found = [(r["place"], r["p50_us"], r["pieces"]) for r in rows]
    assert found == [("back", 2, 3), ("behind", 1, 3)]
    assert {row["worst_step"] for row in rows} == {wrong} and rows[0]["chosen"] == 1
    mark = "!" if wrong else ""
    assert f"behind: separate* 1.00 (1.00-1.00){mark}\n" in capsys.readouterr().out
    assert len(bench_epilogue.summary(rows)) == (2 if wrong else 0)


def test_what_is_chosen_for_one_and_two_tokens_was_measured_and_never_slower():
    """Within 2 %."""
    times: dict = {}
    for path in RESULTS.glob("epilogue*_h200.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                facts = int(row["tokens"]), int(row["heads"]), row["quantization"]
                found = times.setdefault(facts, {}).setdefault(row["candidate"], {})
                found[row["commit"], row["pieces"], row["place"]] = float(row["p50_us"])
    places = {(pieces, place) for pieces in ("0", "16", "128") for place in ("back", "behind")}
    for (tokens, heads, quantization), found in times.items():
        shape = epilogues.choose(tokens, heads, 512, 128, quantization)
        ours, separate = found[bench_epilogue.name_of(shape)], found["separate"]
        assert {(pieces, place) for _, pieces, place in ours} == places
        slower = {place for place, time in ours.items() if time > 1.02 * separate[place]}
        assert not slower, (tokens, heads, quantization)
    assert {facts[:2] for facts in times} == {(t, h) for t in (1, 2) for h in (8, 16, 32, 64, 128)}
