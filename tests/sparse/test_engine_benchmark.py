"""`benchmarks/engine.py sparse` without its engines: the indexer and verdicts."""

import engine_indexer
import engine_sparse
import pytest
import torch

from mla_fusion.attention.plan.layouts import FP8_DS_MLA
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
    ("arm", "instead", "found"),
    [
        ("default", None, "not judged"),
        ("custom", None, "right"),
        ("ours", None, "right"),
        ("shifted", None, "WRONG: log-probabilities move"),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 0, 0), "launches a step of 1"),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 4, 4), "launches a step of 128"),
        ("default", result([2.0] * 4, 4, 0), "launches a step of 1"),
        ("shifted", result([2.0, 3.0, 2.0, 2.0], 0, 0), "launches a step of 1"),
    ],
)
def test_verdicts(monkeypatch, arm, instead, found):
    """By the kernels of a step, of which CUSTOM takes those of up to 15 tokens, and by tokens."""
    monkeypatch.setattr(sparse_step, "FASTER", {FP8_DS_MLA: ((16, 15),)})
    results = RESULTS | {arm: instead or RESULTS[arm]}
    assert found in engine_sparse.verdict(arm, results, "fp8_ds_mla")
