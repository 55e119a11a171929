"""benchmarks/engine.py without its engines: comparison, weights and rows."""

import argparse
import io
import math
import subprocess
import sys
import time
import types

import engine
import engine_compare
import engine_jobs
import engine_model
import engine_share
import engine_worker
import pytest
import torch

from mla_fusion.attention import triton_epilogue
from mla_fusion.cli import child
from tests.engine_results import BASE, TOKENS, result

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


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(TOKENS, "not judged: the unfused paths"), ([1, 2, 77, 9], "WRONG: a token differs")],
)
def test_equal_unfused_paths_are_no_measure(tokens, word):
    same = engine_compare.compare(BASE, BASE)
    moved = engine_compare.compare(
        result(TOKENS, [2.0, 2.5, 2.0, 2.0]), {**BASE, "tokens": [tokens]}
    )
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
        "cat": BASE | result(TOKENS, [2.0, 2.1, 2.0, 2.0]),
        "stored": BASE | result(TOKENS, [stored] * 4),
        "fused": BASE | result(TOKENS, [2.1] * 4),
    }
    unfused = ("cat", "stored")
    assert engine_compare.judge("fused", unfused, results).startswith(verdict)
    assert engine_compare.judge("stored", unfused, results) == "not judged"
    del results["cat"], results["stored"]
    assert engine_compare.judge("fused", unfused, results) == "not judged"


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


def test_an_engine_without_time_is_ended_with_its_children(tmp_path):
    """Or a run that is cut off would lose the results of the others."""
    command = "import subprocess; subprocess.run(['sleep', '600'])"
    worker = subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    began = time.monotonic()
    (tmp_path / child.LOG).write_text("compiling a sampler")
    error = engine_jobs.finish(child.Job(str(tmp_path), ""), worker, 1.0)["error"]
    assert "no time left" in error and error.endswith("compiling a sampler")
    # The pipe is open as long as a child holds it.
    assert time.monotonic() - began < 60 and worker.returncode


def test_data_parallel_engines_meet_and_their_requests_are_joined(monkeypatch):
    started = []

    def start(options, variables):
        started.append((options["device"], variables))
        return options, None

    def finish(options, _, seconds):
        if options["arm"] == "cat" and options["dp_rank"]:
            return {"error": "why"}
        rank = options["dp_rank"]
        return {"tokens": [[rank]], "top": [rank], "runner": "V2", "ranges": [rank]}

    monkeypatch.setattr(engine_jobs, "start", start)
    monkeypatch.setattr(engine_jobs, "finish", finish)
    asked = engine_jobs.job(dp=2, device="2,3")
    joined = engine_jobs.run(asked, 1.0)
    assert joined == {"tokens": [[0], [1]], "top": [0, 1], "runner": "V2", "ranges": [0]}
    [(first, of_first), (second, of_second)] = started
    assert (first, second) == ("2", "3")
    different = {name for name in of_first if of_first[name] != of_second[name]}
    assert different == {"VLLM_DP_RANK"} and of_second["VLLM_DP_SIZE"] == "2"
    assert engine_jobs.run(asked | {"arm": "cat"}, 1.0) == {"error": "why"}


@pytest.mark.parametrize(("visible", "named"), [("", "1,2"), ("4,5,7", "5,7")])
def test_an_engine_gets_gpus_that_the_benchmark_may_use(monkeypatch, visible, named):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert engine_jobs.devices(1, 2) == named


@pytest.mark.parametrize(("refreshes", "word"), [(2, "right"), (5, "WRONG: {")])
def test_portable_is_a_row_of_its_own_and_must_refresh_once_a_pass(monkeypatch, refreshes, word):
    """Two passes, of four layers and of the drafter's: a refresh in each layer would be five."""
    name, sizes = "r1-tp8 fp8 mtp-1", [[1, 16, 5, 5, 0]]
    counts = {"prep_kernel": 5, "plan_kernel": refreshes, "decode_kernel": 5}
    launches = {"5": {**counts, "reduce_kernel": 5, "epilogue_kernel": 0}}
    fused = {**BASE, "steps": 9, "ranges": sizes}
    portable = {**fused, "launches": launches, "quantizations": ["none"]}
    arms = {"default": BASE, "cat": BASE, "fused": fused, "portable": portable}
    results = {(name, arm): each for arm, each in arms.items()}
    monkeypatch.setattr(engine, "run_arms", lambda *_: results)
    rows, wrong = engine.tokens(argparse.Namespace(plant=(), tp=1, dp=1, dcp=1))
    assert [row["configuration"] for row in rows] == [name, f"{name}, portable"]
    assert rows[0].keys() == rows[1].keys() and rows[0]["verdict"] == "right"
    assert rows[1]["verdict"].startswith(word) and wrong == (word != "right")


@pytest.mark.parametrize(
    ("model", "one", "five"),
    [
        ("r1-tp8", (0, 4), (4, 0)),
        ("r1-tp8-block", (0, 4), (0, 4)),
        ("r1-dp", (4, 0), (4, 0)),  # 128 heads
    ],
)
def test_portable_ends_with_the_epilogue_where_it_is_chosen(model, one, five):
    launched = engine.portable_launches(engine_jobs.job(layers=4, model=model))
    merged = {
        rows: (each["reduce_kernel"], each["epilogue_kernel"]) for rows, each in launched.items()
    }
    assert merged == {"1": one, "5": five}
    heads, latent, values = (engine_model.MODELS[model][key] for key in (
        "num_attention_heads", "kv_lora_rank", "v_head_dim"
    ))  # fmt: skip
    quantization = "group" if model == "r1-tp8-block" else "none"
    for rows, (_, ended) in merged.items():
        shape = triton_epilogue.choose(int(rows), heads, latent, values, quantization)
        assert (shape is not None) == bool(ended)


@pytest.mark.parametrize(
    ("native", "planted", "word", "found"),
    [
        ([2.1] * 4, [2.0, 3.0, 2.0, 2.0], "right", "WRONG: log-probabilities move 5.0"),
        ([2.1] * 4, [2.1] * 4, "right", "right"),
        ([2.05] * 4, [2.0, 3.0, 2.0, 2.0], "WRONG: log-probabilities move 2.0", "WRONG"),
        ([2.0] * 4, [2.0, 3.0, 2.0, 2.0], "not judged: the unfused", "not judged"),
    ],
)
def test_block_fp8_is_measured_by_more_unfused_arms(monkeypatch, native, planted, word, found):
    """`cat` and `stored` equal `default` in every bit; an error that is not found is one."""
    started = []
    gaps = {"native": native, "planted": planted, "fused": [2.1] * 4, "portable": [2.1] * 4}

    def run(job, left):
        started.append(job)
        layers = job["layers"]
        each = dict.fromkeys(("prep_kernel", "decode_kernel", "epilogue_kernel"), layers)
        counts = {"reduce_kernel": 0, "plan_kernel": 1, **each}
        return {**result(TOKENS, gaps.get(job["arm"], [2.0] * 4)), "steps": 9, "runner": "V1",
                "ranges": [[1, 16, layers, layers, 0]], "launches": {"1": counts, "5": counts},
                "quantizations": ["group"]}  # fmt: skip

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr("vllm.utils.import_utils.has_deep_gemm", lambda: True)
    only = "r1-tp8 block-fp8,v2-lite fp8 V1"
    args = argparse.Namespace(plant=(), tp=1, dp=1, dcp=1, only=only, seconds=1e9, jobs=1)
    rows, wrong = engine.tokens(args)
    plain, block, _, portable, other = rows
    assert other["verdict"].startswith("WRONG: outputs quantized ['group']; ")
    arms = {job["arm"] for job in started if job["variables"] == engine.CUTLASS}
    assert arms == {"default", "cat", "stored", "native", "fused", "portable", "planted"}
    assert arms == {job["arm"] for job in started if job["variables"] == engine.DEEP_GEMM}
    assert [j["arm"] for j in started if j["model"] == "v2-lite"] == ["default", "cat", "fused"]
    assert block["verdict"].startswith(word) and portable["verdict"].startswith(word)
    assert block["planted"].startswith(found) and portable["planted"] == ""
    assert plain.keys() == block.keys() == portable.keys() and not plain["native / default"]
    moved = abs(native[0] - 2.0)
    assert f"moves by {moved:.4f}" in block["native / default"]
    assert all("moves by 0.0000" in block[f"{arm} / default"] for arm in ("cat", "stored"))
    unfused_are_equal = plain["verdict"] != "right"
    both = 2 * (word != "right" or found == "right")
    assert unfused_are_equal and wrong == 2 + both + (word != "right")


def test_scales_for_deep_gemm_are_left_out_without_it(monkeypatch, capsys):
    """vLLM would take another linear layer, whose scales are not powers of two."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(engine, "run", lambda job, left: {})
    monkeypatch.setattr("vllm.utils.import_utils.has_deep_gemm", lambda: False)
    args = argparse.Namespace(plant=(), tp=1, dp=1, dcp=1, only="", seconds=1e9, jobs=1)
    plain, scaled = engine.QUANTIZED
    found = engine.run_arms({plain: {}, scaled: {}}, args)
    assert {name for name, _ in found} == {plain}
    assert f"{scaled}: left out, DeepGEMM is not installed" in capsys.readouterr().out


def test_a_job_reaches_its_engine(monkeypatch, tmp_path):
    """The variables of its environment, and what tells the arm `native` from `default`."""
    monkeypatch.setattr(child, "start", lambda job, **_: job.environment)
    environment = engine_jobs.start(engine_jobs.job(variables=engine.CUTLASS))[1]
    assert environment.items() >= engine.CUTLASS.items()
    asked = engine_jobs.job(model="r1-tp8-block", variables=engine.CUTLASS)
    default, native = (
        engine_model.arguments(asked | {"arm": arm}, tmp_path) for arm in ("default", "native")
    )
    ops = native["compilation_config"].pop("custom_ops")
    loader = "model_loader_extra_config"
    assert ops == ["-quant_fp8"] and native.pop(loader) != default.pop(loader)
    assert native == default


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fused", "word"), [(4, "right"), (3, "WRONG: fused 3 of 4 layers"), (4, "no row")]
)
def test_with_several_gpus_every_layer_must_be_fused(monkeypatch, tp, fused, word):
    started = []
    moved = {"cat": [2.0, 2.1, 2.0, 2.0], "planted": [2.0, 3.0, 2.0, 2.0]}

    def run(job, left):
        started.append(job)
        if (word, job["arm"]) == ("no row", "planted"):
            return {"error": "why"}
        ranges = [[1, 16, 4, fused, 4 - fused]]
        return {**result(TOKENS, moved.get(job["arm"], [2.0] * 4)), "steps": 9, "ranges": ranges,
                "runner": "V2"}  # fmt: skip

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(engine, "run", run)
    args = argparse.Namespace(plant=(), tp=tp, dp=2 // tp, dcp=1, only="", seconds=1e9, jobs=1)
    rows, wrong = engine.tokens(args)
    assert [job["arm"] for job in started][-2:] == ["planted"] * 2
    assert {job["device"] for job in started} == {"0,1", "2,3"}
    assert {(job["tp"], job["dp"]) for job in started} == {(args.tp, args.dp)}
    assert {row["gpus"] for row in rows} <= {2}
    assert all(row["planted"].startswith("WRONG: log-probabilities") for row in rows)
    assert all(row["verdict"].startswith(word) for row in rows)
    assert wrong == (0 if word == "right" else 2) and len(rows) == (0 if word == "no row" else 2)


def test_context_parallelism_is_measured_against_an_engine_without_it(monkeypatch):
    """vLLM's own fusion, the arm `cat`, is wrong there."""
    started = []

    def run(job, left):
        started.append(job)
        moved = [2.0, 2.1, 2.0, 2.0] if job["dcp"] == 1 else [2.0] * 4
        return {**result(TOKENS, moved), "steps": 9, "ranges": [[1, 16, 4, 4, 0]], "runner": "V1"}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(engine, "run", run)
    args = argparse.Namespace(plant=(), tp=2, dp=1, dcp=2, only="k2-tp4 fp8", seconds=1e9, jobs=1)
    rows, _ = engine.tokens(args)
    assert [(job["arm"], job["dcp"]) for job in started] == [
        ("default", 2), ("default", 1), ("fused", 2), ("planted", 2)
    ]  # fmt: skip
    assert rows[0]["verdict"] == "right" and "tp / default" in rows[0]


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


@pytest.mark.parametrize(("graphs", "median"), [([3.0] * 19 + [9.0], 3.0), ([1.0] * 40, None)])
def test_a_step_that_is_not_one_graph_has_no_gpu_time(monkeypatch, graphs, median):
    monkeypatch.setattr(engine_worker, "graph_times", lambda step, count: graphs)
    if median is None:
        with pytest.raises(RuntimeError, match="20 decode steps replayed 40 CUDA graphs"):
            engine_worker.full_graph_time(None)
    else:
        assert engine_worker.full_graph_time(None) == median


def test_experts_fp8_weights_and_ranks():
    """Of 16 layers, each adds half as much as one of four; a rank has its own part."""

    def model(rank):
        sizes = {
            "experts.w13_weight": (2, 8, 64), "experts.w13_weight_scale_inv": (2, 1, 1),
            "experts.w2_weight": (2, 64, 8), "gate.weight": (2, 64), "attn.k_scale": (),
            **{f"{i}.o_proj.weight": (64, 64) for i in range(15)}, "wide.o_proj.weight": (8, 20480),
        }  # fmt: skip
        named = {name: torch.full(size, -1.0) for name, size in sizes.items()}
        named["experts.w13_weight"] = named["experts.w13_weight"].to(torch.float8_e4m3fn)
        engine_model.initialize(types.SimpleNamespace(named_parameters=named.items), rank)
        return {name: weight.float() for name, weight in named.items()}

    first, second = model(0), model(1)
    assert first["attn.k_scale"] == -1
    scaled = first["experts.w13_weight"] * first["experts.w13_weight_scale_inv"]
    for weight, limit in (
        (scaled, 0.06), (first["experts.w2_weight"], 0.003), (first["0.o_proj.weight"], 0.03),
        (first["wide.o_proj.weight"], 0.015),
    ):  # fmt: skip
        assert 0.9 * limit < weight.max() < 1.07 * limit and abs(weight.mean()) < 0.1 * limit
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {"experts.w13_weight_scale_inv", "gate.weight", "attn.k_scale"}


def test_engines_share_equal_weights_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(engine_share, "reduce_tensor", lambda w: (torch.Tensor.clone, (w,)))
    models = [torch.nn.Linear(1024, 512, dtype=torch.bfloat16) for _ in range(3)]
    models[1].load_state_dict(models[0].state_dict())
    own, file = models[1].weight.data_ptr(), io.BytesIO()
    for model in models[:2]:
        engine_share.share(model, file)
    assert models[1].weight.data_ptr() != own and torch.equal(models[0].weight, models[1].weight)
    with pytest.raises(RuntimeError, match="weight weight differs between two arms"):
        engine_share.share(models[2], file)
