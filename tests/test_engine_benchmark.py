"""benchmarks/engine.py without its engines: verdicts and rows."""

import argparse
import math
import subprocess
import sys
import time

import engine
import engine_compare
import engine_complete
import engine_jobs
import pytest
from engine_jobs import job


def result(tokens, gaps):
    """One sequence as an engine sends it; in every context token 100 + chosen is second, `gap`
    below."""
    return {
        "tokens": [tokens],
        "top": [[[[t, -0.1], [t + 100, -0.1 - g]] for t, g in zip(tokens, gaps, strict=True)]],
    }


TOKENS = [1, 2, 3, 4]
BASE = {**result(TOKENS, [2.0] * 4), "runner": "V2"}
# Gaps move by 0.1 in one of four contexts: that is the noise.
NOISY = [2.0, 2.1, 2.0, 2.0]
NOISE = engine_compare.compare(result(TOKENS, NOISY), BASE)


@pytest.mark.parametrize(
    ("gaps", "tokens", "verdict"),
    [
        ([2.0, 2.0, 1.9, 2.0], TOKENS, "right"),
        ([2.0, 2.0, 0.05, 2.0], [1, 2, 103, 9], "right"),  # a near tie
        ([2.0, 2.0, 0.5, 2.0], [1, 2, 103, 9], "WRONG: a token differs at a gap of 0.5"),
        ([2.0] * 4, [1, 2, 77, 9], "WRONG: a token differs at a gap of inf"),  # no candidate
        # The tokens are equal and their probabilities are not.
        ([2.08] * 4, TOKENS, "WRONG: log-probabilities move 1.6 times as far"),
        ([math.nan] * 4, TOKENS, "WRONG: NaN"),
    ],
)
def test_verdict(gaps, tokens, verdict):
    made = result(TOKENS, gaps)
    top = made["top"] if tokens[2] == 103 else BASE["top"]
    difference = engine_compare.compare(made, {"tokens": [tokens], "top": top})
    assert difference.equal == (tokens == TOKENS)
    assert engine_compare.verdict(difference, NOISE).startswith(verdict)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(TOKENS, "not judged: the unfused paths"), ([1, 2, 77, 9], "WRONG: a token differs")],
)
def test_equal_unfused_paths_are_no_measure(tokens, word):
    same = engine_compare.compare(BASE, BASE)
    other = {**BASE, "tokens": [tokens]}
    moved = engine_compare.compare(result(TOKENS, [2.0, 2.5, 2.0, 2.0]), other)
    assert engine_compare.verdict(moved, same).startswith(word)
    assert engine_compare.verdict(same, same) == "right"


@pytest.mark.parametrize(
    ("stored", "verdict"),
    [(2.0, "WRONG: log-probabilities move 2.0"), (2.1, "right"), (math.nan, "WRONG: NaN")],
)
def test_the_widest_unfused_path_is_the_measure(stored, verdict):
    """`cat` moves one gap of four, `stored` none, all or beyond measure; `fused` moves all."""
    results = {
        "default": BASE,
        "cat": result(TOKENS, NOISY),
        "stored": result(TOKENS, [stored] * 4),
        "fused": result(TOKENS, [2.1] * 4),
    }
    assert engine_compare.judge("fused", ("cat", "stored"), results).startswith(verdict)
    assert engine_compare.judge("stored", ("cat", "stored"), results) == "not judged"
    assert engine_compare.judge("fused", (), results) == "not judged"


FAR, ALL = [2.0, 3.0, 2.0, 2.0], [2.1] * 4
NAME = "r1-tp8 block-fp8"


@pytest.mark.parametrize(
    ("gaps", "instead", "word", "found"),
    [
        ({"native": ALL, "planted": FAR}, {}, "right", "WRONG: log-probabilities move 5.0"),
        ({"native": ALL, "planted": ALL}, {}, "right", "right"),
        ({"native": [2.05] * 4, "planted": FAR}, {}, "WRONG: log-probabilities", "WRONG"),
        ({"planted": FAR}, {}, "not judged: the unfused", "not judged"),
        ({"native": ALL, "planted": FAR}, {"ranges": [[1, 16, 2, 1, 1]]}, "WRONG: fused 1", "W"),
        ({"native": ALL, "planted": FAR}, {"launches": {}}, "WRONG: {} launches a step", "W"),
        ({"native": ALL, "planted": FAR}, {"quantizations": []}, "WRONG: outputs quantized", "W"),
    ],
)
def test_block_fp8_is_measured_by_more_unfused_arms(gaps, instead, word, found):
    """`cat` and `stored` equal `default` in every bit."""
    args = argparse.Namespace(tp=1, dp=1, dcp=1)
    asked = job(**engine.configurations(args)[NAME])
    layers = asked["layers"]
    counts = dict.fromkeys(engine.KERNELS, layers) | {"mla_plan": 1}
    says = {"steps": 9, "runner": "V1", "quantizations": ["group"], **instead}
    says = {"ranges": [[1, 16, layers, layers, 0]], "launches": {"1": counts, "5": counts}} | says
    gaps = {"fused": ALL, "portable": ALL} | gaps
    for ours in ("fused", "portable"):
        arms = {
            arm: result(TOKENS, gaps.get(arm, [2.0] * 4)) | says
            for arm in ("default", *engine.unfused(NAME, args), ours, "planted")
        }
        row = engine.judged(NAME, ours, arms, asked)
        only_of_portable = "launches" in instead or "quantizations" in instead
        as_fused = ours == "fused"
        assert row["verdict"].startswith("right" if as_fused and only_of_portable else word)
        assert row["planted"].startswith(found) if as_fused else row["planted"] == ""
        assert "moves by 0.0000" in row["stored / default"]


def test_context_parallelism_is_measured_against_an_engine_without_it():
    """vLLM's own fusion, the arm `cat`, is wrong there."""
    args = argparse.Namespace(tp=2, dp=1, dcp=2)
    assert engine.unfused("k2-tp4 fp8", args) == ("tp",)


def test_complete_judges_layers_and_takes_changes_of_medians_against_default():
    results = {"default": BASE, "cat": result(TOKENS, NOISY)}
    blocks = {"quantization_config": {}}  # of which `native` alone is a measure
    for fused, said in ((3, "right"), (2, "WRONG: not fused in every layer")):
        results["fused"] = BASE | {"ranges": [[1, 128, 3, fused, 3 - fused], [129, 8192, 3, 0, 0]]}
        assert engine_complete.verdict("fused", results, 3, {}).startswith(said)
    results["fused"] |= {"ranges": [[1, 128, 3, 3, 0]]}
    assert engine_complete.verdict("fused", results, 3, blocks) == "not judged"
    ours, default = ([{"gpu": us + more} for us in (14, 12, 10)] for more in (-1.04, 0))
    assert engine_complete.columns(ours, default) == {
        "gpu_us": 11, "gpu_min": 9, "gpu_max": 13, "gpu_change": -8.33
    }  # fmt: skip


@pytest.mark.parametrize("fails", [0, 1])
def test_an_arm_of_which_one_rank_fails_leaves_the_others(fails, monkeypatch, capsys):
    """The rank that failed is shown, and its peers are ended, which would wait for it forever."""
    ended = []

    def finish(work, process, seconds):
        ended.append((work, seconds))
        process.kill()
        process.communicate()
        return {"error": f"log of {work}"} if seconds else {}

    def engine(work, answer):
        program = f"import time; print({answer!r}, flush=True); time.sleep(99)" if answer else ""
        command = [sys.executable, "-c", program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return work, subprocess.Popen(command, **pipes)

    monkeypatch.setattr(engine_jobs, "finish", finish)
    answers = ['{"tokens": [1], "top": [0]}', '{"tokens": [2], "top": [0]}']
    broken = [engine(f"broken{i}", "" if i == fails else answers[i]) for i in range(2)]
    whole = [engine(f"whole{i}", answers[i]) for i in range(2)]
    engines = {"broken": broken, "whole": whole}
    assert engine_jobs.ready(engines, time.time() + 60) == {
        "whole": {"tokens": [1, 2], "top": [0, 0]}
    }
    assert [*engines] == ["whole"] and f"log of broken{fails}" in capsys.readouterr().out
    assert ended == [(f"broken{fails}", engine_jobs.ENDS), (f"broken{1 - fails}", 0)]
    for work, process in whole:
        finish(work, process, 0)
