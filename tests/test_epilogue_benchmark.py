"""`benchmarks/epilogue.py` without its GPU: the rows, and the lines about them."""

import csv
from types import SimpleNamespace

import epilogue as bench_epilogue
import pytest
import torch
from epilogue import WRONG

from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.measure import records, timing

FACTS = dict.fromkeys(records.FACTS, "x")


LATENTS = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def one_layer(monkeypatch):
    """A step of two tokens whose latents are there, on a CPU: ours takes 2 us, vLLM's 1 us, and
    3 us behind a decode of 1 us."""
    plan = SimpleNamespace(reduce_indptr=torch.tensor([0, 3, 6]), fresh=True)
    w_uv = torch.randn(1, 16, 128).bfloat16()
    epilogue = Epilogue(w_uv, torch.empty(2, 128).to(bench_epilogue.FP8), torch.empty(2, 1))
    given = SimpleNamespace(plan=plan, epilogue=epilogue, out=LATENTS.clone())
    nothing = SimpleNamespace(decode=lambda _: None, merge=lambda _: None)
    monkeypatch.setattr(bench_epilogue, "make", lambda case: [given])
    monkeypatch.setattr(bench_epilogue, "provider", nothing)
    monkeypatch.setattr(bench_epilogue, "capture_calls", lambda call, count: call(0))

    def interleave(graphs, *_):
        us = {("alone", ""): 1.0, ("back", "vllm"): 1.0, ("behind", "vllm"): 3.0}
        return {key: dict.fromkeys(timing.TIMES, us.get(key, 2.0)) for key in graphs}

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
def test_rows_are_checked_and_written(monkeypatch, tmp_path, one_layer, name, capsys):
    step, wrong = STEPS[name]
    monkeypatch.setattr(bench_epilogue, "CANDIDATES", {"ours": step, "vllm": finish})
    monkeypatch.setattr(bench_epilogue, "QUANTIZATIONS", ("group",))
    monkeypatch.setattr(records, "environment", lambda commit, program: FACTS)
    path = tmp_path / "rows.csv"
    sizes = ["--tokens", "2", "--heads", "1", "--splits", "3", "--rounds", "5", "--csv"]
    assert bench_epilogue.main([*sizes, str(path)]) == bool(wrong)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == {*records.FACTS, *bench_epilogue.RESULT}
    found = [(r["place"], r["candidate"], float(r["p50_us"]), int(r["worst_step"])) for r in rows]
    ours, vllms = ("ours", wrong), ("vllm", 0)
    assert found == [
        (place, name, us, worst)
        for place, times in (("back", (2, 1)), ("behind", (1, 2)))
        for (name, worst), us in zip((ours, vllms), times, strict=True)
    ]
    printed, mark = capsys.readouterr().out, "!" if wrong else ""
    assert f"T=2 H=1 S=3 group behind: ours 1.00 (1.00-1.00){mark} | vllm 2.00" in printed
    assert "(2, 1, 3, 128, 'group', 'back'): ours 2.00, vllm 1.00" in printed
    assert "geometric mean 1.00, least 0.50" in printed
