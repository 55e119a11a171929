"""`mla-fusion bench epilogue` without its GPU: cases, candidates, rows and what is said of them."""

import argparse
import csv

import pytest

from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.cli import bench_epilogue
from mla_fusion.cli.bench_epilogue import Case

FACTS = dict.fromkeys(bench_epilogue.FACTS, "x")


def test_a_case_is_in_no_more_pieces_than_a_step_has():
    cases = bench_epilogue.grid((1, 4, 64), (16,), (1, 16, 128), 128, ("none",))
    found = [(case.tokens, case.pieces) for case in cases]
    assert found == [(1, 1), (1, 16), (1, 128), (4, 1), (4, 16), (4, 64), (64, 1), (64, 4)]


def test_candidates_are_separate_launches_what_is_chosen_and_what_is_asked_for():
    one, many = Case(1, 16, 8, 128, "none"), Case(64, 16, 2, 128, "none")
    chosen = bench_epilogue.name_of(epilogues.choose(1, 16, 512, 128))
    assert set(bench_epilogue.candidates(one)) == {"separate", chosen}
    assert set(bench_epilogue.candidates(many)) == {"separate"}
    asked = epilogues.Shape(2, 64, 2, 8, 4)
    assert set(bench_epilogue.candidates(many, [asked])) == {"separate", "2x64x2x8x4"}


@pytest.mark.parametrize(("step", "right"), [(1, True), (2, False)])
def test_rows_are_written_and_judged(monkeypatch, tmp_path, capsys, step, right):
    """What is chosen takes 2 us and separate launches 3, but 1 in eight pieces."""

    def measure(case, found, rounds):
        assert rounds == 5
        chosen = bench_epilogue.name_of(case.chosen())
        separate = 1.0 if case.pieces == 8 else 3.0
        times = {"separate": separate, **({chosen: 2.0} if chosen in found else {})}
        return [
            {"tokens": case.tokens, "heads": case.heads, "pieces": case.pieces,
             "values": case.values, "quantization": case.quantization, "place": place,
             "candidate": name, "chosen": int(name == chosen), "p20_us": us, "p50_us": us,
             "p80_us": us, "worst_step": step if name == chosen else 0}
            for place in ("back", "behind") for name, us in times.items()
        ]  # fmt: skip

    monkeypatch.setattr(bench_epilogue, "measure", measure)
    settings = argparse.Namespace(
        tokens=(1,), heads=(16,), pieces=(1, 8), rounds=5, csv=tmp_path / "rows.csv"
    )
    assert bench_epilogue.run(settings, FACTS) == right
    printed = capsys.readouterr().out
    assert "T=1 H=16 S=8 none back: separate 1.00" in printed
    assert "(1, 16, 8, 128, 'none', 'back'): chosen 2.00, separate 1.00" in printed
    assert "geometric mean 0.87, least 0.50" in printed
    assert ("2.00 (2.00-2.00)!" in printed) == (not right)
    with settings.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and set(rows[0]) == {*bench_epilogue.FACTS, *bench_epilogue.RESULT}
