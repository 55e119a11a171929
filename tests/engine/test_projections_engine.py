"""Pass 7 in a real engine on a CPU, with linear layers as on CUDA and a plan for each product."""

import pytest

from mla_fusion import ops
from mla_fusion.cli.demo import tiny_models
from tests.engine.test_engine import (  # noqa: F401  a fixture
    FLAG,
    SUMMARY,
    job,
    own_log,
    prefill_range,
    run,
)

pytestmark = pytest.mark.engine
CALL = f"torch.ops.mla_fusion.{ops.PROJECTION}.default("


@pytest.fixture
def pair(tmp_path, job):  # noqa: F811
    """pair(name): engines of a model without and with the flag."""

    def make(name):
        model = str(tiny_models.write(name, tmp_path / "model"))
        return [run(job({"products": True, **f}, "bfloat16", model=model)) for f in ({}, FLAG)]

    return make


@pytest.mark.parametrize(
    "name, launches",
    [
        ("deepseek-v2-shaped", 4),  # q and kv_a in one, o_proj, and two of the MLP
        pytest.param("deepseek-v3-shaped", 5, marks=pytest.mark.nightly),
    ],
)
def test_products_are_ours_and_tokens_those_of_vllm_to_the_bit(name, launches, pair):
    """Also o_proj and the MLP of the last layer, whose piece has no attention. The two pieces
    between attentions are equal and compiled once: their launches count twice."""
    off, on = pair(name)
    graph, served = on["graphs"]["1-4"], on["graphs"][prefill_range(on)]
    assert graph.count(CALL) == 2 * launches and "aten.mm.default(" not in graph
    assert served == off["graphs"][prefill_range(off)] and served.count("aten.mm.default(") == 10
    counted = f" fused; products in {3 * launches} launches of this library;"
    assert own_log(on) == [("INFO", SUMMARY.replace(" fused;", counted))]
    assert (on["tokens"], on["logprobs"]) == (off["tokens"], off["logprobs"])


@pytest.mark.nightly
def test_the_option_leaves_products_to_vllm(job):  # noqa: F811
    on = run(job({"products": True, **FLAG, "projections": "vllm"}, "bfloat16"))
    assert CALL not in on["graphs"]["1-4"] and "aten.mm.default(" in on["graphs"]["1-4"]
    assert own_log(on) == [("INFO", SUMMARY)]


@pytest.mark.nightly
@pytest.mark.parametrize("name, calls", [("deepseek-v2-shaped", 4), ("deepseek-v3-shaped", 6)])
def test_norms_are_ours_and_tokens_those_of_vllm_to_the_bit(name, calls, job, tmp_path):  # noqa: F811
    """In each of the two equal pieces those in front of the MLP and of q; with latents of the query
    one for both latents, else the fused op has that of kv_c."""
    model = str(tiny_models.write(name, tmp_path / "model"))
    options = {"products": True, "norms": True}
    off, on = (run(job({**options, **flag}, "bfloat16", model=model)) for flag in ({}, FLAG))
    graph = on["graphs"]["1-4"]
    assert graph.count(f"torch.ops.mla_fusion.{ops.NORM}.default(") == calls
    assert ("kv_norm_epsilon" in graph) == (calls == 4)
    assert (on["tokens"], on["logprobs"]) == (off["tokens"], off["logprobs"])
