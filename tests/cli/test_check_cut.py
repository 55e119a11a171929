"""How `mla-fusion check` reads a config, and cuts the model that it runs."""

import json

import pytest

from mla_fusion.cli.check import model_config
from tests.cli.test_check import CONFIGS, V3
from tests.cli.test_check_decode import cut_of
from tests.cli.test_cli import fail
from tests.models import write


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
def test_the_language_part_of_a_multimodal_model_is_read(key, runs, name, tmp_path):
    """It is named after the whole model, whose class counts where the part names none."""
    part = {k: v for k, v in V3.items() if k != key}
    write(tmp_path, {"model_type": "s", "architectures": ["S"], "text_config": part})
    path = tmp_path / "config.json"
    found = model_config.read(tmp_path)
    kinds = found.kinds
    assert found == model_config.Model(path, part, runs, name, kinds)
    assert sorted(kinds) == ["deepseek_v3", "s"]


def test_a_params_json_is_read_as_vllm_does(tmp_path, capsys):
    params = json.loads((CONFIGS / "mistral-large-3.json").read_text())
    path = tmp_path / "params.json"
    path.write_text(json.dumps(params))
    model = model_config.read(tmp_path)
    read = model.config
    assert (model.architecture, read["model_type"]) == ("MistralLarge3ForCausalLM", "deepseek_v3")
    assert (read["num_attention_heads"], read["kv_lora_rank"]) == (128, 512)
    assert read["llama_4_scaling"]["beta"] == 0.1
    del params["llama_4_scaling"]["beta"]
    path.write_text(json.dumps(params))
    assert "llama_4_scaling config should define" in fail(capsys, "check", tmp_path)
