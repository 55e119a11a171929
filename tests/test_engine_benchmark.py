"""The token comparison of benchmarks/engine.py, and the weights it is made with."""

import argparse
import math
import subprocess
import sys
import time

import engine
import engine_compare
import engine_model
import engine_worker
import pytest
import torch

from mla_fusion.cli import child


def result(tokens, gaps):
    """One sequence; in every context token 100 + chosen is second, `gap` below."""
    return {
        "tokens": [tokens],
        "top": [[[[t, -0.1], [t + 100, -0.1 - g]] for t, g in zip(tokens, gaps, strict=True)]],
    }


TOKENS = [1, 2, 3, 4]
BASE = result(TOKENS, [2.0] * 4)
# Gaps move by 0.1 in one of four contexts: that is the noise.
NOISE = engine_compare.compare(result(TOKENS, [2.0, 2.1, 2.0, 2.0]), BASE)


def test_noise_is_measured():
    assert (NOISE.equal, NOISE.sequences, NOISE.gaps) == (1, 1, [])
    assert NOISE.largest == pytest.approx(0.1) and NOISE.typical == pytest.approx(0.05)


@pytest.mark.parametrize(
    "gaps, tokens, verdict",
    [
        ([2.0, 2.0, 1.9, 2.0], [1, 2, 3, 4], "right"),
        ([2.0] * 4, [1, 2, 77, 9], "WRONG: a token differs at a gap of inf"),  # no candidate
        # The tokens are equal and their probabilities are not.
        ([2.08] * 4, [1, 2, 3, 4], "WRONG: log-probabilities move 1.6 times as far"),
        ([math.nan] * 4, [1, 2, 3, 4], "WRONG: NaN"),
    ],
)
def test_verdict(gaps, tokens, verdict):
    difference = engine_compare.compare(result(TOKENS, gaps), {**BASE, "tokens": [tokens]})
    assert difference.equal == (tokens == TOKENS)
    assert engine_compare.verdict(difference, NOISE).startswith(verdict)


@pytest.mark.parametrize(("gap", "word"), [(0.05, "right"), (0.5, "WRONG: a token differs")])
def test_a_first_difference_is_right_only_at_a_near_tie(gap, word):
    """Token 3 of one is the second candidate, token 103, of the other."""
    tied = result(TOKENS, [2.0, 2.0, gap, 2.0])
    other = {"tokens": [[1, 2, 103, 9]], "top": tied["top"]}
    difference = engine_compare.compare(tied, other)
    assert difference.gaps == [pytest.approx(gap)] and difference.equal == 0
    assert engine_compare.verdict(difference, NOISE).startswith(word)


def test_the_weights_peak_at_the_successor_and_drafter_and_target_share_them():
    hidden, vocabulary = 2048, 512

    class Model(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(vocabulary, hidden)
            self.norm = torch.nn.RMSNorm(hidden)
            self.add_module(head, torch.nn.Linear(hidden, vocabulary, bias=False))

    target, drafter = Model("lm_head"), Model("shared_head")
    drafter.shared_head.head = torch.nn.Linear(hidden, vocabulary, bias=False)
    for model in (target, drafter):
        engine_model.initialize(model)
    assert torch.equal(target.embed_tokens.weight, drafter.embed_tokens.weight)
    assert torch.equal(target.lm_head.weight, drafter.shared_head.head.weight)
    assert bool((target.norm.weight == 1).all())
    embedding = target.embed_tokens.weight
    # What layers add: as much again, three times over, and independent of the token.
    stream = embedding + 3**0.5 * torch.randn(embedding.shape)
    logits = target.lm_head(target.norm(stream))
    successor = torch.arange(vocabulary).add(1) % vocabulary
    peak = logits[torch.arange(vocabulary), successor].mean() / logits.std()
    assert 5 < peak.item() < 8


def test_an_engine_without_time_is_ended_with_its_children():
    """Or a run that is cut off would lose the results of the others."""
    command = "import subprocess; subprocess.run(['sleep', '600'])"
    worker = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    began = time.monotonic()
    assert "no time left" in engine.finish(child.Job("", ""), worker, 1.0)["error"]
    # The pipe is open as long as a child holds it.
    assert time.monotonic() - began < 60 and worker.returncode


@pytest.mark.parametrize(("refreshes", "word"), [(2, "right"), (5, "WRONG: {")])
def test_portable_is_a_row_of_its_own_and_must_refresh_once_a_pass(monkeypatch, refreshes, word):
    """Two passes, of four layers and of the drafter's: a refresh in each layer would be five."""
    name, sizes = "r1-tp8 fp8 mtp-1", [1, 16, 5, 5, {}]
    counts = {"prep_kernel": 5, "plan_kernel": refreshes, "decode_kernel": 5, "reduce_kernel": 5}
    fused = {**BASE, "steps": 9, "ranges": [sizes]}
    arms = {"default": BASE, "cat": BASE, "fused": fused, "portable": {**fused, "launches": counts}}
    results = {(name, arm): each for arm, each in arms.items()}
    monkeypatch.setattr(engine, "run_arms", lambda *_: results)
    rows, wrong = engine.tokens(argparse.Namespace(plant=()))
    assert [row["configuration"] for row in rows] == [name, f"{name}, portable"]
    assert rows[0].keys() == rows[1].keys() and rows[0]["verdict"] == "right"
    assert rows[1]["verdict"].startswith(word) and wrong == (word != "right")


def test_every_replayed_graph_is_timed_from_an_event_before_it_to_one_behind(monkeypatch):
    done = []

    class Graph:
        def replay(self):
            done.append("replay")

    class Event:
        def record(self):
            self.at = len(done)
            done.append("event")

        def elapsed_time(self, end):
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: done.append("busy"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    replay = Graph.replay
    times = engine_worker.graph_times(lambda count: [Graph().replay() for _ in range(count)], 3)
    assert done == ["busy", "event", "replay", "event"] * 3 and times == [2000.0] * 3
    assert Graph.replay is replay
