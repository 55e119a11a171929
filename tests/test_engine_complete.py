"""`complete` of benchmarks/engine.py without its engines: turns, rows and memory."""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import time
import types

import engine_complete
import engine_worker
import pytest
import torch

from tests.engine_results import BASE, TOKENS, result


def test_a_worker_answers_every_line_until_go(monkeypatch):
    done = []

    @contextlib.contextmanager
    def requests(llm, prompts, tokens):
        done.append((len(prompts), len(prompts[0])))
        yield lambda count: None
        done.append("dropped")

    monkeypatch.setattr(engine_worker, "requests", requests)
    monkeypatch.setattr(engine_worker, "clocked", lambda step, count: 7.0)
    monkeypatch.setattr(engine_worker, "full_graph_time", lambda step: 5.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hold 2 30\ntime\nhold 1 9\ngo\ntime\n"))
    answers = io.StringIO()
    engine_worker.take_turns(None, {"tp": 1}, answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {}, {"wall": 7.0, "gpu": 5.0}, {}
    ]  # fmt: skip
    assert done == [(2, 30), "dropped", (1, 9), "dropped"]


@pytest.mark.parametrize("native", [[2.0, 2.1, 2.0, 2.0], None])
def test_native_measures_where_the_other_unfused_arms_are_equal(native):
    """Without it another token is wrong, because nothing says how far rounding goes."""
    results = {"default": BASE, "stored": BASE, "fused": result([1, 2, 77, 9], [2.0] * 4)}
    if native:
        results["native"] = result([1, 2, 77, 9], native)
    found = engine_complete.verdict("fused", results, 3)
    assert found.startswith("right" if native else "WRONG: a token differs")
    assert engine_complete.verdict("stored", results, 3) == "not judged"


@pytest.mark.parametrize("broken", [None, "hold 64 100", "layer"])
def test_complete_measures_the_arms_in_turns(monkeypatch, capsys, broken):
    """Rounds of 10, 11, ... us for `default`; the other arms take 1 and 2 us less."""
    arms, asked, ended = ["default", "cat", "fused"], [], []
    fused = [[1, 128, 3, 2 if broken == "layer" else 3, 0], [129, 8192, 3, 0, 0]]
    results = {arm: {**BASE, "attention": "FLASHMLA", "runner": "V2"} for arm in arms}
    results["cat"] |= result(TOKENS, [2.0, 2.1, 2.0, 2.0])
    results["fused"] |= {"ranges": fused}

    def turn(engines, arm, line):
        asked.append((arm, line))
        if line == broken:
            raise engine_complete.EngineEnded(arm)
        number = sum(arm == one and line == "time" for one, line in asked)
        return {"gpu": 9.0 + number - arms.index(arm)}

    def finish(arm, seconds=None):
        ended.append((arm, seconds))
        return {"error": "why"}

    monkeypatch.setattr(engine_complete, "MODELS", {"r1-tp8": engine_complete.Model(3, 1, arms)})
    monkeypatch.setattr(engine_complete, "POINTS", [(2, 100), (64, 100), (128, 1000)])
    monkeypatch.setattr(engine_complete, "memory", lambda *_: (1e8, False))
    monkeypatch.setattr(engine_complete, "start", lambda job: (job["arm"],))
    monkeypatch.setattr(engine_complete, "wait_until_ready", lambda engines, end: results)
    monkeypatch.setattr(engine_complete, "turn", turn)
    monkeypatch.setattr(engine_complete, "finish", finish)
    args = argparse.Namespace(only="r1-tp8 fp8", arms="", tp=1, seconds=1e9, layers=0)
    rows, wrong = engine_complete.complete(args)
    printed = capsys.readouterr().out
    assert "r1-tp8 fp8, 128 x 1000 left out: its KV cache needs 0.3 GB, room is 0.1" in printed
    if broken and "hold" in broken:
        assert "== r1-tp8 fp8, default: FAILED\nwhy" in printed
        assert ended == [("default", engine_complete.ENDS), ("cat", 0), ("fused", 0)]
    else:
        assert ended == [(arm, 0) for arm in arms] and len(rows) == 6
    assert [arm for arm, _ in asked][:18] == (
        arms + arms + ["cat", "fused", "default", "fused", "default", "cat"] + arms
        + ["cat", "fused", "default"]
    )  # fmt: skip
    rows = rows[:3]
    assert [(r["gpu_us"], r["gpu_min"], r["gpu_max"]) for r in rows] == [
        (12, 10, 14), (11, 9, 13), (10, 8, 12)
    ]  # fmt: skip
    assert [row["gpu_change"] for row in rows] == [0.0, -8.33, -16.67]
    verdicts = [row["verdict"] for row in rows]
    assert verdicts[:2] == ["not judged"] * 2 and wrong == (broken is not None)
    assert verdicts[2].startswith("WRONG: not fused" if broken == "layer" else "right")
    assert [row["bucket_fused"] for row in rows] == ["", "", 2 if broken == "layer" else 3]


@pytest.mark.parametrize(
    ("name", "tp", "engines", "shared", "gigabytes"),
    [
        ("deepseek-v2-lite", 1, 5, True, 16.8),  # for 32 x 16384 in bf16
        ("deepseek-v2-lite", 1, 3, False, 8.4),  # in fp8
        ("glm-4.7-flash", 1, 4, True, 14.6),
        ("glm-4.7-flash", 2, 2, False, 30.0),
        ("deepseek-r1-tp8", 2, 4, True, 12.5),  # a rank keeps its size
        ("r1-dp", 1, 4, False, 18),
    ],
)
def test_weights_are_shared_where_a_copy_each_does_not_fit(
    monkeypatch, name, tp, engines, shared, gigabytes
):
    h200 = types.SimpleNamespace(total_memory=139.8 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    model = engine_complete.MODELS[name]
    room, must_share = engine_complete.memory(name, model, tp, engines)
    assert must_share == shared and gigabytes < room / 1e9 < gigabytes + 6
    copies = 1 if shared else engines
    assert engines * room + copies * model.gigabytes * 1e9 / (1 if "-tp" in name else tp) < 135e9


def test_an_engine_that_ended_is_named():
    """Before it was ready, and in its turn."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    commands = {"default": "print('{}', flush=True); input()", "cat": "pass"}
    started = {
        arm: (None, subprocess.Popen([sys.executable, "-c", command], **pipes))
        for arm, command in commands.items()
    }
    with pytest.raises(engine_complete.EngineEnded, match="cat"):
        engine_complete.wait_until_ready(started, time.time() + 60)
    started["cat"][1].wait()
    with pytest.raises(engine_complete.EngineEnded, match="cat"):
        engine_complete.turn(started, "cat", "time")
    for _, process in started.values():
        process.communicate("\n")


def test_an_engine_that_is_not_ready_in_time_is_named():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", "input()"], **pipes)
    with pytest.raises(engine_complete.EngineEnded, match="cat"):
        engine_complete.wait_until_ready({"cat": (None, process)}, time.time())
    process.communicate("\n")


@pytest.mark.parametrize(
    ("asked", "layers", "gigabytes"), [(0, 40, 54), (50, 40, 54), (20, 20, 27)]
)
def test_fewer_layers_take_less_memory(asked, layers, gigabytes):
    model = engine_complete.fewer(engine_complete.MODELS["deepseek-r1-tp8"], asked)
    assert (model.layers, model.gigabytes) == (layers, gigabytes)
