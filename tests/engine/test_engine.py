"""The passes in a real vLLM engine on a CPU: what they leave alone, and what they survive."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mla_fusion import ops
from tests.models import DEEPSEEK_V2

pytestmark = pytest.mark.engine
HARNESS = Path(__file__).with_name("harness.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v2")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V2))
    return str(folder)


def start(job, tmp_path, **environment):
    """One run of the harness, however it ends."""
    # A cache of Inductor's own would keep the passes from running, as a warm vLLM cache does.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), **environment}
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "vllm"), **environment}
    return subprocess.run(
        [sys.executable, str(HARNESS), json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


def run_all(job, tmp_path, **environment):
    """What each engine of a job did."""
    done = start(job, tmp_path, **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    log = done.stdout + done.stderr
    return [json.loads(line.removeprefix("RESULT ")) | {"log": log} for line in lines]


def run(job, tmp_path, **environment):
    [result] = run_all(job, tmp_path, **environment)
    return result


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """vLLM without this library."""
    return run({"model": model}, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def fused_caches(tmp_path_factory):
    return tmp_path_factory.mktemp("fused")


@pytest.fixture(scope="module")
def fused(model, fused_caches):
    """The flag on."""
    return run({"model": model, "plugin": True, "flag": True}, fused_caches)


SUMMARY = "decode range (1, 4): 2 of 2 MLA layers fused; prefill ranges untouched"
CACHED = " (graphs from vLLM's compile cache)"


def own_log(result):
    """(level, message) of every line this library logged; vLLM has no files of these names."""
    line = r"(INFO|WARNING|ERROR) \S+ \S+ \[(?:report|plugin|pipeline)\.py:\d+\] (.*)"
    return re.findall(line, result["log"])


def test_steps_are_counted_by_path(fused):
    """Four prompts enter in one mixed batch, then all decode: 8 tokens are 1 + 7 passes."""
    counts = {"fused": 7, "unfused": 1}
    assert fused["steps"] == [{"model.layers.0.self_attn.attn": counts}]
    assert fused["exported"] == counts  # the engine runs in the process of /metrics


def prefill_range(result):
    [name] = [name for name in result["graphs"] if not name.startswith("1-")]
    return name


def test_flag_off_leaves_every_graph_as_it_is(model, alone, tmp_path):
    off = run({"model": model, "plugin": True}, tmp_path)
    assert off["graphs"] == alone["graphs"]
    assert len(alone["graphs"]) == 2


def test_provider_that_is_unavailable_leaves_the_engine_as_it_is(model, alone, tmp_path):
    """No AITER here: one warning, and vLLM's own graphs, tokens and logprobs."""
    job = {"model": model, "plugin": True, "flag": True, "provider": "aiter"}
    declined = run(job, tmp_path)
    [(level, line)] = own_log(declined)
    assert level == "WARNING"
    assert "[provider-unavailable]" in line and "install ROCm's AITER" in line
    assert declined["graphs"] == alone["graphs"]
    assert declined["tokens"] == alone["tokens"]
    assert declined["logprobs"] == alone["logprobs"]
    assert declined["steps"] == [{}]


def test_invariant_2_prefill_graph_is_the_same_code_with_the_flag_on(alone, fused):
    name = prefill_range(alone)
    assert fused["graphs"][name] == alone["graphs"][name]
    assert "mla_fusion" not in fused["graphs"][name]


def test_decode_graph_runs_the_fused_op_and_no_functional_wrapper_of_it(fused):
    code = fused["graphs"]["1-4"]
    assert code.count(f"torch.ops.mla_fusion.{ops.FUSED}.default(") == 2
    assert code.count(f"torch.ops.mla_fusion.{ops.ATTENTION}.default(") == 2
    assert "unified_mla" not in code


def test_tokens_and_logprobs_are_those_of_vllm_alone_to_the_bit(alone, fused):
    assert fused["tokens"] == alone["tokens"]
    assert fused["logprobs"] == alone["logprobs"]


def test_warm_compile_cache_still_yields_the_report(model, fused_caches, fused):
    warm = run({"model": model, "plugin": True, "flag": True}, fused_caches)
    assert not warm["graphs"], "a pass ran: the cache was cold and this test shows nothing"
    assert own_log(fused) == [("INFO", SUMMARY)]
    assert own_log(warm) == [("INFO", SUMMARY + CACHED)]
    assert warm["tokens"] == fused["tokens"]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_engine_and_worker_in_processes_of_their_own(model, fused, tmp_path, method):
    (tmp_path / "prometheus").mkdir()
    job = {"model": model, "plugin": True, "flag": True, "processes": method}
    apart = run(job, tmp_path, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "prometheus"))
    assert apart["children"] == [f"{method.capitalize()}Process"]  # the engine core
    assert own_log(apart) == [("INFO", SUMMARY)]
    assert apart["tokens"] == fused["tokens"]
    assert apart["logprobs"] == fused["logprobs"]
    # The requests reach the engine core one by one, so prompts may enter in several passes.
    [[steps]] = [rank.values() for rank in apart["steps"]]
    assert steps["fused"] >= 6 and steps["unfused"] >= 1
    # Written by the process of the engine core, and read here as vLLM's /metrics does.
    assert apart["exported"] == steps


def test_two_engines_in_one_process(model, fused_caches, fused):
    both = run_all({"model": model, "plugin": True, "flag": True, "engines": 2}, fused_caches)
    assert len(both) == 2
    assert own_log(both[0]) == [("INFO", SUMMARY + CACHED)] * 2
    for engine in both:
        assert engine["tokens"] == fused["tokens"]
        assert engine["logprobs"] == fused["logprobs"]
        assert engine["steps"] == fused["steps"]


def test_provider_that_raises_in_a_step_ends_the_engine_with_what_to_do(model, fused_caches, fused):
    """No token of the step is handed out, and the traceback ends with the note."""
    done = start({"model": model, "plugin": True, "flag": True, "fault": True}, fused_caches)
    assert done.returncode != 0
    assert "RESULT" not in done.stdout
    text = " ".join((done.stdout + done.stderr).split())
    assert "RuntimeError: planted: an illegal memory access was encountered" in text
    assert "mla_fusion: the reference provider failed in a decode step of" in text
    assert "start with another provider" in text


def test_custom_pass_hook_without_the_plugin(model, alone, tmp_path):
    custom = run({"model": model, "custom_pass": True}, tmp_path)
    assert ops.FUSED in custom["graphs"]["1-4"]
    name = prefill_range(alone)
    assert custom["graphs"][name] == alone["graphs"][name]
    assert custom["tokens"] == alone["tokens"]
    assert custom["logprobs"] == alone["logprobs"]
