"""The passes in real vLLM engines on a CPU: the same tokens, in every way to start an engine."""

import re
from pathlib import Path

import pytest
import torch
from vllm.utils.network_utils import get_open_port

from mla_fusion import config, ops, report
from mla_fusion.cli import child
from mla_fusion.cli.demo import tiny_models
from mla_fusion.runtime import measured
from tests import child as children
from tests.engine.work import PROMPTS

pytestmark = pytest.mark.engine
FLAG = {"flag": True}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """job(options, cache=..., plugin=..., ...), a job of `work.serve`.

    Weights are of unit gain: another key, length or scale gives other tokens.
    """
    model = tiny_models.write("deepseek-v2-shaped", tmp_path_factory.mktemp("model"))

    def make(options, dtype="float32", changes=None, model=str(model), **fields):
        folder = tmp_path_factory.mktemp("engine")
        fields = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "options": options} | fields
        engine = {"model": model, "dtype": dtype, "hf_overrides": changes or {}}
        return children.job("tests.engine.work:serve", folder, engine=engine, **fields)

    return make


def run(asked):
    """What its work returned, with the results of its first engine and its log."""
    result = children.run(asked)
    return result | result["engines"][0] | {"log": Path(asked.workdir, child.LOG).read_text()}


@pytest.fixture(scope="module")
def alone(job):
    """vLLM without this library."""
    return run(job({}, plugin=False))


@pytest.fixture(scope="module")
def fused(job, tmp_path_factory):
    """The flag on."""
    cache = tmp_path_factory.mktemp("fused")
    return run(job(FLAG, cache=cache)) | {"cache": cache}


NEW_TOKENS = 12
SUMMARY = (
    f"mla-fusion: {config.FLAG}: decode range (1, 4): 3 of 3 MLA layers fused; "
    "prefill ranges untouched"
)
CACHED = " (graphs from vLLM's compile cache)"


def own_log(result):
    """(level, message) of every line this library logged; each begins with one of these words."""
    words = "mla-fusion|mla_fusion|MLA fusion"
    files = "__init__|decision|pipeline"
    line = rf"(INFO|WARNING|ERROR) \S+ \S+ \[(?:{files})\.py:\d+\] ((?:{words}).*)"
    return re.findall(line, result["log"])


def test_steps_are_counted_by_path(fused):
    """Four prompts enter in one mixed batch, then all decode."""
    counts = {"fused": NEW_TOKENS - 1, "unfused": 1}
    assert fused["steps"] == [{"model.layers.0.self_attn.attn": counts}]
    assert fused["exported"] == counts  # the engine runs in the process of /metrics


def prefill_range(result):
    """That of vLLM's own graph, for steps of any size."""
    [name] = result["graphs"].keys() - {"1-4"}
    return name


def test_flag_off_leaves_graphs_cache_key_and_log_as_they_are(job, alone):
    """The plugin is loaded by its entry point, between the configs of one engine."""
    off = run(job({}))
    assert off["graphs"] == alone["graphs"]
    assert len(alone["graphs"]) == 1
    assert off["key"] == alone["key"]
    assert messages(off) == messages(alone)
    assert any("non-default args" in line for line in messages(alone))


def messages(result):
    """The log without times, sizes and paths."""
    return sorted(re.sub(r"/tmp/\S+|\d+", "#", line) for line in result["log"].splitlines())


def test_invariant_2_prefill_runs_the_same_code_and_kernels_with_the_flag_on(alone, fused):
    name = prefill_range(alone)
    assert fused["graphs"][name] == alone["graphs"][name]
    assert fused["kernels"][name] == alone["kernels"][name]
    sources, calls, _ = alone["kernels"][name]
    assert sources and len(calls) > len(sources)
    assert "mla_fusion" not in fused["graphs"][name]


def test_decode_graph_runs_the_fused_op_and_no_functional_wrapper_of_it(fused):
    """In each of three pieces; two of them are equal, and compiled once unless the CPU's packed
    weights tell them apart."""
    code = fused["graphs"]["1-4"]
    counts = {
        code.count(f"torch.ops.mla_fusion.{op}.default(") for op in (ops.FUSED, ops.ATTENTION)
    }
    assert counts in ({2}, {3})
    assert "unified_mla" not in code


def test_tokens_and_logprobs_are_those_of_vllm_alone_to_the_bit(alone, fused):
    assert fused["tokens"] == alone["tokens"]
    assert fused["logprobs"] == alone["logprobs"]


def test_batch_invariance_keeps_the_graphs_and_decodes_in_every_step(job, alone):
    """Prompts arrive beside decodes; none is longer than vLLM's one bucket of its graph."""
    arriving = [(2 * number, prompt) for number, (_, prompt) in enumerate(PROMPTS)]
    asked = job(FLAG | {"invariant": True, "attention": "portable"}, prompts=arriving)
    kept = run(asked)
    assert kept["graphs"] == alone["graphs"] and kept["tokens"] == alone["tokens"]
    assert len(kept["refreshes"]) >= 6 + NEW_TOKENS - 1, "steps with a prefill too"
    chunks = "portable in every step, in chunks of 256, 512 and 1024 tokens"
    summary = f"3 MLA layers, attention {chunks}; graphs stay vLLM's [batch-invariant]"
    assert own_log(kept) == [("INFO", f"mla-fusion: {config.FLAG}: {summary}")]
    [stored] = Path(asked.cache).rglob("mla_fusion/*.json")
    assert report.load(stored).attention == chunks


@pytest.mark.parametrize(
    "graph", [{}, pytest.param({"one_graph": True}, marks=pytest.mark.nightly)]
)
def test_layers_that_are_left_out_share_no_code_with_those_that_fuse(job, alone, graph):
    """The pieces of the last two layers are equal but for the name, which is an input."""
    asked = job(FLAG | graph | {"layers": "0-1"})
    part = run(asked)
    [stored] = Path(asked.cache).rglob("mla_fusion/*.json")
    assert report.load(stored).chosen == "0-1"
    summary = SUMMARY.replace("3 of 3 MLA layers fused", "2 of 3 MLA layers fused; declined: "
                              "1 [unchosen-layer], mla-fusion report says why")  # fmt: skip
    assert own_log(part) == [("INFO", summary)]
    code = part["graphs"]["1-4"]
    assert code.count(f"torch.ops.mla_fusion.{ops.FUSED}.default(") == 2
    assert code.count("torch.ops.vllm.unified_mla_attention_with_output") == 1
    assert (part["tokens"], part["logprobs"]) == (alone["tokens"], alone["logprobs"])


@pytest.mark.nightly
def test_a_scaled_query_gives_the_tokens_of_vllm_alone_to_the_bit(job, alone):
    """As Mistral Large 3 scales it, but from the eighth position on."""
    scaling = {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.5}}
    before = run(job({}, plugin=False, changes=scaling))
    after = run(job(FLAG, changes=scaling))
    assert before["tokens"] != alone["tokens"], "nothing is scaled: this test shows nothing"
    assert own_log(after) == [("INFO", SUMMARY)]
    assert after["steps"][0]["model.layers.0.self_attn.attn"]["fused"] == NEW_TOKENS - 1
    assert after["tokens"] == before["tokens"]
    assert after["logprobs"] == before["logprobs"]


@pytest.fixture(scope="module")
def warm(job, fused):
    """Two engines on the cache that `fused` left; then the provider of the first one fails."""
    return run(job(FLAG | {"engines": 2, "fault": True}, cache=fused["cache"]))


def test_warm_compile_cache_still_yields_the_report(fused, warm):
    assert not warm["graphs"], "a pass ran: the cache was cold and this test shows nothing"
    assert own_log(fused) == [("INFO", SUMMARY)]
    assert own_log(warm) == [("INFO", SUMMARY + CACHED)] * 2


def test_two_engines_in_one_process(fused, warm):
    assert len(warm["engines"]) == 2
    for engine in warm["engines"]:
        assert engine["tokens"] == fused["tokens"]
        assert engine["logprobs"] == fused["logprobs"]
        assert engine["steps"] == fused["steps"]


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(False, True), (True, False)], ids=str)
def test_two_engines_of_which_one_has_the_flag(job, alone, flags):
    """Each serves, then the first again, whose objects were made before the second changed vLLM."""
    both = run(job({"flags": flags}))
    assert [each["tokens"] for each in both["engines"]] == [alone["tokens"]] * 4
    assert [each["logprobs"] for each in both["engines"]] == [alone["logprobs"]] * 4
    assert [line for _, line in own_log(both)] == [SUMMARY]


def test_provider_that_raises_in_a_step_ends_the_engine_with_what_to_do(warm):
    """No token of the step is handed out, and the traceback ends with the note."""
    text = " ".join(warm["fault"].split())
    assert "RuntimeError: planted: an illegal memory access was encountered" in text
    assert "mla_fusion: the reference provider failed in a decode step of" in text
    assert "start with another provider" in text


@pytest.mark.parametrize(
    "method, ranks",
    [("spawn", 1), *(pytest.param(*each, marks=pytest.mark.nightly)
                     for each in (("fork", 1), ("spawn", 2)))],
)  # fmt: skip
def test_engine_and_workers_in_processes_of_their_own(job, alone, tmp_path, method, ranks):
    def start(options, folder, **fields):
        folder.mkdir()
        environment = {
            "PROMETHEUS_MULTIPROC_DIR": str(folder),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("0" * ranks),
        }
        asked = job(options, environment=environment, **fields)
        asked.engine["tensor_parallel_size"] = ranks
        return asked, run(asked)

    options = FLAG | {"processes": method, "killed": ranks > 1}
    asked, apart = start(options, tmp_path / "fused")
    assert apart["children"] == [f"{method.capitalize()}Process"]  # the engine core
    on = f" fused on {ranks} ranks;" if ranks > 1 else " fused;"
    assert own_log(apart) == [("INFO", SUMMARY.replace(" fused;", on))]
    assert len(list(Path(asked.cache).rglob("mla_fusion/*.json"))) == 1
    if ranks > 1:
        assert "VllmWorker-1 died unexpectedly" in apart["log"]
        assert "EngineDeadError" in apart["fault"]
        # Ranks round the halves of a sum to bf16, so vLLM alone needs as many. They are forked to
        # inherit the stand-in for vLLM's last pass, which raises on a CPU.
        _, alone = start({"processes": "fork"}, tmp_path / "alone", plugin=False)
    assert apart["tokens"] == alone["tokens"]
    # The requests reach the engine core one by one, so prompts may enter in several passes; a CPU
    # with AMX adds in an order that depends on them. With two ranks, forked engines with the flag
    # and without agree to the bit. A spawned one with the flag differs by 0.0018 from a forked one
    # with it, also with a single prompt: why is not known. Another compile mode differs by 0.05.
    for ours, theirs in zip(apart["logprobs"], alone["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3 if ranks == 1 else 5e-3)
    assert len(apart["steps"]) == ranks
    for [steps] in (rank.values() for rank in apart["steps"]):
        assert steps["fused"] >= NEW_TOKENS - 2 and steps["unfused"] >= 1
    # Written by the process of the engine core, and read here as vLLM's /metrics does.
    assert apart["exported"] == steps


@pytest.mark.nightly
def test_ranks_of_data_parallelism_idle_and_with_other_batches(job, alone):
    """They step together: one without a request runs dummy steps, the second for three steps after
    its first request, the first at the end."""
    port = get_open_port()
    started = []
    arrivals = [(0, 0), (0, 1), (8, 2)], [(0, 3), (NEW_TOKENS + 3, 0)]  # step, index of a prompt
    for rank, arriving in enumerate(arrivals):
        variables = {"SIZE": 2, "RANK": rank, "RANK_LOCAL": 0, "MASTER_PORT": port}
        environment = {f"VLLM_DP_{name}": str(value) for name, value in variables.items()}
        experts = {"n_routed_experts": 2}  # which no layer has; without them ranks never meet
        options = FLAG | {"processes": "spawn"}
        prompts = [(step, PROMPTS[index][1]) for step, index in arriving]
        asked = job(options, changes=experts, prompts=prompts, environment=environment)
        started.append((asked, child.start(asked)))
    results = [child.result(*each)["engines"][0] for each in started]
    for result, arriving in zip(results, arrivals, strict=True):
        assert result["tokens"] == [alone["tokens"][index] for _, index in arriving]
    log = Path(started[0][0].workdir, child.LOG).read_text()
    assert SUMMARY.replace(" fused;", " fused on 2 ranks;") in log
    counts = {"fused": 18, "unfused": 2}, {"fused": 22, "unfused": 2}  # no dummy steps
    assert [[*steps.values()] for r in results for steps in r["steps"]] == [[c] for c in counts]


@pytest.mark.nightly
def test_an_engine_starts_over_a_damaged_file_of_measurements(job, fused, tmp_path):
    path = tmp_path / "mla_fusion/tables" / measured.file_name("NVIDIA H20")
    path.parent.mkdir(parents=True)
    path.write_text('{"gpu": "NVIDIA H20", "kernels": 1}')
    damaged = run(job(FLAG | {"gpu": "NVIDIA H20"}, cache=tmp_path))
    assert damaged["log"].count(f"{path} is damaged (kernels: ") == 1
    assert damaged["tokens"] == fused["tokens"] and SUMMARY in damaged["log"]


@pytest.mark.nightly
@pytest.mark.parametrize("asked", [FLAG | {"one_graph": True}, {"custom_pass": True}], ids=str)
def test_one_graph_for_all_steps_with_the_flag_or_the_pass_in_vllms_hook(job, asked):
    alone = run(job({"one_graph": True}, plugin=False))
    found = run(job(asked, plugin="flag" in asked))
    assert ops.FUSED in found["graphs"]["1-4"]
    name = prefill_range(alone)
    assert found["graphs"][name] == alone["graphs"][name]
    assert found["tokens"] == alone["tokens"]
    assert found["logprobs"] == alone["logprobs"]


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)]
)
def decodes(job, fused, request):
    """The type, and the flag with vLLM's decode and with the portable one as if on a GPU."""
    dtype, portable = request.param, FLAG | {"attention": "portable", "gpu": "NVIDIA A100"}
    backend = fused if dtype == "float32" else run(job(FLAG, dtype))
    return dtype, backend, run(job(portable, dtype))


def test_invariant_2_what_inductor_gets_for_decode_leaves_prefill_as_it_is(decodes):
    _, cpu, gpu = decodes
    name = prefill_range(cpu)
    assert gpu["kernels"][name] == cpu["kernels"][name]
    thresholds = [found["kernels"]["1-4"][2] for found in (gpu, cpu)]
    assert thresholds == [1, cpu["kernels"][name][2]] and thresholds[1] > 1


def test_the_portable_decode_gives_the_same_tokens_from_one_refresh_a_step(decodes, fused):
    """In bf16 its epilogue multiplies with W_UV, and bf16 logits of 8 to 16 are 1/16 apart. So each
    decode is compared with float32, from which vLLM's is 0.023 apart and the portable one 0.022.
    """
    _, backend, portable = decodes
    assert backend["refreshes"] == []
    # All four prompts are prefilled in one step; then every step decodes four tokens, and the
    # three layers share its plan. Before them, a warm-up of one token.
    assert portable["refreshes"] == [[1, 1]] + [[4, 4]] * (NEW_TOKENS - 1)
    assert portable["tokens"] == backend["tokens"]
    exact = torch.tensor(fused["logprobs"])
    errors = [torch.tensor(found["logprobs"]) - exact for found in (portable, backend)]
    ours, theirs = (error.square().mean().sqrt() for error in errors)
    assert ours <= 1.1 * theirs + 1e-5
