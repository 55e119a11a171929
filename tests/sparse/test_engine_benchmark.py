"""`benchmarks/engine.py sparse` without its engines: the indexer, arms and verdicts."""

import argparse

import engine_complete
import engine_indexer
import engine_sparse
import pytest
import torch

from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.cli import child
from mla_fusion.runtime import sparse_step
from tests import engine_results


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


def result(gaps, decodes, most):
    """An engine's: tokens, and the kernels of steps of one and of all requests."""

    def count(n):
        return {"plan_kernel": n > 0, "decode_kernel": n, "reduce_kernel": n}

    made = engine_results.result(engine_results.TOKENS, gaps)
    launches = {"1": count(decodes), "128": count(most)}
    return {**made, "launches": launches, "runner": "V1", "attention": "FLASHMLA_SPARSE"}


RESULTS = {
    "default": result([2.0] * 4, 0, 0),
    "other": result([2.0, 2.1, 2.0, 2.0], 0, 0),
    "custom": result([2.0, 2.0, 2.1, 2.0], 4, 0),
    "ours": result([2.0, 2.0, 2.1, 2.0], 4, 4),
    "shifted": result([2.0, 3.0, 2.0, 2.0], 4, 4),
}


@pytest.mark.parametrize(
    ("arm", "instead", "message"),
    [
        ("", None, "'custom': 'right', 'ours': 'right', 'shifted': 'WRONG"),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 0, 0), "launches a step of 1"),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 4, 4), "launches a step of 128"),
        ("default", result([2.0] * 4, 4, 0), "launches a step of 1"),
        ("ours", RESULTS["shifted"], "log-probabilities move"),
        ("shifted", RESULTS["ours"], "'shifted': 'right'"),
        ("shifted", result([2.0, 3.0, 2.0, 2.0], 0, 0), "launches a step of 1"),
        ("ours", None, "'custom': 'right', 'shifted'"),  # it failed
    ],
)
def test_what_is_wrong_is_counted_and_the_rest_measured(
    monkeypatch, capsys, tmp_path, arm, instead, message
):
    results = {name: each for name, each in RESULTS.items() if name != arm or instead}
    results |= {arm: instead} if instead else {}

    def ready(engines, end):
        for name in engines.keys() - results.keys():
            del engines[name]
        return results

    def start(job):
        (tmp_path / child.LOG).write_text("loading\nINFO attention backend CUSTOM\n")
        return child.Job(str(tmp_path), ""), job["arm"]

    monkeypatch.setattr(sparse_step, "FASTER", {FP8_DS_MLA: ((16, 15),)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    for module, name, mock in (
        (engine_sparse, "start", start),
        (engine_sparse, "ready", ready),
        (engine_sparse, "finish", lambda *_, **__: {}),
        (engine_complete, "finish", lambda *_, **__: {}),
        (
            engine_complete,
            "rounds",
            lambda engines, *_: {each: {"gpu_us": 1.0} for each in engines},
        ),
    ):
        monkeypatch.setattr(module, name, mock)
    rows, wrong = engine_sparse.sparse(argparse.Namespace(only="tp8 fp8", arms="", seconds=1e9))
    assert wrong == bool(arm)
    printed = capsys.readouterr().out
    assert message in printed and "custom: INFO attention" in printed and "loading" not in printed
    timed = [name for name in ("default", "other", "custom", "ours") if name in results]
    assert [(r["arm"], r["batch"]) for r in rows] == [
        (n, b) for b in (1, 16, 32, 128) for n in timed
    ]
