"""`complete` of benchmarks/engine.py without its engines: turns, rows and memory."""

import argparse

import engine_complete
import pytest

from tests.engine_results import BASE, TOKENS, result


@pytest.mark.parametrize("broken", [None, "hold 64 100", "layer", "start"])
def test_complete_measures_the_arms_in_turns(monkeypatch, capsys, broken):
    """Rounds of 10, 11, ... us for `default`; the other arms take 1 and 2 us less."""
    arms, asked = ["default", "cat", "fused"], []
    fused = [[1, 128, 3, 2 if broken == "layer" else 3, 0], [129, 8192, 3, 0, 0]]
    results = {arm: {**BASE, "attention": "FLASHMLA"} for arm in arms}
    results["cat"] |= result(TOKENS, [2.0, 2.1, 2.0, 2.0])
    results["fused"] |= {"ranges": fused}

    def ready(engines, end):
        if broken == "start":
            del engines["cat"], results["cat"]
        return results

    def turn(engines, arm, line):
        asked.append((arm, line))
        if line == broken:
            raise engine_complete.EngineEnded(arm)
        number = sum(arm == one and line == "time" for one, line in asked)
        return {"gpu": 9.0 + number - arms.index(arm)}

    monkeypatch.setattr(engine_complete, "MODELS", {"r1-tp8": engine_complete.Model(3, 1, arms)})
    monkeypatch.setattr(engine_complete, "POINTS", [(2, 100), (64, 100), (128, 1000)])
    monkeypatch.setattr(engine_complete, "memory", lambda *_: (1e8, False))
    monkeypatch.setattr(engine_complete, "start", lambda job: (job["arm"],))
    monkeypatch.setattr(engine_complete, "ready", ready)
    monkeypatch.setattr(engine_complete, "turn", turn)
    monkeypatch.setattr(engine_complete, "finish", lambda arm, seconds: {"error": "why"})
    args = argparse.Namespace(
        what="complete", only="r1-tp8 fp8", arms="", tp=1, seconds=1e9, layers=0, drafts=0
    )
    rows, wrong = engine_complete.complete(args)
    assert wrong == (broken is not None)
    printed = capsys.readouterr().out
    assert "r1-tp8 fp8, 128 x 1000 left out: its KV cache needs 0.3 GB, room is 0.1" in printed
    if broken == "start":
        assert {(row["arm"], row["verdict"]) for row in rows} == {
            ("default", "not judged"), ("fused", "not judged")
        }  # fmt: skip
        return
    assert ("== r1-tp8 fp8, default: FAILED\nwhy" in printed) == (broken == "hold 64 100")
    assert len(rows) == (3 if broken == "hold 64 100" else 6)
    assert [arm for arm, _ in asked][3:12] == [
        "default", "cat", "fused", "cat", "fused", "default", "fused", "default", "cat"
    ]  # fmt: skip
    times = [(r["gpu_us"], r["gpu_min"], r["gpu_max"], r["gpu_change"]) for r in rows[:3]]
    assert times == [(12, 10, 14, 0.0), (11, 9, 13, -8.33), (10, 8, 12, -16.67)]
    assert [row["bucket_fused"] for row in rows[:3]] == ["", "", 2 if broken == "layer" else 3]
    assert rows[2]["verdict"].startswith("WRONG: not fused" if broken == "layer" else "right")
