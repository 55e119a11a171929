"""`mla-fusion check` without an engine: what a user gets wrong, what is run, the answer."""

import importlib.util
import json
import re
import shlex
import tempfile
from pathlib import Path

import pytest

from mla_fusion import cli, config, kernels, report
from mla_fusion.cli import child
from mla_fusion.cli.check import command as check
from mla_fusion.cli.check import model_config
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
    kernels.get_provider.cache_clear()  # of tests that imitate a GPU
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
        return status, jobs[0] if jobs else None, capsys.readouterr().out

    return run


KIMI = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**V3},
        "model_type": "kimi_k25"}  # fmt: skip
WIDE = {"hidden_size": 7168, "n_routed_experts": 256, "moe_intermediate_size": 2048}
MANY = {"num_attention_heads": 128}
RANKS = "--tensor-parallel-size 2 --decode-context-parallel-size 2"
# What fuses of two layers, changes of V3, arguments, and the version of Triton.
CASES = {
    "nothing asked": (2, {}, "", "3.7.0"),
    "layers and requests": (2, {}, "--max-num-seqs 8 --layers 3", "3.7.0"),
    "drafts": (2, {}, "--max-num-seqs 512 --speculative-tokens 3", "3.7.0"),
    "all of it": (2, {}, "--max-num-seqs 64 --tensor-parallel-size 2 --speculative-tokens 1 "
                  "--kv-cache-dtype fp8", "3.7.0"),
    "ranks that share a cache": (2, {}, RANKS, "3.7.0"),
    "the same, portable": (2, {}, f"{RANKS} --attention portable", "3.7.0"),
    "no layer": (0, {}, "", "3.7.0"),
    "one layer": (1, {}, "", "3.7.0"),
    "the language part of another class": (2, KIMI, "", "3.7.0"),
    "a head size the CPU lacks": (2, {"kv_lora_rank": 256}, "", "3.7.0"),
    "a draft head": (2, {"architectures": ["DeepSeekMTPModel"]}, "--max-num-seqs 4", "3.7.0"),
    "layers for drafts": (2, {"num_nextn_predict_layers": 1}, "--speculative-tokens 3", "3.7.0"),
    "code of its own": (2, {"auto_map": {"AutoModel": "code.Model"}}, "", "3.7.0"),
    "fp8 weights": (2, {"quantization_config": {"quant_method": "fp8"}}, "", "3.7.0"),
    "too large for one GPU": (2, WIDE | MANY, "", "3.7.0"),
    "too large for four": (2, WIDE | MANY, "--tensor-parallel-size 4", "3.7.0"),
    "eight GPUs": (2, WIDE | MANY, "--tensor-parallel-size 8", "3.7.0"),
    "eight GPUs, block fp8": (2, WIDE | MANY | {"q_lora_rank": 1536, "quantization_config": {
        "quant_method": "fp8", "weight_block_size": [128, 128]
    }}, "--tensor-parallel-size 8", "3.7.0"),
    **{f"Triton {triton}, {cache}": (2, {}, f"--kv-cache-dtype {cache}", triton)
       for triton, cache in (("3.6.0", "fp8"), ("3.6.0", "fp8_e4m3"), ("3.6.0", "auto"),
                             ("", "fp8"))},
    **{f"aiter{argv}": (2, MANY, f"--attention aiter{argv}", "3.7.0") for argv in (
        " --kv-cache-dtype fp8",
        " --kv-cache-dtype fp8 --tensor-parallel-size 8 --speculative-tokens 2",
        " --tensor-parallel-size 16 --max-num-seqs 31",
        " --tensor-parallel-size 16 --max-num-seqs 32", " --speculative-tokens 4")},
    "aiter, other latents": (2, MANY | {"kv_lora_rank": 256}, "--attention aiter", "3.7.0"),
    "portable, latents too wide": (2, {"kv_lora_rank": 2048}, "--attention portable", "3.7.0"),
    "portable": (2, {}, "--attention portable", "3.7.0"),
    **{f"portable, o_proj {' '.join(map(str, given.values()))}": (
        2, {"quantization_config": given}, "--attention portable", "3.7.0") for given in (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors"})},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_answer(case, checked, golden, monkeypatch):
    """Without the names of backends, which are the release's; and what the engine was given."""
    fused, changes, argv, triton = CASES[case]
    monkeypatch.setattr("tests.cli.test_check.V3", V3 | changes if changes is not KIMI else KIMI)
    monkeypatch.setattr(check, "version_of", lambda package: triton)
    status, job, printed = checked(fused, *argv.split())
    lines = printed.splitlines()
    assert len(lines) <= 6 or "--attention" in argv
    assert (status == 0) == (": fuses. " in lines[0])
    if job:
        given = job.engine
        bucket = given["compilation_config"]["pass_config"].get(config.THRESHOLD)
        assert given["additional_config"] == {config.OPTIONS_KEY: {"provider": "reference"}}
        names = ("max_num_seqs", "kv_cache_dtype", "speculative_config")
        facts = {name: given[name] for name in names if name in given}
        facts |= {"layers": job.config["num_hidden_layers"], "bucket": bucket}
        said = " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
        lines.append(f"engine: {said}, {'prompts' if job.prompts else 'no prompt'}")
    text = re.sub(r"(attention backend) .+:", r"\1 ...:", "\n".join(lines))
    golden("check", CASES, case, text)


def test_the_command_can_be_pasted(checked):
    argv = "--max-num-seqs 64 --speculative-tokens 1 --tensor-parallel-size 2"
    _, _, printed = checked(2, *argv.split())
    engine = check_vllm(shlex.split(printed.splitlines()[2])[1:])
    drafts = engine.speculative_config["num_speculative_tokens"]
    assert engine.max_num_seqs * (1 + drafts) == 128


def test_many_reasons_are_a_short_answer():
    why = [Decline(code) for code in ("shape", "no-graph", "pass-error")]
    lines = Answer("m", asked("m"), "engine", why, []).lines()
    assert len(lines) == 5 and "2 of its 3 reasons, all with --json" in lines[0]


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


def test_an_older_modelopt_writes_its_quantization_beside_the_config(tmp_path):
    beside = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    model = model_config.read(Path(write(tmp_path, V3)))
    assert model.cache == "fp8_e4m3" and model.config["quantization_config"]["quantization"]


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
        served = asked(path).serve({}, draft=False)[0]
        assert served == name.format(folder=given)


def test_the_answer_as_json(checked):
    status, _, printed = checked(2, "--json")
    said = json.loads(printed)
    assert status == 0 and said["fuses"] is True and said["checked_by"] == "engine"
    assert said["tokens"] == [1, 256] and said["platforms"] == ["nvidia", "amd"]
    assert said["cut_model"] == {"fused": 2, "layers": 2} and said["reasons"] == []
    assert set(said["commands"]) == set(said["backends"]) == {"nvidia", "amd"}


def test_a_layer_outside_any_graph_is_not_fused():
    stored = report.Report("triton", 8, [report.RangeReport((1, 8), 2, 2)], uncompiled=1)
    why = child.Outcome([], [], [], stored).declines
    answer = Answer("m", asked("m"), "engine", why, [], stored)
    assert not answer.fuses and answer.lines()[0].startswith("m: 1 of 3 MLA layers")
    assert "[no-graph]" in answer.lines()[1]


def test_reasons_are_read_from_the_warning_that_switched_the_flag_off():
    for code in reasons.REASONS:
        for detail in ("", "q [7] (odd)"):
            decline = Decline(code, detail)
            line = f"the flag is switched off: {decline.explain()}"
            outcome = child.Outcome([], [], ["another warning", line])
            assert outcome.declines == [decline]
