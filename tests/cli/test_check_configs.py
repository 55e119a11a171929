"""What `mla-fusion check` reads in a configuration, says by it or by vLLM's source alone, and cuts
for an engine."""

import copy
import json
import re
from pathlib import Path

import pytest

from mla_fusion import cli
from mla_fusion.cli import child
from mla_fusion.cli.check import command as check
from mla_fusion.cli.check import language_part, model_classes, model_config
from tests.cli.test_check import CONFIGS, V3, asked
from tests.cli.test_cli import fail
from tests.models import write

DECIDED = {
    "llama-3": ("LlamaForCausalLM", "no-mla"),
    "minicpm3": ("MiniCPM3ForCausalLM", "no-mla"),
    "deepseek-v3.2": ("DeepseekV32ForCausalLM", "sparse-attention"),
    # The fields that name its attention; no kv_lora_rank.
    "deepseek-v4-flash": ("DeepseekV4ForCausalLM", "sparse-attention"),
    # vLLM knows the model type of the whole, not that of the language part.
    "deepseek-v4.1-flash": ("DeepseekV41ForCausalLM", "sparse-attention"),
    "kimi-k3": ("KimiK3ForConditionalGeneration", "breakable-cudagraph"),
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", ""),
    "deepseek-v3": ("DeepseekV3ForCausalLM", ""),
    "deepseek-vl2": ("DeepseekV2ForCausalLM", ""),
    "kimi-k2": ("DeepseekV3ForCausalLM", ""),
    "glm-4.7-flash": ("Glm4MoeLiteForCausalLM", ""),
    "longcat-flash": ("LongcatFlashForCausalLM", ""),
    "mistral-large-3": ("MistralLarge3ForCausalLM", ""),
    # The values of Mistral4Config of transformers, under the names of Mistral's params.json
    "mistral-small-4": ("MistralLarge3ForCausalLM", ""),
    "openpangu-ultra-moe": ("PanguUltraMoEForCausalLM", ""),
    "ring-2.5": ("BailingMoeV2_5ForCausalLM", ""),
    "sarvam-105b": ("SarvamMLAForCausalLM", ""),
    "deepseek-v3-mtp": ("DeepSeekMTPModel", ""),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_what_the_configuration_decides(name):
    model = model_config.read(CONFIGS / f"{name}.json")
    decline = model_classes.decide(model.config, model.architecture)
    assert (model.architecture, decline.code if decline else "") == DECIDED[name]


ENVIRONMENTS = {"VLLM_BATCH_INVARIANT": "batch-invariant", "VLLM_MLA_DISABLE": "environment"}
STARTS_NO_ENGINE = [(name, code, "") for name, (_, code) in DECIDED.items() if code]
STARTS_NO_ENGINE += [
    (name, "no-mla" if name == "llama-3" else code, variable)
    for name in ("llama-3", "deepseek-v3.2", "kimi-k2")
    for variable, code in ENVIRONMENTS.items()
]


@pytest.mark.parametrize("name, code, variable", STARTS_NO_ENGINE)
def test_a_decided_answer_starts_no_engine(name, code, variable, monkeypatch, capsys):
    if variable:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(child, "run", lambda *job, **progress: pytest.fail("an engine"))
    assert cli.main(["check", str(CONFIGS / f"{name}.json"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["model"], said["fuses"], said["checked_by"]) == (
        DECIDED[name][0], False, "configuration"
    )  # fmt: skip
    assert [reason["code"] for reason in said["reasons"]] == [code]
    assert said["commands"] == {} and said["tokens"] is None


@pytest.fixture
def vllm_0_32():
    """The tables below were read in its sources; another release has other classes and backends."""
    vllm = pytest.importorskip("vllm")
    if not vllm.__version__.startswith("0.32"):
        pytest.skip(f"the table is that of vLLM 0.32, this is {vllm.__version__}")


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
@pytest.mark.usefixtures("vllm_0_32")
def test_where_vllm_0_32_compiles_a_class(architecture, platforms):
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


TAKES_ALL = ["FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"]
AITER = ["ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "TRITON_MLA"]


@pytest.mark.parametrize(
    "platform, heads, head_size, cache, names",
    [
        ("nvidia", 16, 576, "auto", [*TAKES_ALL, "FLASH_ATTN_MLA"]),
        # CUTLASS_MLA pads to 128 heads.
        ("nvidia", 128, 576, "auto", [*TAKES_ALL, "FLASH_ATTN_MLA", "CUTLASS_MLA"]),
        ("nvidia", 16, 576, "fp8", [*TAKES_ALL, "TOKENSPEED_MLA"]),
        ("nvidia", 16, 288, "auto", ["TRITON_MLA"]),
        ("nvidia", 2, 32, "auto", ["TRITON_MLA"]),  # a part of 320
        ("amd", 16, 288, "fp8", AITER),
    ],
)
@pytest.mark.usefixtures("vllm_0_32")
def test_which_attention_backends_take_the_query(platform, heads, head_size, cache, names):
    found = model_classes.backends(platform)
    taken = [each.name for each in found if each.takes(heads, head_size, cache)]
    assert taken == sorted(names)


def decided(architecture):
    return lambda: model_classes.decide({"kv_lora_rank": 512}, architecture)


def taken():
    return model_classes.backends("nvidia")


BACKENDS, MLA = "v1/attention/backends", "v1/attention/backends/mla"
MODELS, LAYER = "model_executor/models", "model_executor/layers/attention/mla_attention.py"
DEEPSEEK = decided("DeepseekV3ForCausalLM")


@pytest.mark.parametrize(
    "file, lost, ask, said",
    [
        ("config/vllm.py", "DeepSeekV4MTPModel", DEEPSEEK, "list of architectures without"),
        (f"{MODELS}/registry.py", "\\(", DEEPSEEK, "table of architectures"),
        (f"{MODELS}/registry.py", "_MODELS = ", lambda: model_classes.is_draft_head("A"),
         "table of classes for speculative decoding"),
        (f"{MODELS}/llama.py", "import", decided("LlamaForCausalLM"), "import of another model"),
        ("model_executor/layers/mla.py", "class", decided("LlamaForCausalLM"),
         "definition of MultiHeadLatentAttention"),
        ("compilation/decorators.py", "def ", DEEPSEEK, "definition of @support_torch_compile"),
        (f"{BACKENDS}/registry.py", "vllm", taken, "table of backends"),
        (f"{BACKENDS}/registry.py", "    CUTLASS_MLA", taken, "CUTLASS_MLA"),
        ("platforms/cuda.py", "AttentionBackendEnum", taken, "MLA attention backend"),
        (f"{MLA}/cutlass_mla.py", "class CutlassMLABackend", taken, "class CutlassMLABackend"),
        (f"{MLA}/cutlass_mla.py", "MAX_HEADS = ", taken, "value of MAX_HEADS"),
        (f"{MLA}/cutlass_mla.py", "= \\[", taken, "list in supported_kv_cache_dtypes of Cutlass"),
        (LAYER, "return \\[", taken, "list in get_supported_head_sizes of"),
        (LAYER, "def get_supported_head_sizes", taken, "list in get_supported_head_sizes of"),
    ],
)  # fmt: skip
def test_a_file_of_vllm_without_what_is_looked_for_is_an_error(file, lost, ask, said, monkeypatch):
    """Not an empty list, by which every model would fuse, or none."""
    path, read = model_classes._folder("vllm") / file, Path.read_text

    def without(self, *given, **options):
        text = read(self, *given, **options)
        return re.sub(lost, "", text) if self == path else text

    for cached in ("_registry", "_classes"):
        monkeypatch.setattr(model_classes, cached, getattr(model_classes, cached).__wrapped__)
    monkeypatch.setattr(Path, "read_text", without)
    with pytest.raises(cli.UserError) as raised:
        ask()
    assert re.match(rf"found no {said}.* in {path}: mla-fusion reads", str(raised.value))


@pytest.mark.parametrize(
    "attention, platforms, aiters", [("auto", 2, True), ("portable", 2, False), ("aiter", 1, True)]
)
def test_backends_go_with_the_decode(attention, platforms, aiters):
    cut = cut_of({**V3, "num_attention_heads": 128}, ranks=8)
    settings = asked("m", "--attention", attention)
    found = check._backends(settings, cut, model_classes.look_up(model_of(V3)))
    assert (len(found), any("AITER" in name for name in found["amd"])) == (platforms, aiters)


# --- what is read and what is run


def model_of(config):
    [name] = config["architectures"]
    return model_config.Model(Path("c"), config, name, name, (config["model_type"],))


def cut_of(config, layers=2, ranks=1):
    return model_config.cut(model_of(config), layers, ranks)


def test_the_cut_keeps_what_decides_about_fusion():
    made = cut_of(V3, ranks=2)
    kept = "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim rope_scaling"
    assert {k: made.config[k] for k in kept.split()} == {k: V3[k] for k in kept.split()}
    assert made.config["num_attention_heads"] == V3["num_attention_heads"] // 2
    assert made.head_size == 576


LARGE = {"eos_token_id": 129279, "bos_token_id": 1, "layer_types": ["mla"] * 61, "auto_map": {}}
SMALL = {"eos_token_id": 0, "bos_token_id": 1, "layer_types": ["mla"] * 2, "auto_map": None}
SMALL |= {"hidden_size": 512, "vocab_size": 1024, "n_routed_experts": 8, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "name, changes, kept",
    [
        ("deepseek-v3", LARGE, {**SMALL, "first_k_dense_replace": 2, "quantization_config": None}),
        ("openpangu-ultra-moe", {}, {"first_k_dense_replace": 1, "num_hidden_layers": 2}),
        ("sarvam-105b", {}, {"first_k_dense_replace": 1, "num_hidden_layers": 2}),
        ("ring-2.5", {}, {"first_k_dense_replace": 2, "layer_group_size": 1}),
        ("deepseek-v2-lite", {"num_attention_heads": 12}, {"hidden_size": 576}),
        ("deepseek-v3", {"num_attention_heads": 40}, {"hidden_size": 640}),
        ("deepseek-v3-mtp", {}, {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
            "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "first_k_dense_replace": 2,
        }),
    ],
)  # fmt: skip
def test_the_cut_is_small_and_keeps_what_the_class_needs(name, changes, kept):
    """A layer of experts, a hidden size that its heads divide, MLA layers, a target."""
    model = model_config.read(CONFIGS / f"{name}.json")
    small = cut_of({**model.config, **changes}).config
    assert {key: small.get(key) for key in kept} == kept


@pytest.mark.parametrize(
    "key, runs, name",
    [("", "DeepseekV3ForCausalLM", "S (DeepseekV3ForCausalLM)"), ("architectures", "S", "S")],
)
@pytest.mark.parametrize("places", [
    ["text_config"], ["language_config"], ["llm_config"], ["thinker_config", "text_config"],
    ["its_own_name"], ["outer", "decoder", "text_config"],
], ids=".".join)  # fmt: skip
def test_the_language_part_of_a_multimodal_model_is_read(places, key, runs, name, tmp_path):
    """It is named after the whole model, whose class counts where the part names none."""
    part = {k: v for k, v in V3.items() if k != key}
    nested = part
    for place in reversed(places):
        nested = {"vision_config": {**V3, "num_attention_heads": 3}, place: nested}
    write(tmp_path, {"model_type": "s", "architectures": ["S"], **nested})
    found = model_config.read(tmp_path)
    assert found == model_config.Model(tmp_path / "config.json", part, runs, name, found.kinds)
    assert sorted(found.kinds) == ["deepseek_v3", "s"]


@pytest.mark.parametrize("kind, place", [
    ("deepseek_vl_v2", "language_config"), ("kimi_vl", "text_config"), ("kimi_k25", "text_config"),
])  # fmt: skip
def test_the_language_part_is_the_one_that_vllm_takes(kind, place):
    of_vllm = pytest.importorskip("vllm.transformers_utils.config")
    whole = {"model_type": kind, place: dict(V3)}
    taken = of_vllm.get_hf_text_config(of_vllm._CONFIG_REGISTRY[kind](**copy.deepcopy(whole)))
    part = language_part.find(whole)
    keys = ["num_attention_heads", "kv_lora_rank", "q_lora_rank", "hidden_size", "vocab_size"]
    assert [part[key] for key in keys] == [getattr(taken, key) for key in keys]


def test_a_params_json_is_read_as_vllm_does(tmp_path, capsys):
    params = json.loads((CONFIGS / "mistral-large-3.json").read_text())
    path = tmp_path / "params.json"
    path.write_text(json.dumps(params))
    model = model_config.read(tmp_path)
    read = model.config
    assert (model.architecture, read["model_type"]) == ("MistralLarge3ForCausalLM", "deepseek_v3")
    assert (read["num_attention_heads"], read["kv_lora_rank"]) == (128, 512)
    assert read["llama_4_scaling"]["beta"] == 0.1
    odd = json.loads((CONFIGS / "mistral-small-4.json").read_text()) | {"text_config": 0.5}
    path.write_text(json.dumps(odd))
    assert "params.json refuses" in fail(capsys, "check", tmp_path)
    del params["llama_4_scaling"]["beta"]
    path.write_text(json.dumps(params))
    assert "llama_4_scaling config should define" in fail(capsys, "check", tmp_path)
