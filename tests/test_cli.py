"""The command line without an engine: arguments, errors for the reader, stored reports."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mla_fusion import check, cli, demo, engine, report, shrink, tiny_models

V3 = {**tiny_models.MODELS["deepseek-v3-shaped"], "num_hidden_layers": 61}


def fail(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must fail as a user error; its one line."""
    assert cli.main([str(a) for a in argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "Traceback" not in text
    return text


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


# --- arguments


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["serve"],
        ["check"],
        ["check", "m", "--max-num-seqs", "0"],
        ["check", "m", "--speculative-tokens", "-1"],
        ["check", "m", "--layers", "two"],
        ["check", "m", "--provider", "cuda"],
        ["check", "m", "--unknown"],
    ],
)
def test_wrong_arguments_are_usage_errors(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: mla-fusion" in capsys.readouterr().err


def test_check_passes_every_argument_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[check.Settings] = []

    def run(settings: check.Settings) -> bool:
        seen.append(settings)
        return False

    monkeypatch.setattr(check, "run", run)
    argv = "check m --max-num-seqs 8 --speculative-tokens 3 --tensor-parallel-size 2"
    argv += f" --kv-cache-dtype fp8 --layers 4 --provider triton --dump {tmp_path}"
    assert cli.main(argv.split()) == 1
    assert seen == [check.Settings(Path("m"), 8, 3, 2, "fp8", 4, "triton", tmp_path)]


def test_demo_exit_status_says_whether_the_tokens_are_equal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for result, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(demo, "run", lambda out, result=result: result)
        assert cli.main(["demo", "--out", str(tmp_path)]) == status


# --- check: what a user gets wrong


def test_check_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no config.json" in fail(capsys, "check", tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "\x00", '{"kv_lora_rank": 512}'])
def test_check_of_something_that_is_no_config(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path / "config.json") in fail(capsys, "check", tmp_path)


def test_check_of_a_model_without_mla(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, {"model_type": "llama", "num_hidden_layers": 2})
    assert "nothing to fuse" in fail(capsys, "check", tmp_path)


def test_check_names_a_missing_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, {k: v for k, v in V3.items() if k != "num_attention_heads"})
    assert "'num_attention_heads'" in fail(capsys, "check", tmp_path)


def test_check_refuses_heads_that_do_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, V3)
    assert "divide" in fail(capsys, "check", tmp_path, "--tensor-parallel-size", 3)


def test_check_refuses_an_unknown_cache_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    write_config(tmp_path, V3)
    assert "fp8_e4m3" in fail(capsys, "check", tmp_path, "--kv-cache-dtype", "fp7")


@pytest.mark.parametrize("missing", ["vllm", "depyf"])
def test_a_missing_package_is_named(
    missing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    write_config(tmp_path, V3)
    text = fail(capsys, "check", tmp_path, "--dump", tmp_path / "dump")
    assert f"package {missing}" in text and "pip install" in text


def test_check_of_a_sparse_model_says_why_without_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, {**V3, "index_topk": 2048})
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "[sparse-attention]" in capsys.readouterr().out


# --- check: the cut


def test_the_cut_keeps_what_decides_about_fusion() -> None:
    cut = shrink.cut(V3, layers=2, tensor_parallel_size=2)
    kept = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert {k: cut.config[k] for k in kept} == {k: V3[k] for k in kept}
    assert cut.config["rope_scaling"] == V3["rope_scaling"]
    assert cut.config["num_attention_heads"] == V3["num_attention_heads"] // 2
    assert cut.config["num_hidden_layers"] == 2 and cut.config["first_k_dense_replace"] == 1
    assert cut.head_size == 576


def test_the_cut_makes_the_rest_small() -> None:
    full = {
        **V3,
        "hidden_size": 7168,
        "vocab_size": 129280,
        "n_routed_experts": 256,
        "eos_token_id": 129279,
        "bos_token_id": 1,
        "layer_types": ["mla"] * 61,
        "quantization_config": {"quant_method": "fp8"},
        "auto_map": {"AutoConfig": "code.Config"},
    }
    small = shrink.cut(full, layers=3, tensor_parallel_size=1).config
    assert small["hidden_size"] == 512 and small["n_routed_experts"] == 8
    assert small["vocab_size"] > small["eos_token_id"] and small["bos_token_id"] == 1
    assert small["layer_types"] == ["mla"] * 3
    assert not {"quantization_config", "auto_map"} & set(small)


def test_the_language_part_of_a_multimodal_model_is_read(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "seeing", "text_config": V3})
    assert shrink.read(tmp_path) == V3


# --- check: what is run, and the verdict


def check_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused: int, *argv: str
) -> tuple[int, engine.Job]:
    """Check a model with an engine that is played: (exit status, its job)."""
    jobs: list[engine.Job] = []

    def play(job: engine.Job) -> engine.Outcome:
        jobs.append(job)
        return engine.Outcome([], [], [], 0, [store(Path(job.cache), "a.json", fused)])

    monkeypatch.setattr(engine, "run", play)
    monkeypatch.setattr(engine, "require", lambda *modules, purpose: None)
    status = cli.main(["check", str(write_config(tmp_path, V3)), *argv])
    return status, jobs[0]


def test_check_runs_prompts_and_derives_the_bucket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    status, job = check_with(monkeypatch, tmp_path, 2, "--max-num-seqs", "8")
    assert status == 0 and job.prompts and job.bucket is None and job.fuse


def test_check_widens_the_bucket_by_draft_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ("--max-num-seqs", "512", "--speculative-tokens", "3")
    _, job = check_with(monkeypatch, tmp_path, 2, *argv)
    assert job.bucket == 2048 < job.max_num_batched_tokens


@pytest.mark.parametrize("fused", [0, 1])
def test_check_fails_when_a_layer_does_not_fuse(
    fused: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, _ = check_with(monkeypatch, tmp_path, fused)
    assert status == 1
    assert f"{2 - fused} of 2 MLA layers of the decode range do not" in capsys.readouterr().out


def test_check_runs_no_head_size_the_cpu_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(V3, "kv_lora_rank", 256)
    status, job = check_with(monkeypatch, tmp_path, 2)
    assert status == 0 and not job.prompts
    assert "no token was generated" in capsys.readouterr().out


# --- the engine's errors


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("Traceback:\nValueError: a\n[rank0]: RuntimeError: b\nbye", "RuntimeError: b"),
        ("ValidationError: 1 error\n  Value error, d\nfor more", "Value error, d"),
        ("(EngineCore pid=1) ERROR 01-01 vllm.NotAnError: c", "vllm.NotAnError: c"),
        ("Killed", "Killed"),
        ("", "it ended before it wrote anything"),
    ],
)
def test_the_error_of_a_log(log: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text(log)
    assert engine.last_error(tmp_path / "engine.log") == message


# --- report


def store(root: Path, name: str, fused: int) -> Path:
    folder = root / "torch_compile_cache" / "mla_fusion"
    folder.mkdir(parents=True, exist_ok=True)
    declined = {} if fused else {"shape": {"layers": 2, "detail": "q [7]"}}
    stored = report.Report(
        "reference", 8, [report.RangeReport((1, 8), layers=2, fused=fused, declined=declined)]
    )
    (folder / name).write_text(json.dumps(asdict(stored)))
    return folder / name


def test_report_prints_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = store(tmp_path, "a.json", fused=2), store(tmp_path, "b.json", fused=0)
    os.utime(old, (1, 1))
    assert cli.main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.index(str(new)) < text.index("[shape]") < text.index(str(old))
    assert "2 MLA layers, 2 fused" in text.split(str(old))[1]
    assert cli.main(["report", str(old)]) == 0
    assert str(new) not in capsys.readouterr().out


def test_report_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "start vLLM once" in fail(capsys, "report", tmp_path)
    assert "does not exist" in fail(capsys, "report", tmp_path / "absent.json")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"provider": 1}'])
def test_report_of_another_file(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert "not a stored report" in fail(capsys, "report", path)


def test_layers_that_are_in_no_graph_are_reported() -> None:
    for model_layers, uncompiled in ((2, 0), (3, 1)):
        report.add(report.GraphRecord(1, 4, layers=2, fused=2))
        report.add(report.GraphRecord(5, 64, layers=2))
        report.add(report.GraphRecord(1, 4, pass_ms=1.0))  # of the last step
        made = report.take("reference", 4, model_layers)
        assert made is not None and made.uncompiled == uncompiled
        assert ("[no-graph]" in "".join(made.lines())) is bool(uncompiled)


# --- demo


def test_the_first_difference_is_found() -> None:
    assert demo.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert demo.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == (1, 1)


def test_the_demo_models_differ_where_the_real_ones_do() -> None:
    v2, v3 = (tiny_models.weights(model, seed=0) for model in tiny_models.MODELS.values())
    assert "model.layers.0.self_attn.q_proj.weight" in v2
    assert "model.layers.0.self_attn.q_b_proj.weight" in v3
    again = tiny_models.weights(tiny_models.MODELS["deepseek-v2-shaped"], seed=0)
    assert all(again[name].equal(tensor) for name, tensor in v2.items())
