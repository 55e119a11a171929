"""`mla-fusion check` without an engine: what the configuration decides, the cut, the answer."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from mla_fusion import cli, config
from mla_fusion.cli import check, child, model_classes, shrink, tiny_models
from mla_fusion.cli.answer import Answer
from mla_fusion.report import reasons
from tests.models import write
from tests.test_cli import fail, store

V3 = {**tiny_models.MODELS["deepseek-v3-shaped"], "num_hidden_layers": 61}
CONFIGS = Path(__file__).parent / "configs"


def test_check_passes_every_argument_on(monkeypatch, tmp_path):
    seen = []

    def find(settings):
        seen.append(settings)
        return Answer("m", frozenset(), 8, "configuration", [], [], None, [])

    monkeypatch.setattr(check, "find", find)
    argv = "check m --max-num-seqs 8 --speculative-tokens 3 --tensor-parallel-size 2"
    argv += f" --kv-cache-dtype fp8 --layers 4 --provider triton --dump {tmp_path} --json"
    assert cli.main(argv.split()) == cli.main(["check", "m"]) == 1
    given = check.Settings(Path("m"), 8, 3, 2, "fp8", 4, "triton", tmp_path, True)
    assert seen == [given, check.Settings(Path("m"))]


# --- check: what a user gets wrong


def test_check_without_a_config(tmp_path, capsys):
    assert "no config.json" in fail(capsys, "check", tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "\x00", '{"kv_lora_rank": 512}'])
def test_check_of_something_that_is_no_config(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path / "config.json") in fail(capsys, "check", tmp_path)


@pytest.mark.parametrize(
    "without, argv, said",
    [
        ("num_attention_heads", (), "'num_attention_heads'"),
        ("", ("--tensor-parallel-size", 3), "divide"),
        ("", ("--kv-cache-dtype", "fp7"), "fp8_e4m3"),
    ],
)
def test_what_check_refuses(without, argv, said, tmp_path, capsys):
    write(tmp_path, {k: v for k, v in V3.items() if k != without})
    assert said in fail(capsys, "check", tmp_path, *argv)


@pytest.mark.parametrize("missing", ["vllm", "depyf"])
def test_a_missing_package_is_named(missing, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    write(tmp_path, V3)
    text = fail(capsys, "check", tmp_path, "--dump", tmp_path / "dump")
    assert f"package {missing}" in text and "pip install" in text


def test_check_of_a_sparse_model_says_why_without_an_engine(tmp_path, capsys):
    write(tmp_path, {**V3, "index_topk": 2048})
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "[sparse-attention]" in capsys.readouterr().out


# --- check: the cut


def test_the_cut_keeps_what_decides_about_fusion():
    cut = shrink.cut(V3, layers=2, tensor_parallel_size=2)
    kept = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    assert {k: cut.config[k] for k in kept} == {k: V3[k] for k in kept}
    assert cut.config["rope_scaling"] == V3["rope_scaling"]
    assert cut.config["num_attention_heads"] == V3["num_attention_heads"] // 2
    assert cut.config["num_hidden_layers"] == 2 and cut.config["first_k_dense_replace"] == 2
    assert cut.head_size == 576


def test_the_cut_makes_the_rest_small():
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


@pytest.mark.parametrize("key, name", [("", "DeepseekV3ForCausalLM"), ("architectures", "S")])
def test_the_language_part_of_a_multimodal_model_is_read(key, name, tmp_path):
    """The class of the whole model counts where its part names none."""
    part = {k: v for k, v in V3.items() if k != key}
    write(tmp_path, {"model_type": "s", "architectures": ["S"], "text_config": part})
    assert shrink.read(tmp_path) == (part, name)


# --- check: what is run, and the verdict


@pytest.fixture
def checked(monkeypatch, tmp_path, capsys):
    """checked(fused, *argv) checks V3 with a mocked engine: (exit status, its job, the output)."""

    def run(fused, *argv):
        jobs = []

        def play(job, progress):
            jobs.append(job)
            return child.Outcome([], [], [], 0, [store(Path(job.cache), "a.json", fused)])

        monkeypatch.setattr(child, "run", play)
        monkeypatch.setattr(check, "require", lambda *modules, purpose: None)
        status = cli.main(["check", write(tmp_path, V3), *argv])
        return status, jobs[0], capsys.readouterr().out

    return run


def test_check_runs_prompts_and_derives_the_bucket(checked):
    status, job, _ = checked(2, "--max-num-seqs", "8")
    assert status == 0 and job.prompts and job.plugin
    assert job.engine["compilation_config"]["pass_config"] == {config.FLAG: True}


def test_check_widens_the_bucket_by_draft_tokens(checked):
    _, job, _ = checked(2, "--max-num-seqs", "512", "--speculative-tokens", "3")
    bucket = job.engine["compilation_config"]["pass_config"][config.THRESHOLD]
    assert bucket == 2048 < job.engine["max_num_batched_tokens"]


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


def test_check_runs_no_head_size_the_cpu_lacks(monkeypatch, checked):
    monkeypatch.setitem(V3, "kv_lora_rank", 256)
    status, job, printed = checked(2)
    assert status == 0 and not job.prompts
    assert "no token was generated" in printed


# --- check: what the configuration decides


DECIDED = {
    "llama-3": ("LlamaForCausalLM", "no-mla"),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", "no-graph"),
    "kimi-k3": ("KimiK3ForConditionalGeneration", "no-graph"),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", ""),
    "deepseek-v3": ("DeepseekV3ForCausalLM", ""),
    "kimi-k2": ("DeepseekV3ForCausalLM", ""),
    "glm-4.7-flash": ("Glm4MoeLiteForCausalLM", ""),
    "longcat-flash": ("LongcatFlashForCausalLM", ""),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_what_the_configuration_decides(name):
    model, architecture = shrink.read(CONFIGS / f"{name}.json")
    decline = model_classes.decide(model, architecture)
    assert (architecture, decline.code if decline else "") == DECIDED[name]


@pytest.mark.parametrize("name", [name for name, (_, code) in DECIDED.items() if code])
def test_a_decided_answer_starts_no_engine(name, monkeypatch, capsys):
    monkeypatch.setattr(child, "run", lambda *job, **progress: pytest.fail("an engine"))
    assert cli.main(["check", str(CONFIGS / f"{name}.json"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    architecture, code = DECIDED[name]
    assert (said["model"], said["fuses"], said["checked_by"]) == (
        architecture, False, "configuration"
    )  # fmt: skip
    assert [reason["code"] for reason in said["reasons"]] == [code]
    assert said["commands"] == {} and said["tokens"] is None


@pytest.mark.parametrize(
    "architecture, platforms",
    [
        ("DeepseekV3ForCausalLM", {"nvidia", "amd"}),
        ("HYV4ForCausalLM", {"amd"}),
        ("DeepseekV4ForCausalLM", set()),
        ("KimiK25ForConditionalGeneration", None),  # runs the class of another file
        ("NoSuchForCausalLM", None),
    ],
)
def test_where_vllm_0_32_compiles_a_class(architecture, platforms):
    vllm = pytest.importorskip("vllm")
    if not vllm.__version__.startswith("0.32"):
        pytest.skip(f"the table is that of vLLM 0.32, this is {vllm.__version__}")
    assert model_classes.where_compiled(architecture) == platforms


def test_the_registry_that_is_read_is_the_one_vllm_uses():
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    read = model_classes._registry()
    prefix = "vllm.model_executor.models."
    used = {
        name: known.module_name.removeprefix(prefix)
        for name, known in registry.ModelRegistry.models.items()
        if name in read
    }
    assert len(used) > 200
    assert {name: read[name] for name in used} == used


# --- check: the answer


def test_the_answer_comes_first_and_can_be_pasted(checked, tmp_path):
    argv = ("--max-num-seqs", "64", "--tensor-parallel-size", "2", "--speculative-tokens", "1")
    status, _, printed = checked(2, *argv, "--kv-cache-dtype", "fp8")
    lines = printed.splitlines()
    assert status == 0
    assert lines[0] == (
        "DeepseekV3ForCausalLM: fuses. Every MLA layer, in graphs for 1 to 128 tokens"
    )
    assert "NVIDIA GPUs" in lines[1] and "AMD GPUs" in lines[1] and "not yet run" in lines[1]
    serve = f"vllm serve {tmp_path} --tensor-parallel-size 2 --max-num-seqs 64 --kv-cache-dtype fp8"
    assert shlex.split(lines[3]) == [*serve.split(), f"-cc.pass_config.{config.FLAG}=True"]
    assert not lines[4]


def test_a_file_stands_for_a_model_of_any_name(checked, tmp_path, capsys):
    checked(2)
    assert cli.main(["check", str(tmp_path / "config.json")]) == 0
    assert "vllm serve MODEL --max-num-seqs 256 -cc." in capsys.readouterr().out


def test_the_answer_as_json(checked):
    status, _, printed = checked(2, "--json")
    said = json.loads(printed)
    assert status == 0 and said["fuses"] is True and said["checked_by"] == "engine"
    assert said["tokens"] == [1, 256] and said["platforms"] == ["nvidia", "amd"]
    assert said["cut_model"] == {"fused": 2, "layers": 2} and said["reasons"] == []
    assert set(said["commands"]) == {"nvidia", "amd"}


def test_reasons_are_read_from_the_warning_that_switched_the_flag_off():
    for code in reasons.REASONS:
        for detail in ("", "q [7] (odd)"):
            decline = reasons.Decline(code, detail)
            line = f"the flag is switched off: {decline.explain()}"
            assert check._reasons(None, ["another warning", line]) == [decline]
