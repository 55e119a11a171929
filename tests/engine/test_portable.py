"""attention=portable in a real vLLM engine on a CPU: the plan of this library, the same tokens."""

import pytest

from mla_fusion.cli import tiny_models
from tests.engine.test_engine import run

pytestmark = pytest.mark.engine
STEPS = 12


def test_the_same_tokens_from_one_refresh_a_step(tmp_path):
    """Weights are of unit gain: another key, length or scale gives other tokens."""
    model = tiny_models.write("deepseek-v2-shaped", tmp_path / "model")
    job = {"model": str(model), "plugin": True, "flag": True, "load_format": "auto"}
    job |= {"max_tokens": STEPS, "engine": {"dtype": "float32"}}
    backend = run(job, tmp_path / "auto")
    portable = run({**job, "attention": "portable"}, tmp_path / "portable")
    assert backend["refreshes"] == []
    # All four prompts are prefilled in one step; then every step decodes four tokens, and the
    # three layers share its plan. Before them, a warm-up of one token.
    assert portable["refreshes"] == [[1, 1]] + [[4, 4]] * (STEPS - 1)
    assert portable["tokens"] == backend["tokens"]
    for ours, theirs in zip(portable["logprobs"], backend["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
