"""Real VllmConfig objects of the installed vLLM on a CPU; no engine is started."""

import logging

import pytest
import torch

from mla_fusion import plugin
from tests.models import DEEPSEEK_V2, LLAMA, config_of, register_configs, write
from tests.plugin.configs import REFERENCE

plugin.register()

from vllm.config import CompilationConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    register_configs()
    for name, model in (
        ("mla", DEEPSEEK_V2),
        ("llama", LLAMA),
        ("sarvam", config_of("sarvam")),
    ):
        write(folder / name, model)
    return folder


@pytest.fixture
def make(models, monkeypatch):
    """make(pass_config=..., **engine arguments) -> VllmConfig, of a CPU without AMX: with it vLLM
    takes other pages and batches."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def build(pass_config=None, compilation=None, model="mla", options=REFERENCE, **kwargs):
        compilation_config = dict(compilation or {})
        if pass_config is not None:
            compilation_config["pass_config"] = pass_config
        arguments = {
            "model": str(models / model),
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 4,
            "additional_config": options,
            "compilation_config": CompilationConfig(**compilation_config),
            **kwargs,
        }
        return EngineArgs(**arguments).create_engine_config()

    return build


@pytest.fixture
def log(vllm_loggers, caplog):
    """The log lines of this library."""
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    return caplog
