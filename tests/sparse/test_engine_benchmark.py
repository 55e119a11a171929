"""`benchmarks/engine.py sparse` without its engines: the indexer, arms, verdicts and rows."""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import engine_complete
import engine_jobs
import engine_model
import engine_sparse
import pytest
import torch

import mla_fusion
from mla_fusion.attention.layouts import FP8_DS_MLA
from mla_fusion.cli import child
from mla_fusion.config import vllm_compat
from mla_fusion.runtime import sparse_step
from tests.sparse.layers import kept_environment

mla_fusion.register()


@pytest.mark.parametrize("layer", [0, 3])
def test_the_indexer_chooses_each_token_once_and_the_last_one(layer):
    import engine_indexer

    width = 32
    positions = torch.tensor([0, 5, 31, 32, 33, 100, 4095])
    chosen = torch.full((9, width), 77, dtype=torch.int32)
    engine_indexer.choose(positions, chosen, layer)
    assert (chosen[7:] == 77).all()
    for position, row in zip(positions.tolist(), chosen.tolist(), strict=False):
        listed = [entry for entry in row if entry >= 0]
        assert len(set(listed)) == len(listed) == min(position + 1, width)
        assert row == listed + [-1] * (width - len(listed))
        assert min(listed) >= 0 and max(listed) == position
    again = torch.zeros_like(chosen)
    engine_indexer.choose(positions, again, layer + 1)
    assert not torch.equal(chosen[5], again[5])


def test_arms_change_what_they_say(monkeypatch):
    import engine_indexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.attention.backends.mla import flashmla_sparse

    monkeypatch.setattr(deepseek_v2, "Indexer", None)
    monkeypatch.setattr(engine_indexer, "has_class_for_cuda", lambda: False)
    monkeypatch.setattr(flashmla_sparse, "MIN_HEADS_FOR_BF16_PREFILL", 32)
    monkeypatch.setattr(sparse_step, "FASTER", sparse_step.FASTER)
    slots = torch.tensor([-1, 0, 7])
    monkeypatch.setattr(vllm_compat, "cache_slots", lambda metadata, chosen: slots)
    for arm in ("default", "custom"):
        engine_indexer.install(arm)
        assert deepseek_v2.Indexer is engine_indexer.Indexer
        assert flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL == 32
        assert sparse_step.most_tokens(128, None) == 0
    engine_indexer.install("other")
    assert flashmla_sparse.MIN_HEADS_FOR_BF16_PREFILL == 0
    engine_indexer.install("ours")
    assert all(
        sparse_step.most_tokens(128, layout) == engine_sparse.SEQS for layout in sparse_step.FASTER
    )
    assert vllm_compat.cache_slots(None, None) is slots
    engine_indexer.install("shifted")
    assert vllm_compat.cache_slots(None, None).tolist() == [-1, 1, 6]


def test_engines_ask_for_their_backend(tmp_path):
    from vllm.engine.arg_utils import EngineArgs

    def asked(arm):
        job = engine_jobs.job(model=engine_sparse.MODEL, arm=arm, cache="fp8_ds_mla", mode=0)
        arguments = engine_model.arguments(job, tmp_path)
        arguments["worker_extension_cls"] = ""  # imports vLLM's workers
        with kept_environment():
            made = EngineArgs(**arguments, skip_tokenizer_init=True).create_engine_config()
        backend = made.attention_config.backend
        return made.cache_config.cache_dtype, backend and backend.name

    assert asked("default") == ("fp8_ds_mla", None)
    assert asked("other") == ("fp8_ds_mla", "FLASHMLA_SPARSE")
    assert asked("custom") == ("fp8_ds_mla", "CUSTOM")
    model = json.loads((tmp_path / "config.json").read_text())
    published = json.loads((Path(__file__).parents[1] / "configs/deepseek-v3.2.json").read_text())
    for size in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim",
                 "q_lora_rank", "hidden_size", "index_topk", "architectures"):  # fmt: skip
        assert model[size] == published[size], size
    assert model["num_attention_heads"] == published["num_attention_heads"] // 8


TOKENS = [1, 2, 3, 4]


def result(gaps, decodes, most):
    """An engine's: tokens, and the kernels of steps of one and of all requests."""
    top = [[[[t, -0.1], [t + 100, -0.1 - g]] for t, g in zip(TOKENS, gaps, strict=True)]]

    def count(n):
        return {"prep_kernel": 0, "plan_kernel": n > 0, "decode_kernel": n, "reduce_kernel": n}

    launches = {"1": count(decodes), "128": count(most)}
    return {"tokens": [TOKENS], "top": top, "launches": launches, "runner": "V1",
            "attention": "FLASHMLA_SPARSE"}  # fmt: skip


RESULTS = {
    "default": result([2.0] * 4, 0, 0),
    "other": result([2.0, 2.1, 2.0, 2.0], 0, 0),
    "custom": result([2.0, 2.0, 2.1, 2.0], 4, 0),
    "ours": result([2.0, 2.0, 2.1, 2.0], 4, 4),
    "shifted": result([2.0, 3.0, 2.0, 2.0], 4, 4),
}


@pytest.mark.parametrize(("cache", "most"), [("fp8_ds_mla", 4), ("auto", 0)])
def test_custom_decodes_every_layer_of_the_steps_in_the_table(cache, most):
    def verdict(decodes):
        return engine_sparse.verdict("custom", {"custom": result([2.0] * 4, 4, decodes)}, cache)

    assert verdict(most) == "not judged"
    assert verdict(4 - most).startswith("WRONG") and verdict(3).startswith("WRONG")


@pytest.mark.parametrize(
    ("arm", "instead", "message"),
    [
        ("", None, ""),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 0, 0), "launches a step of 1"),
        ("custom", result([2.0, 2.0, 2.1, 2.0], 4, 4), "launches a step of 128"),
        ("ours", result([2.0, 2.0, 2.1, 2.0], 4, 0), "launches a step of 128"),
        ("default", result([2.0] * 4, 4, 0), "launches a step of 1"),
        ("ours", RESULTS["shifted"], "log-probabilities move"),
        ("shifted", RESULTS["ours"], "right"),
        ("shifted", result([2.0, 3.0, 2.0, 2.0], 0, 0), "launches a step of 1"),
        ("ours", None, "left out"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_counted_and_the_rest_measured(
    monkeypatch, capsys, tmp_path, arm, instead, message
):
    results = RESULTS | ({arm: instead} if instead else {})
    if message == "left out":
        results = {name: each for name, each in results.items() if name != arm}
    ended, asked = [], []

    def ready(engines, end):
        for name in engines.keys() - results.keys():
            del engines[name]
        return {name: results[name] for name in engines}

    def rounds(engines, batch, context):
        asked.append((*engines, batch))
        return {name: {"gpu_us": 1.0} for name in engines}

    def start(job):
        folder = tmp_path / job["arm"]
        folder.mkdir()
        line = f"INFO attention backend CUSTOM: of {job['arm']}"
        (folder / child.LOG).write_text(f"loading\n{line}\n")
        return child.Job(str(folder), ""), job["arm"]

    monkeypatch.setattr(sparse_step, "FASTER", {FP8_DS_MLA: ((16, 15),)})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(engine_sparse, "start", start)
    monkeypatch.setattr(engine_sparse, "ready", ready)
    monkeypatch.setattr(engine_complete, "rounds", rounds)
    monkeypatch.setattr(engine_sparse, "finish", lambda work, name, seconds: ended.append(name))
    args = argparse.Namespace(only="fp8", arms="", seconds=1e9)
    rows, wrong = engine_sparse.sparse(args)
    assert wrong == bool(arm)
    printed = capsys.readouterr().out
    assert message in printed or message == "left out"
    assert "on H200" in printed and "loading" not in printed
    assert all(f"{name}: INFO attention backend CUSTOM: of {name}" in printed for name in results)
    timed = [name for name in ("default", "other", "custom", "ours") if name in results]
    assert asked == [(*timed, batch) for batch in (1, 32, 128)]
    assert [row["arm"] for row in rows] == timed * 3
    assert sorted(ended) == sorted(results)


def test_an_engine_that_fails_is_printed_and_the_others_go_on(monkeypatch, capsys):
    def process(text):
        command = [sys.executable, "-c", text]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    engines = {
        "default": (None, process("print('{\"a\": 1}', flush=True); input()")),
        "custom": (None, process("raise SystemExit(3)")),
        "ours": (None, process("import time; time.sleep(600)")),
    }
    processes = [process for _, process in engines.values()]
    finished = []

    def finish(work, process, seconds):
        finished.append(seconds)
        process.kill()
        return {"error": f"log, after {seconds}"}

    monkeypatch.setattr(engine_sparse, "finish", finish)
    assert engine_sparse.ready(engines, time.time() + 5) == {"default": {"a": 1}}
    assert list(engines) == ["default"] and finished == [None, 0]
    printed = capsys.readouterr().out
    assert "== custom: FAILED\nlog, after None" in printed
    assert "== ours: FAILED\nlog, after 0" in printed
    for each in processes:
        with contextlib.suppress(BrokenPipeError):
            each.communicate("\n")
