"""benchmarks/engine.py without its engines: verdicts and rows."""

import csv
import math
import sys

import engine
import engine_compare
import pytest
import torch

from tests.engine_results import BASE, TOKENS, result

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


@pytest.fixture
def tokens(monkeypatch, tmp_path):
    """tokens(words, gaps of arms, what ours say instead) -> rows, exit status and jobs."""
    started = []

    def run(words, gaps, **instead):
        def one(job, left):
            started.append(job)
            layers = job["layers"]
            counts = dict.fromkeys(("prep_kernel", "decode_kernel", "epilogue_kernel"), layers)
            counts |= {"reduce_kernel": 0, "plan_kernel": 1}
            arm = "tp" if job["tp"] > job["dcp"] else job["arm"]
            return {**result(TOKENS, gaps.get(arm, [2.0] * 4)), "steps": 9, "runner": "V1",
                    "quantizations": ["group"], "ranges": [[1, 16, layers, layers, 0]],
                    "launches": {"1": counts, "5": counts}, **instead}  # fmt: skip

        path = tmp_path / "rows.csv"
        monkeypatch.setattr(engine, "run", one)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr("vllm.utils.import_utils.has_deep_gemm", lambda: False)
        monkeypatch.setattr(engine, "environment", lambda commit: {"gpu": "none"})
        monkeypatch.setattr(sys, "argv", ["engine.py", "tokens", str(path), *words])
        with pytest.raises(SystemExit) as ended:
            engine.main()
        with path.open(newline="") as file:
            return list(csv.DictReader(file)), int(ended.value.code), started

    return run


FAR, ALL = [2.0, 3.0, 2.0, 2.0], [2.1] * 4


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
def test_block_fp8_is_measured_by_more_unfused_arms(tokens, gaps, instead, word, found):
    """`cat` and `stored` equal `default` in every bit; an error that is not found is one."""
    given = {"fused": ALL, "portable": ALL, **gaps}
    rows, status, started = tokens(["--only", "r1-tp8 block-fp8"], given, **instead)
    fused, portable = rows  # without DeepGEMM vLLM would take another layer than `ue8m0` names
    assert [job["arm"] for job in started] == [
        "default", "cat", "stored", "native", "fused", "portable", "planted"
    ]  # fmt: skip
    assert {tuple(job["variables"].items()) for job in started} == {tuple(engine.CUTLASS.items())}
    assert portable["verdict"].startswith(word) and portable["planted"] == ""
    only_of_portable = "launches" in instead or "quantizations" in instead
    assert fused["verdict"].startswith("right" if only_of_portable else word)
    assert fused["planted"].startswith(found)
    assert "moves by 0.0000" in fused["stored / default"]
    assert status == (word != "right" or found == "right")


def test_context_parallelism_is_measured_against_an_engine_without_it(tokens):
    """vLLM's own fusion, the arm `cat`, is wrong there; the error is planted everywhere."""
    words = ["--tp", "2", "--dcp", "2", "--only", "k2-tp4 fp8"]
    layers = {"ranges": [[1, 16, 4, 4, 0]]}
    [row], status, started = tokens(words, {"tp": NOISY, "planted": FAR}, **layers)
    assert [(job["arm"], job["dcp"]) for job in started] == [
        ("default", 2), ("default", 1), ("fused", 2), ("planted", 2)
    ]  # fmt: skip
    assert {job["device"] for job in started} == {"0,1"} and row["gpus"] == "2"
    assert row["verdict"] == "right" and "tp / default" in row and status == 0
    assert row["planted"].startswith("WRONG")
