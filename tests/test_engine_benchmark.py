"""benchmarks/engine.py without its engines: verdicts and rows."""

import argparse
import math
import queue
import subprocess
import sys
import time
import types

import engine
import engine_compare
import engine_complete
import engine_jobs
import engine_model
import engine_worker
import pytest
import torch
from engine_jobs import job

from mla_fusion.config import vllm_compat


def result(tokens, gaps):
    """One sequence as an engine sends it; in every context token 100 + chosen is second, `gap`
    below."""
    return {
        "tokens": [tokens],
        "top": [[[[t, -0.1], [t + 100, -0.1 - g]] for t, g in zip(tokens, gaps, strict=True)]],
    }


TOKENS = [1, 2, 3, 4]
BASE = {**result(TOKENS, [2.0] * 4), "runner": "V2", "all_reduce": ""}
# Gaps move by 0.1 in one of four contexts: that is the noise.
NOISY = [2.0, 2.1, 2.0, 2.0]
NOISE = engine_compare.compare(result(TOKENS, NOISY), BASE)


@pytest.mark.parametrize(
    ("gaps", "tokens", "count", "verdict"),
    [
        ([2.0, 2.0, 1.9, 2.0], TOKENS, 1, "right"),
        ([2.0, 2.0, 0.05, 2.0], [1, 2, 103, 9], 9, "right"),  # a near tie
        # The gap is wider than any move of the unfused pair.
        ([2.0, 2.0, 0.15, 2.0], [1, 2, 103, 9], 4, "right"),
        ([2.0, 2.0, 0.15, 2.0], [1, 2, 103, 9], 5, "WRONG: 5 tokens differ at gaps of up to 0.15"),
        ([2.0, 2.0, 0.25, 2.0], [1, 2, 103, 9], 1, "WRONG: 1 tokens differ at gaps of up to 0.25"),
        ([2.0] * 4, [1, 2, 77, 9], 1, "WRONG: 1 tokens differ at gaps of up to inf"),
        # The tokens are equal and their probabilities are not.
        ([2.08] * 4, TOKENS, 1, "WRONG: log-probabilities move 1.6 times as far"),
        ([math.nan] * 4, TOKENS, 1, "WRONG: NaN"),
    ],
)
def test_verdict(gaps, tokens, count, verdict):
    made = result(TOKENS, gaps)
    top = made["top"] if tokens[2] == 103 else BASE["top"]
    ours, other = (
        {"tokens": [chosen] * count, "top": each * count}
        for chosen, each in ((TOKENS, made["top"]), (tokens, top))
    )
    difference = engine_compare.compare(ours, other)
    assert difference.equal == count * (tokens == TOKENS)
    assert engine_compare.verdict(difference, NOISE).startswith(verdict)


@pytest.mark.parametrize(
    ("tokens", "word"),
    [(TOKENS, "not judged: the unfused paths"), ([1, 2, 77, 9], "WRONG: 1 tokens differ")],
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


FAR, ALL = [2.0, 3.0, 2.0, 2.0], [2.1] * 4
NAME = "r1-tp8 block-fp8"


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
def test_block_fp8_is_measured_by_more_unfused_arms(gaps, instead, word, found):
    """`cat` and `stored` equal `default` in every bit."""
    asked = job(**engine.configurations(1)[NAME])
    layers = asked["layers"]
    counts = dict.fromkeys(engine.KERNELS, layers) | {"mla_plan": 1}
    says = {"steps": 9, "runner": "V1", "all_reduce": "", "quantizations": ["group"], **instead}
    says = {"ranges": [[1, 16, layers, layers, 0]], "launches": {"1": counts, "5": counts}} | says
    gaps = {"fused": ALL, "portable": ALL} | gaps
    for ours in ("fused", "portable"):
        arms = {
            arm: result(TOKENS, gaps.get(arm, [2.0] * 4)) | says
            for arm in ("default", *engine.unfused(NAME, {}), ours, "planted")
        }
        row = engine.judged(NAME, ours, arms, asked)
        only_of_portable = "launches" in instead or "quantizations" in instead
        as_fused = ours == "fused"
        assert row["verdict"].startswith("right" if as_fused and only_of_portable else word)
        assert row["planted"].startswith(found) if as_fused else row["planted"] == ""
        assert "moves by 0.0000" in row["stored / default"]


def test_ranks_divide_the_work_in_each_way_and_an_error_is_planted_in_all(monkeypatch):
    jobs = []

    def run(options, seconds):
        jobs.append(options)
        # vLLM's own fusion, the arm `cat`, is wrong where ranks share a cache.
        other = options["arm"] == "cat" or (options["model"], options["dcp"]) == ("k2-tp4", 1)
        gaps = FAR if options["arm"] == "planted" else NOISY if other else [2.0] * 4
        said = {"steps": 9, "ranges": [[1, 16, 5, 5, 0]]}
        return BASE | said | result(TOKENS, gaps)

    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ways = " tp2", " dp2", " dcp2"
    args = argparse.Namespace(gpus=2, ways=ways, only="mtp-1", jobs=1, seconds=9, plant=(),
                              multicast=True)  # fmt: skip
    found = [(row["planted"][:5], wrong) for [row], wrong in engine.tokens(args)]
    assert found == [("WRONG", 0)] * 3
    assert [each["arm"] for each in jobs] == [
        *("default", "cat", "auto", "planted") * 2, "default", "default", "auto", "planted"
    ]  # fmt: skip
    ranks = [(each["tp"], each["dp"], each["dcp"], each["device"]) for each in jobs]
    assert ranks[::4] == [(2, 1, 1, "0,1"), (1, 2, 1, "0,1"), (2, 1, 2, "0,1")]
    assert ranks[9] == (2, 1, 1, "0,1") and all(each["multicast"] for each in jobs)


@pytest.mark.parametrize("multicast", [False, True])
def test_all_reduces_that_need_multicast_are_left_to_vllm_where_asked(multicast, monkeypatch):
    works = []
    monkeypatch.setattr(engine_jobs.child, "start", lambda work, **_: works.append(work))
    asked = job(tp=2, multicast=multicast)
    engine_jobs.start(asked)
    off = {name: works[0].environment.get(name) for name in engine_jobs.NO_MULTICAST}
    passes = engine_model._configs(asked)["compilation_config"]["pass_config"]
    assert (off == engine_jobs.NO_MULTICAST) is not multicast
    assert ("fuse_allreduce_rms" in passes) is not multicast


def test_engines_have_ports_of_their_own_that_no_connection_takes(monkeypatch):
    works = []
    monkeypatch.setattr(engine_jobs.child, "start", lambda work, **_: works.append(work))
    for ranks in (2, 1):
        engine_jobs.start_ranks(job(dp=ranks, device="0,1"))
    ports = [int(work.environment["VLLM_PORT"]) for work in works]
    first, second = (int(work.environment["VLLM_DP_MASTER_PORT"]) for work in works[:2])
    assert first == second
    assert sorted({first, *ports}) == list(range(first, first + 40, 10))
    assert 20000 <= first < 32768


def test_rows_are_written_as_they_come(monkeypatch, tmp_path):
    def tokens(args):
        yield [{"configuration": "first"}], 0
        raise RuntimeError("cut")

    monkeypatch.setitem(engine.MEASURES, "tokens", tokens)
    monkeypatch.setattr(engine, "environment", lambda *_: {})
    monkeypatch.setattr(sys, "argv", ["engine.py", "tokens", str(tmp_path / "rows.csv")])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="cut"):
        engine.main()
    assert "first" in (tmp_path / "rows.csv").read_text()


@pytest.mark.parametrize("last", [False, True])
def test_the_last_rank_alone_has_the_planted_error(last, monkeypatch):
    planted = []
    group = types.SimpleNamespace(is_last_rank=last)
    monkeypatch.setattr(engine_worker, "get_world_group", lambda: group)
    monkeypatch.setattr(engine_worker, "rotate_for_the_next_position", lambda: planted.append(1))
    monkeypatch.setattr(engine_worker.BaseModelLoader, "load_model", lambda self: None)
    loader = object.__new__(engine_worker.Loader)
    extra = {"arm": "planted", "shared_weights": ""}
    loader.load_config = types.SimpleNamespace(model_loader_extra_config=extra)
    loader.load_model()
    assert planted == [1] * last


@pytest.mark.parametrize(
    ("tp", "drafts", "replays", "found"),
    [
        (1, 0, [3.0] * 20, 3.0), (1, 0, [3.0] * 21, ""), (2, 0, [3.0] * 23, 3.0),
        (2, 0, [3.0] * 30, 3.0), (2, 0, [3.0] * 31, ""), (2, 1, [3.0, 1.0] * 22, 4.0),
        (2, 1, [1.0] * 99, None),
    ],
)  # fmt: skip
def test_the_gpu_time_of_each_rank_is_that_of_its_graphs(tp, drafts, replays, found):
    """Of a forward pass, and of a draft; runner V1 drafts in pieces, which are not timed."""
    asked = []
    core = types.SimpleNamespace(
        call_utility=lambda name, *_: asked.append(name), outputs_queue=queue.Queue(),
        get_output=lambda: asked.append(core.outputs_queue.get()),
    )  # fmt: skip
    core.outputs_queue.put("output")  # of a step that ran before the pause
    llm = types.SimpleNamespace(
        collective_rpc=lambda what: asked.append(what) or [replays] * 2,
        llm_engine=types.SimpleNamespace(engine_core=core),
    )
    job = {"tp": tp, "drafts": drafts}
    if found == "":
        with pytest.raises(RuntimeError, match="that of one full graph"):
            engine_worker.full_graph_times(llm, asked.append, job)
    else:
        times = engine_worker.full_graph_times(llm, asked.append, job)
        assert times == ({"gpu": found, "gpu1": found} if found else {})
    steps = [engine_worker.STEPS]
    if tp > 1:  # an engine in a process of its own steps by itself, and may be ahead
        steps = ["resume_scheduler", *steps, "pause_scheduler", "output"]
    assert asked == ["time_replays", *steps, "replay_times"]


def test_a_process_without_a_gpu_of_its_own_starts_no_cuda_while_it_times(monkeypatch):
    """The engine steps on meanwhile: all its steps were over before they were timed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("CUDA starts"))
    assert engine_worker.clocked(lambda count: time.sleep(count / 1e3), 2) > 1e3


@pytest.mark.parametrize(
    ("enabled", "found"),
    [(("fi_ar_comm", "ca_comm"), "FlashInfer"), (("ca_comm", "pynccl_comm"), "custom"), ((), "")],
)
def test_rows_name_the_all_reduce_that_vllm_tries_first(enabled, found, monkeypatch):
    """One that could not start is there, and disabled; with one rank there is no communicator."""
    every = ("fi_ar_comm", "ca_comm", "pynccl_comm")
    made = {n: types.SimpleNamespace(disabled=n not in enabled) for n in every}
    communicator = types.SimpleNamespace(**made) if enabled else None
    group = types.SimpleNamespace(device_communicator=communicator)
    monkeypatch.setattr(engine_worker, "get_tp_group", lambda: group)
    layer = types.SimpleNamespace(get_attn_backend=lambda: types.SimpleNamespace(get_name=str))
    monkeypatch.setattr(vllm_compat, "mla_layers", lambda _: {"layer": layer})
    compilation = types.SimpleNamespace(static_forward_context={})
    config = types.SimpleNamespace(compilation_config=compilation)
    worker = types.SimpleNamespace(vllm_config=config, model_runner=None)
    assert engine_worker.Worker.engine_facts(worker)["all_reduce"] == found


def test_complete_starts_as_many_cases_of_ranks_as_fit(monkeypatch):
    """A case of V2-Lite takes 2 x 24 GB of a GPU, one of R1 2 x 10 to 14."""
    started, timed, limits = [], [], []
    monkeypatch.setattr(engine_complete, "gpu_bytes", lambda: 100e9)
    monkeypatch.setattr(engine_complete, "start_ranks", started.append)
    monkeypatch.setattr(engine_complete, "ready", lambda engines, end: limits.append(end) or {})
    monkeypatch.setattr(
        engine_complete,
        "timed",
        lambda title, *_: timed.append((title, len(started))) or ([], True),
    )
    args = argparse.Namespace(
        what="complete", gpus=2, ways=("",), only="", drafts=0, layers=0, arms="", seconds=99,
        multicast=False, graphs="PIECEWISE",
    )  # fmt: skip
    end = time.time() + args.seconds
    assert [wrong for _, wrong in engine_complete.complete(args)] == [True] * 8  # none was ready
    assert max(limits) < end - 20  # one that hangs leaves time for the others
    assert timed == [
        *((f"deepseek-v2-lite fp8 {kind}2", 4) for kind in ("tp", "dp")),
        *((f"deepseek-r1-deep fp8 {drafts}tp2", 12) for drafts in ("", "mtp-1 ")),
        *((f"r1-ep fp8 {drafts}dp2", 12) for drafts in ("", "mtp-1 ")),
        ("deepseek-r1-deep fp8 dcp2", 16), ("deepseek-r1-deep fp8 mtp-1 dcp2", 16),
    ]  # fmt: skip
    assert [each["capture"][:2] for each in started[4:8:2]] == [[1, 8], [2, 16]]
    assert {(each["cudagraph_mode"], each["tokens"]) for each in started} == {("PIECEWISE", 64)}


def test_complete_judges_layers_and_takes_changes_of_medians_against_default():
    results = {"default": BASE, "cat": result(TOKENS, NOISY)}
    blocks = {"quantization_config": {}}  # of which `native` alone is a measure
    for fused, said in ((3, "right"), (2, "WRONG: not fused in every layer")):
        results["fused"] = BASE | {"ranges": [[1, 128, 3, fused, 3 - fused], [129, 8192, 3, 0, 0]]}
        assert engine_complete.verdict("fused", results, 3, {}).startswith(said)
    results["fused"] |= {"ranges": [[1, 128, 3, 3, 0]]}
    assert engine_complete.verdict("fused", results, 3, blocks) == "not judged"
    ours, default = ([{"gpu": us + more} for us in (14, 12, 10)] for more in (-1.04, 0))
    assert engine_complete.columns(ours, default) == {
        "gpu_us": 11, "gpu_min": 9, "gpu_max": 13, "gpu_change": -8.33
    }  # fmt: skip


@pytest.mark.parametrize("fails", [0, 1])
def test_an_arm_of_which_one_rank_fails_leaves_the_others(fails, monkeypatch, capsys):
    """The rank that failed is shown, and its peers are ended, which would wait for it forever."""
    ended = []

    def finish(work, process, seconds):
        ended.append((work, seconds))
        process.kill()
        process.communicate()
        return {"error": f"log of {work}"} if seconds else {}

    def engine(work, answer):
        program = f"import time; print({answer!r}, flush=True); time.sleep(99)" if answer else ""
        command = [sys.executable, "-c", program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return work, subprocess.Popen(command, **pipes)

    monkeypatch.setattr(engine_jobs, "finish", finish)
    answers = ['{"tokens": [1], "top": [0]}', '{"tokens": [2], "top": [0]}']
    broken = [engine(f"broken{i}", "" if i == fails else answers[i]) for i in range(2)]
    whole = [engine(f"whole{i}", answers[i]) for i in range(2)]
    engines = {"broken": broken, "whole": whole}
    assert engine_jobs.ready(engines, time.time() + 60) == {
        "whole": {"tokens": [1, 2], "top": [0, 0]}
    }
    assert [*engines] == ["whole"] and f"log of broken{fails}" in capsys.readouterr().out
    assert ended == [(f"broken{fails}", engine_jobs.ENDS), (f"broken{1 - fails}", 0)]
    for work, process in whole:
        finish(work, process, 0)
