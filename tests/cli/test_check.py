"""`mla-fusion check` without an engine: what a user gets wrong, what is run, the answer."""

import importlib.util
import json
import shlex
import tempfile
from pathlib import Path

import pytest

from mla_fusion import cli, config, report
from mla_fusion.cli import child
from mla_fusion.cli.check import command as check
from mla_fusion.cli.check.answer import Answer, Settings
from mla_fusion.cli.demo import tiny_models
from mla_fusion.report import reasons
from mla_fusion.report.reasons import Decline
from tests.cli.test_cli import fail, store
from tests.models import write
from tests.test_docs_code import check_vllm

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
V3 = {**tiny_models.MODELS["deepseek-v3-shaped"], "num_hidden_layers": 61}
CONFIGS = Path(__file__).parents[1] / "configs"


def asked(model, *options):
    """The settings of a command line."""
    return Settings(**vars(cli._parser(["check"]).parse_args(["check", str(model), *options])))


# --- what a user gets wrong


@pytest.mark.parametrize("content", ["{", "[]", "{}", "\x00", '{"kv_lora_rank": 512}'])
def test_check_of_something_that_is_no_config(content, tmp_path, capsys):
    assert "no config.json" in fail(capsys, "check", tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path / "config.json") in fail(capsys, "check", tmp_path)


NOT_WHOLE = "must be a whole number"


@pytest.mark.parametrize(
    "changes, argv, said",
    [
        ({"num_attention_heads": None}, (), "'num_attention_heads', which MLA needs"),
        ({"qk_rope_head_dim": None}, (), "'qk_rope_head_dim', which MLA needs"),
        ({"kv_lora_rank": None, "compress_ratios": [4]}, (), "'kv_lora_rank', which MLA needs"),
        ({"num_hidden_layers": None}, (), "'num_hidden_layers', which MLA needs"),
        ({"num_attention_heads": "128"}, (), f'{NOT_WHOLE} from 1 to 1024, not "128"'),
        ({"num_attention_heads": 0}, (), f"num_attention_heads {NOT_WHOLE}"),
        ({"kv_lora_rank": "512"}, (), f"kv_lora_rank {NOT_WHOLE}"),
        ({"v_head_dim": 128.0}, (), f"v_head_dim {NOT_WHOLE}"),
        ({"hidden_size": True}, (), f"hidden_size {NOT_WHOLE}"),
        ({"q_lora_rank": 10**12}, (), f"q_lora_rank {NOT_WHOLE}"),
        ({"n_shared_experts": 10**6}, (), f"n_shared_experts {NOT_WHOLE}"),
        # Each in its own range, and too large together.
        ({"num_attention_heads": 1024, "q_lora_rank": 8192}, (), "MiB of attention weights"),
        ({"num_attention_heads": 1021}, (), "MiB of attention weights"),
        ({"rope_scaling": {**YARN, "factor": 20_000}}, (), "a table of 8.19e+07 rows of 64"),
        ({"rope_scaling": {"type": "linear", "factor": 500}}, (), "rope_scaling.factor and its"),
        ({"rope_parameters": {**YARN, "factor": 1e9}}, (), "rope_parameters.factor and its"),
        ({"rope_scaling": {**YARN, "factor": float("nan")}}, (), "must be a positive number"),
        ({"rope_scaling": {**YARN, "factor": "40"}}, (), "must be a positive number, not '40'"),
        ({"rope_scaling": [40]}, (), "rope_scaling must be a JSON object"),
        ({"first_k_dense_replace": -1}, (), f"first_k_dense_replace {NOT_WHOLE}"),
        ({"architectures": "DeepseekV3ForCausalLM"}, (), "architectures must be a list"),
        ({"architectures": ["a\nb"]}, (), "must be a list of names of classes, not [\"a"),
        ({"architectures": ["OpenPanguMTPModel"]}, (), "give the target's config"),
        ({"architectures": ["NoSuchForCausalLM"]}, (), "and NoSuchForCausalLM is none"),
        ({"architectures": None}, (), "and deepseek_v3 is none"),
        ({"model_type": None}, (), 'config.json has no "model_type"'),
        ({"model_type": 3}, (), 'config.json has 3 as "model_type"'),
        ({"model_type": "m" * 99}, (), '... as "model_type"'),
        ({"model_type": "no_such_model"}, (), "the model type 'no_such_model'"),
        ({}, ("--provider", "triton"), "--provider: provider 'triton' needs a GPU"),
        ({}, ("--layers", 100_000), "--layers 100000: an engine has 64 at most"),
        ({}, ("--tensor-parallel-size", 3), "divide"),
        ({}, ("--kv-cache-dtype", "fp7"), "fp8_e4m3"),
        ({}, ("--decode-context-parallel-size", 2), "and does not divide it"),
    ],
)  # fmt: skip
def test_what_check_refuses(changes, argv, said, tmp_path, capsys, monkeypatch):
    """Without an engine, and by the name of the file."""
    monkeypatch.setattr(child, "run", lambda *job, **progress: pytest.fail("an engine"))
    write(tmp_path, {**V3, **changes})
    text = fail(capsys, "check", tmp_path, *argv)
    assert said in text
    assert argv or "target's" in said or f"{tmp_path}/config.json" in text


@pytest.mark.parametrize("missing", ["vllm", "depyf"])
def test_a_missing_package_is_named(missing, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    write(tmp_path, V3)
    text = fail(capsys, "check", tmp_path, "--dump", tmp_path / "dump")
    assert f"package {missing}" in text and "pip install" in text
    assert text.count("check") == 1


# --- what is run, and the verdict


@pytest.fixture
def checked(monkeypatch, tmp_path, capsys):
    """checked(fused, *argv) checks V3 with a mocked engine: (exit status, its job, the output)."""

    def run(fused, *argv):
        jobs = []

        def play(job, progress):
            jobs.append(job)
            job.config = json.loads(Path(job.engine["model"], "config.json").read_text())
            return child.Outcome([], [], [], report.load(store(Path(job.cache), "a.json", fused)))

        monkeypatch.setattr(child, "run", play)
        monkeypatch.setattr(cli, "require", lambda *modules, **_: None)
        status = cli.main(["check", write(tmp_path, V3), *argv])
        return status, jobs[0], capsys.readouterr().out

    return run


def test_check_runs_prompts_and_derives_the_bucket(checked):
    status, job, _ = checked(2, "--max-num-seqs", "8", "--layers", "3")
    assert status == 0 and job.prompts and job.plugin
    assert job.engine["compilation_config"]["pass_config"] == {config.FLAG: True}
    assert job.engine["additional_config"] == {config.OPTIONS_KEY: {"provider": "reference"}}
    assert job.engine["max_num_seqs"] == 8 and job.config["num_hidden_layers"] == 3


def test_check_widens_the_bucket_by_draft_tokens(checked):
    _, job, _ = checked(2, "--max-num-seqs", "512", "--speculative-tokens", "3")
    bucket = job.engine["compilation_config"]["pass_config"][config.THRESHOLD]
    assert bucket == 2048 < job.engine["max_num_batched_tokens"]


def test_check_of_ranks_that_share_a_cache(checked, capsys, tmp_path):
    argv = "--tensor-parallel-size", "2", "--decode-context-parallel-size", "2"
    status, _, printed = checked(2, *argv)
    assert status == 0 and "Two ranks were right on two H200s" in printed
    for line in (line for line in printed.splitlines() if "vllm serve" in line):
        assert "--decode-context-parallel-size 2" in line and '{"provider": "triton"}' in line
    with_decode = ["check", write(tmp_path, V3), *argv, "--attention", "portable"]
    assert cli.main(with_decode) == 1
    out = capsys.readouterr().out
    assert "(attention=portable) [context-parallel]" in out


@pytest.mark.parametrize(
    "fused, first",
    [(0, "does not fuse"), (1, "1 of 2 MLA layers of the cut model stay unfused")],
)
def test_check_fails_when_a_layer_does_not_fuse(fused, first, checked):
    status, _, printed = checked(fused)
    answer = printed.splitlines()
    assert status == 1
    assert answer[0] == f"DeepseekV3ForCausalLM: {first}"
    assert fused or ("q [7]" in answer[1] and "[shape]" in answer[1])
    assert fused or answer[2].startswith("  What would help: ")


def test_the_class_that_the_config_names_comes_first(checked, monkeypatch):
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**V3}}
    monkeypatch.setattr("tests.cli.test_check.V3", {"model_type": "kimi_k25", **whole})
    _, _, printed = checked(2)
    assert printed.startswith("KimiK25ForConditionalGeneration (DeepseekV3ForCausalLM): fuses.")


def test_many_reasons_are_a_short_answer():
    why = [Decline(code) for code in ("shape", "no-graph", "pass-error")]
    lines = Answer("m", asked("m"), "engine", why, []).lines()
    assert len(lines) == 5 and "2 of its 3 reasons, all with --json" in lines[0]


def test_check_runs_no_head_size_the_cpu_lacks(monkeypatch, checked):
    monkeypatch.setitem(V3, "kv_lora_rank", 256)
    status, job, printed = checked(2, "--json")
    assert status == 0 and not job.prompts
    assert "generates no token" in printed


def test_check_runs_a_draft_head_beside_a_target(monkeypatch, checked):
    monkeypatch.setitem(V3, "architectures", ["DeepSeekMTPModel"])
    status, job, printed = checked(2, "--max-num-seqs", "4")
    assert status == 0 and not job.prompts
    drafts = job.engine["speculative_config"]
    assert (drafts["method"], drafts["num_speculative_tokens"]) == ("mtp", 1)
    assert job.engine["compilation_config"]["pass_config"][config.THRESHOLD] == 8
    assert "vllm serve MODEL" in printed and '"method":"mtp"' in printed


@pytest.mark.parametrize(
    "odd, dump, said",
    [
        ("odd", False, "--dump DIR keeps the engine's log there"),
        ("odd", True, "What led to it: "),
        ("operator torchvision::nms does not exist", False, "pip uninstall -y torchvision "),
    ],
)
def test_check_leaves_no_folder_when_the_engine_fails(
    odd, dump, said, monkeypatch, tmp_path, capsys
):
    def play(job, progress):
        Path(job.workdir, child.LOG).write_text("what led to it")
        raise child.EngineError(job, f"RuntimeError: {odd} (exit status 1)")

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(child, "run", play)
    argv = ["--dump", str(tmp_path / "dump")] if dump else []
    assert cli.main(["check", write(tmp_path, V3), *argv]) == 2
    text = capsys.readouterr().err
    assert f"vLLM cannot run the cut model: RuntimeError: {odd}" in text and said in text
    assert not [*temporary.iterdir()]
    assert not dump or (tmp_path / "dump" / child.LOG).read_text() == "what led to it"


# --- the answer


def test_the_answer_comes_first_and_can_be_pasted(checked, tmp_path):
    argv = ("--max-num-seqs", "64", "--tensor-parallel-size", "2", "--speculative-tokens", "1")
    status, _, printed = checked(2, *argv, "--kv-cache-dtype", "fp8")
    lines = printed.splitlines()
    assert status == 0 and len(lines) == 4
    assert lines[0] == (
        "DeepseekV3ForCausalLM: fuses. Every MLA layer, in graphs for 1 to 128 tokens: 64 requests "
        "of 1 + 1 tokens at once (--max-num-seqs; vLLM's own may be higher)"
    )
    assert "NVIDIA GPUs" in lines[1] and "TRITON_MLA" in lines[1]
    assert "AMD GPUs" in lines[3] and "not yet run" in lines[3] and "ROCM_AITER_MLA" in lines[3]
    assert lines[3].endswith("the same after VLLM_ROCM_USE_AITER=1")
    nvidia = shlex.split(lines[2])
    serve = "vllm serve MODEL --tensor-parallel-size 2 --max-num-seqs 64 --kv-cache-dtype fp8"
    drafts = '{"method":"ngram","num_speculative_tokens":1}'
    assert nvidia == [
        *serve.split(), "--speculative-config", drafts, f"-cc.pass_config.{config.FLAG}=True"
    ]  # fmt: skip
    assert_vllm_has_the_range(nvidia[1:], 128)


def assert_vllm_has_the_range(words, tokens):
    engine = check_vllm(words)
    assert engine.max_num_seqs * (1 + engine.speculative_config["num_speculative_tokens"]) == tokens


def test_drafts_come_from_the_layers_that_the_model_has_for_them(checked, monkeypatch):
    monkeypatch.setitem(V3, "num_nextn_predict_layers", 1)
    _, _, printed = checked(2, "--speculative-tokens", "3")
    words = shlex.split(printed.splitlines()[2])
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "mtp"


WIDE = {"hidden_size": 7168, "n_routed_experts": 256, "moe_intermediate_size": 2048}
WIDE |= {"num_attention_heads": 128}


@pytest.mark.parametrize(
    "changes, argv, said, unsaid",
    [
        ({}, (), "vllm serve MODEL -cc", ("--max-num-seqs 256", "--trust-remote", "checkpoint")),
        ({"auto_map": {"AutoModel": "code.Model"}}, (), "MODEL --trust-remote-code -cc", ()),
        (WIDE, (), "holds (288): --tensor-parallel-size 8 at least", ("weights in",)),
        (WIDE, ("--tensor-parallel-size", 4), "on 4 GPUs more than", ()),
        (WIDE, ("--tensor-parallel-size", 8), "fuses", ("largest",)),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            (),
            "weights in fp8, of which vLLM unpacks W_UK and W_UV",
            (),
        ),
    ],
)
def test_the_answer_leaves_out_what_nobody_asked_for_and_says_what_a_user_needs(
    changes, argv, said, unsaid, checked, monkeypatch
):
    monkeypatch.setattr("tests.cli.test_check.V3", V3 | changes)
    _, _, printed = checked(2, *map(str, argv))
    assert said in printed and not any(text in printed for text in unsaid)
    assert len(printed.splitlines()) <= 5


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP8, FP4 = ({"dynamic": False, "num_bits": bits, "type": "float"} for bits in (8, 4))


@pytest.mark.parametrize(
    "quantization, argv, cache",
    [
        ({**MODELOPT, "kv_cache_scheme": FP8}, (), "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, (), "fp8_e4m3"),
        ({**MODELOPT, "quantization": {"kv_cache_quant_algo": "FP8"}}, (), "fp8_e4m3"),
        ({**MODELOPT, "kv_cache_scheme": FP8}, ("--kv-cache-dtype", "bfloat16"), "bfloat16"),
        ({**MODELOPT, "kv_cache_scheme": FP4}, (), "nvfp4"),
        ({**MODELOPT, "quantization": {"kv_cache_quant_algo": "NVFP4"}}, (), "nvfp4"),
        ({**MODELOPT, "kv_cache_quant_algo": "INT3"}, (), "auto"),
        ({**MODELOPT, "quantization": [3]}, (), "vLLM refuses the quantization_config"),
        # vLLM's MLA layer does not ask compressed-tensors.
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, (), "auto"),
    ],
)
def test_the_cache_has_the_type_that_vllm_takes_from_the_checkpoint(
    quantization, argv, cache, checked, monkeypatch, tmp_path, capsys
):
    model = V3 | {"quantization_config": quantization}
    if cache == "nvfp4":
        assert cli.main(["check", write(tmp_path, model)]) == 1
        assert "[kv-cache-dtype]" in capsys.readouterr().out
    elif " " in cache:
        assert cache in fail(capsys, "check", write(tmp_path, model))
    else:
        monkeypatch.setattr("tests.cli.test_check.V3", model)
        _, job, printed = checked(2, *argv)
        assert job.engine["kv_cache_dtype"] == cache
        assert ("TOKENSPEED_MLA" in printed) == (cache == "fp8_e4m3")
        assert ("--kv-cache-dtype" in printed) == bool(argv)


@pytest.mark.parametrize(
    "folder, file, name",
    [
        ("a model", "config.json", "MODEL"),
        ("a model", "model-00001-of-2.safetensors", "{folder}"),
        ("models--org--a--b/snapshots/0123", "config.json", "org/a--b"),
    ],
)
def test_the_model_is_named_as_vllm_can_serve_it(folder, file, name, tmp_path):
    given = tmp_path / folder
    given.mkdir(parents=True)
    (given / file).touch()
    for path in (given, given / "config.json"):
        served = asked(path).serve(draft=False, predicts=False)[0]
        assert served == name.format(folder=given)


def test_the_answer_as_json(checked):
    status, _, printed = checked(2, "--json")
    said = json.loads(printed)
    assert status == 0 and said["fuses"] is True and said["checked_by"] == "engine"
    assert said["tokens"] == [1, 256] and said["platforms"] == ["nvidia", "amd"]
    assert said["cut_model"] == {"fused": 2, "layers": 2} and said["reasons"] == []
    assert set(said["commands"]) == set(said["backends"]) == {"nvidia", "amd"}


@pytest.mark.parametrize("version, cache, notes", [
    ("3.6.0", "fp8", 1), ("3.6.0", "fp8_e4m3", 1), ("3.6.0", "auto", 0), ("3.7.0", "fp8", 0),
    ("", "fp8", 0),
])  # fmt: skip
def test_software_conversions_of_an_old_triton(version, cache, notes, checked, monkeypatch):
    monkeypatch.setattr(check, "version_of", lambda package: version)
    _, _, printed = checked(2, "--kv-cache-dtype", cache)
    assert printed.count("on gfx950 with the Triton that is installed here") == notes
    assert printed.count("install Triton 3.7") == notes


def test_a_layer_outside_any_graph_is_not_fused():
    stored = report.Report("triton", 8, [report.RangeReport((1, 8), 2, 2)], uncompiled=1)
    answer = Answer("m", asked("m"), "engine", check._reasons(stored, []), [], stored)
    assert not answer.fuses and answer.lines()[0].startswith("m: 1 of 3 MLA layers")
    assert "[no-graph]" in answer.lines()[1]


def test_reasons_are_read_from_the_warning_that_switched_the_flag_off():
    for code in reasons.REASONS:
        for detail in ("", "q [7] (odd)"):
            decline = Decline(code, detail)
            line = f"the flag is switched off: {decline.explain()}"
            assert check._reasons(None, ["another warning", line]) == [decline]
