"""`benchmarks/engine.py sparse` without its engines: the indexer and the verdicts."""

import argparse
import re

import engine_complete
import engine_indexer
import engine_sparse
import pytest
import torch

from mla_fusion.runtime import sparse_step
from tests import test_engine_benchmark as example


@pytest.mark.parametrize("layer", [0, 3])
def test_the_indexer_chooses_each_token_once_and_the_last_one(layer):
    positions = torch.tensor([0, 5, 31, 32, 33, 100, 4095])
    chosen = torch.full((9, 32), 77, dtype=torch.int32)
    engine_indexer.choose(positions, chosen, layer)
    assert (chosen[7:] == 77).all()
    for position, row in zip(positions.tolist(), chosen.tolist(), strict=False):
        listed = [entry for entry in row if entry >= 0]
        assert len(set(listed)) == len(listed) == min(position + 1, 32)
        assert min(listed) >= 0 and max(listed) == position


NEAR, FAR = [2.0, 2.0, 2.1, 2.0], [2.0, 3.0, 2.0, 2.0]


def result(gaps, decodes, most):
    """An engine's: tokens, and the kernels of steps of one and of all requests."""
    launches = {
        batch: {"mla_plan": n > 0, "mla_decode": n, "mla_reduce": n}
        for batch, n in (("1", decodes), ("128", most))
    }
    return {**example.result(example.TOKENS, gaps), "launches": launches}


@pytest.mark.parametrize(
    ("arm", "made", "verdict"),
    [
        ("default", (NEAR, 4, 0), "WRONG: .* launches a step of 1$"),
        ("custom", (NEAR, 4, 0), "right"),
        ("custom", (NEAR, 0, 0), "WRONG: .* launches a step of 1$"),
        ("custom", (NEAR, 4, 4), "WRONG: .* launches a step of 128$"),
        ("ours", (NEAR, 4, 4), "right"),
        ("ours", (NEAR, 4, 0), "WRONG: .* launches a step of 128$"),
        ("ours", (FAR, 4, 4), "WRONG: log-probabilities move"),
        ("shifted", (FAR, 0, 0), "WRONG: .* launches a step of 1$"),
    ],
)
def test_verdict(monkeypatch, arm, made, verdict):
    monkeypatch.setattr(sparse_step, "most_tokens", lambda heads, cache: 15)
    unfused = {"default": result([2.0] * 4, 0, 0), "other": result([2.0, 2.1, 2.0, 2.0], 0, 0)}
    results = unfused | {arm: result(*made)}
    found = engine_sparse.verdict(arm, results, "v3.2-tp8", "fp8_ds_mla")
    assert re.match(verdict, found), found


def test_rows(monkeypatch):
    """Each arm has a row of each point, but not the one that is wrong."""
    facts = {"runner": "V2", "attention": "FLASHMLA_SPARSE", "all_reduce": ""}
    arms = ("default", "other", "custom", "shifted")
    results = {arm: result(NEAR, 4 * (arm == "custom"), 0) | facts for arm in arms}
    monkeypatch.setattr(sparse_step, "most_tokens", lambda heads, cache: 15)
    monkeypatch.setattr(engine_sparse, "start_ranks", lambda job: [("", "")])
    monkeypatch.setattr(engine_sparse, "ready", lambda engines, end: results)
    for module in (engine_sparse, engine_complete):
        monkeypatch.setattr(module, "finish", lambda *_, seconds: {})
    times = [{"gpu": 2.0, "wall": 3.0}]
    monkeypatch.setattr(
        engine_complete, "rounds",
        lambda engines, point: {arm: engine_complete.columns(times, times) for arm in engines},
    )  # fmt: skip
    args = argparse.Namespace(arms=",".join(arms))
    rows, wrong = engine_sparse.measured("", "v3.2-tp8", "fp8_ds_mla", args, float("inf"))
    assert wrong == 1  # `shifted` decodes nothing here, and is not found
    found = [(row["arm"], row["batch"], row["context"]) for row in rows]
    assert found == [(arm, n, 3000) for n in (1, 16, 32, 64, 128) for arm in arms[:3]]
