"""Every file of examples/ runs; tests/test_docs_code.py runs the scripts for GPUs."""

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import accuracy
import custom_pass
import pytest
import torch
import without_plugin
from torch.fx.experimental.proxy_tensor import make_fx

from tests.command import run

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"


def run_example(name, *arguments, cwd, **environment):
    """What an example prints when a user starts it."""
    return run(sys.executable, "-P", FOLDER / name, *arguments, cwd=cwd, **environment)


def test_every_example_is_listed():
    page = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        if path.suffix in (".py", ".sh"):
            assert f"`examples/{path.name}`" in page, path.name


def run_without_vllm(name, tmp_path):
    """A vllm that cannot be imported comes first on the path."""
    (tmp_path / "vllm.py").write_text("raise ImportError('vllm must not be imported')")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    cache = str(tmp_path / "inductor")
    return run_example(name, cwd=tmp_path, PYTHONPATH=path, TORCHINDUCTOR_CACHE_DIR=cache)


def test_the_attention_works_alone_and_without_vllm(tmp_path):
    text = run_without_vllm("attention_alone.py", tmp_path)
    errors = [float(x) for x in re.findall(r"relative error (\S+);", text)]
    assert len(errors) == 2 and max(errors) < 4e-3


@pytest.mark.parametrize(
    "name, model",
    [("attention_alone.py", []), ("kernel_alone.py", []), ("without_plugin.py", ["M"])],
)
def test_a_provider_without_its_gpu_is_one_sentence(name, model, monkeypatch, capsys):
    example = importlib.import_module(name.removesuffix(".py"))
    monkeypatch.setattr(sys, "argv", [name, "--provider", "triton", *model])
    with pytest.raises(SystemExit):
        example.main()
    assert "needs a GPU that torch.cuda can see" in capsys.readouterr().err.splitlines()[-1]


def test_the_kernel_works_alone_and_without_vllm(tmp_path):
    text = run_without_vllm("kernel_alone.py", tmp_path)
    # The compiler may order the additions of the two projections otherwise: a rounding of bf16.
    differences = [float(x) for x in re.findall(r"eager differ by (\S+) at most", text)]
    assert len(differences) == 2 and max(differences) < 2**-6
    assert "cache rows written: [0, 64, 65]" in text


@pytest.mark.usefixtures("plain_kernels")
def test_the_passes_work_without_the_plugin(monkeypatch, capsys):
    """The config's pass, called as vLLM calls it, on graphs inside and outside the bucket."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range
    from vllm.forward_context import override_forward_context

    from mla_fusion import ops, report
    from tests.passes import graphs
    from tests.passes.fake_engine import DECODE, Engine, assert_same
    from tests.passes.fake_engine import run as run_graph

    config = without_plugin.compilation_config("reference", bucket=8)
    assert config.compile_ranges_endpoints == [8]
    assert {*ops.RUNTIME_OPS} <= {*config.splitting_ops}
    fuse = config.inductor_compile_config["post_grad_custom_post_pass"]
    spec = graphs.Spec("native", layers=2)
    fused_op = f"{ops.NAMESPACE}::{ops.FUSED}"
    report.forget()
    for tokens, expected in (((1, 8), 2), ((9, 2048), 0)):
        module = graphs.build(spec)
        in_a_step = override_forward_context(Engine(spec).context(DECODE))
        with in_a_step, pass_context(Range(*tokens)):
            fuse(module.graph)
        assert len(graphs.find_all(module, fused_op)) == expected
        assert_same(
            run_graph(graphs.build(spec), spec), run_graph(module, spec), DECODE, tolerance=1e-5
        )
    # The program says so when its engine, here a mock, has answered.
    engine = Mock(generate=lambda *_: [Mock(outputs=[Mock(text="w1")])])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setattr(sys, "argv", ["without_plugin.py", "MODEL", "--provider", "reference"])
    monkeypatch.setattr(without_plugin, "LLM", lambda *_, **__: engine)
    monkeypatch.setattr(without_plugin.torch.cuda, "is_available", lambda: True)
    for said in ("tokens 1 to 8: 2 MLA layers, 2 fused", "VLLM_DISABLE_COMPILE_CACHE=1"):
        without_plugin.main()
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("parts, outcome", [
    (lambda x: (x[:, :4].sin(), x[:, 4:].cos()), "joined"),
    (lambda x: (x[:, 4:].cos(), x[:, :4].sin()), "joined"),
    (lambda x: (x[:, :4].sin(), x[:, 5:].cos()), "left as it is: no slice begins where it ends"),
    (lambda x: (x[:, :4].sin(), x[4:].cos()), "left as it is: no slice begins where it ends"),
    (lambda x: (x[:, ::2].sin(), x[:, 1::2].cos()), "left as it is: it leaves elements out"),
    (lambda x: (x[:, 2:].sin(), x[:, 3:].cos()), None),
])  # fmt: skip
def test_the_example_of_a_pass(parts, outcome, monkeypatch):
    monkeypatch.setattr(custom_pass, "OUTCOMES", Counter())
    x = torch.randn(6, 7)
    module = make_fx(parts, tracing_mode="fake")(x)
    custom_pass.SplitHalvesPass()(module.graph)
    module.recompile()
    assert ({outcome: 1} if outcome else {}) == custom_pass.OUTCOMES
    assert ("split_with_sizes" in module.code) == (outcome == "joined")
    assert all(map(torch.equal, module(x), parts(x)))


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of the demo, for examples that run unchanged and compile into `tmp_path`."""
    from mla_fusion.cli import child
    from mla_fusion.cli.demo import tiny_models

    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_CACHE_ROOT", str(tmp_path / "cache")),
        ("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")),
    ):
        monkeypatch.setenv(name, value)
    child.share_facts(tmp_path / "cache")
    return tiny_models.write("deepseek-v3-shaped", tmp_path / "model")


def assert_all_layers_fused(tmp_path):
    from mla_fusion import report

    [stored] = report.stored_reports(tmp_path / "cache")
    ranges = report.load(stored).ranges
    assert [(r.range[0], r.layers, r.fused) for r in ranges] == [(1, 3, 3), (9, 3, 0)]


@pytest.mark.engine
@pytest.mark.nightly
def test_the_server_on_a_cpu(tmp_path, model):
    """`serve_cpu.sh` with the packages of `make setup`, until it has answered a request."""
    with socket.socket() as free:
        free.bind(("", 0))
        url = f"http://localhost:{free.getsockname()[1]}"
    words = ["bash", FOLDER / "serve_cpu.sh", model, "--port", url.rpartition(":")[2]]
    words += ["--max-model-len", "128", "--max-num-seqs", "8"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            words, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, "PATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )  # fmt: skip
    asked = json.dumps({"model": str(model), "prompt": "w1 w2 w3", "max_tokens": 4}).encode()
    json_type = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", asked, json_type)
    try:
        while True:
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                answer = json.load(urllib.request.urlopen(request))
                break
            except urllib.error.URLError as error:
                assert isinstance(error.reason, ConnectionRefusedError), error
                time.sleep(0.5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    assert answer["usage"]["completion_tokens"] == 4
    assert "3 of 3 MLA layers fused" in log.read_text()
    assert_all_layers_fused(tmp_path)


def test_the_words_of_the_demos_models(model):
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    assert words("w1 w1023 nothing").input_ids == [1, 1023, 0] and words.decode([7]) == "w7"


@pytest.mark.engine
@pytest.mark.nightly
def test_offline_llm(tmp_path, model):
    text = run_example(
        "offline_llm.py", model, "--provider=reference", "--attention-backend=CPU_MLA", cwd=tmp_path
    )
    assert re.search(r"'A fused kernel is' -> '.+'", text), text
    assert_all_layers_fused(tmp_path)


@pytest.mark.engine
@pytest.mark.nightly
def test_the_example_of_a_pass_in_an_engine(tmp_path, model):
    text = run_example("custom_pass.py", model, cwd=tmp_path)
    assert "\n4 slices joined\n" in text


def test_accuracy_counts_the_answers_that_chance_does_not_explain():
    def arm(values, text="w1"):
        return [["t", i, "none", [[text]], {"exact_match": v}] for i, v in enumerate(values)]

    for off, on, lost, said in (
        ([1, 0, 1], [1, 0, 1], False, "of 3 samples 0 answers differ, 0 lower, 0 higher (p = 1)"),
        ([1] * 6 + [0], [0] * 7, True, "6 lower, 0 higher (p = 0.031)"),
        ([1] * 5 + [0], [0] * 6, False, "5 lower, 0 higher (p = 0.062)"),
        ([0] * 6, [1] * 6, False, "off 0.0000, on 1.0000"),
    ):
        lines, found = accuracy.compare(arm(off), arm(on)[::-1])
        assert found == lost and lines[0].startswith("t, none, exact_match: ") and said in lines[0]
    assert "2 answers differ" in accuracy.compare(arm([1, 1]), arm([1, 1], "w2"))[0][0]


# What examples/accuracy.py calls of lm_eval; the real one ran by hand.
LM_EVAL = """
def simple_evaluate(model, model_args, tasks, task_manager, limit, batch_size, log_samples):
    from vllm import LLM, SamplingParams

    llm = LLM(model_args.pop("pretrained"), **model_args)
    prompts = [f"w{n} w{2 * n} w{3 * n}" for n in range(limit)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    return {"samples": {task: [
        {"doc_id": i, "filter": "none", "resps": [[x.outputs[0].text]], "metrics": ["m"], "m": i}
        for i, x in enumerate(outputs)] for task in tasks}}
"""


@pytest.mark.engine
@pytest.mark.nightly
def test_accuracy_runs_both_arms(tmp_path, model):
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval/__init__.py").write_text(LM_EVAL)
    (tmp_path / "lm_eval/tasks.py").write_text("def TaskManager(include_path): pass\n")
    engine = {"max_model_len": 128, "max_num_seqs": 8, "attention_backend": "CPU_MLA"}
    engine["additional_config"] = {"mla_fusion": {"provider": "reference"}}
    text = run_example(
        "accuracy.py", model, "--tasks=made_up", "--limit=4", "--engine", json.dumps(engine),
        cwd=tmp_path, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert "made_up, none, m: off 1.5000, on 1.5000; of 4 samples 0 answers differ" in text
    answers = json.loads((tmp_path / "build/accuracy/on.json").read_text())
    assert len({answer for *_, [[answer]], _ in answers}) > 1
    assert_all_layers_fused(tmp_path)
