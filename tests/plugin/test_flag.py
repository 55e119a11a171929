"""The flag and the options: every way to set them, what is refused, what the cache key covers."""

import copy
import dataclasses
import json
import pickle
import sys

import pytest
from pydantic import TypeAdapter
from vllm.config import CompilationConfig, PassConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from mla_fusion import config, plugin
from tests.command import run
from tests.plugin.configs import FLAG_ON, REFERENCE


class TestWaysToSetTheFlag:
    @pytest.mark.parametrize(
        "line",
        [
            [f"-cc.pass_config.{config.FLAG}=True", f"-cc.pass_config.{config.THRESHOLD}=64"],
            [f'-cc={{"pass_config": {{"{config.FLAG}": true, "{config.THRESHOLD}": 64}}}}'],
        ],
        ids=["dotted", "json"],
    )
    def test_command_line(self, models, line):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        line += ["--model", str(models / "mla"), "--skip-tokenizer-init", "--max-model-len", "256"]
        line += ["--additional-config", json.dumps(REFERENCE)]
        made = EngineArgs.from_cli_args(parser.parse_args(line)).create_engine_config()
        assert config.is_on(made)
        assert config.decode_bucket(made) == 64

    def test_pass_config_object_and_dictionary_as_llm_takes_it(self, make):
        assert config.is_on(make(PassConfig(**FLAG_ON)))
        assert config.is_on(make(compilation_config={"pass_config": FLAG_ON}))

    def test_a_worker_that_has_not_loaded_the_plugin(self, make):
        """It knows no flag, until a config with the flag comes to it as a pickle."""
        made = make(FLAG_ON)
        code = f"""
import pickle
from pydantic import ValidationError
from vllm.config import CompilationConfig
try:
    CompilationConfig(pass_config={FLAG_ON!r})
except ValidationError as error:
    assert {config.FLAG!r} in str(error), error
else:
    raise SystemExit("accepted without the plugin")
made = pickle.loads({pickle.dumps(made)!r})
from mla_fusion import config
assert config.is_on(made)
CompilationConfig(pass_config={FLAG_ON!r})
print("hash", made.compute_hash())
"""
        assert f"hash {made.compute_hash()}" in run(sys.executable, "-c", code)

    def test_it_is_printed_and_dumped_with_the_other_fields(self):
        made = CompilationConfig(pass_config={**FLAG_ON, "eliminate_noops": False})
        dumped = TypeAdapter(CompilationConfig).dump_python(made)["pass_config"]
        assert dumped[config.FLAG] is True and dumped["eliminate_noops"] is False
        for text in (repr(made), str(made), repr(made.pass_config)):
            assert f"{config.FLAG}': True" in text or f"{config.FLAG}=True" in text
            assert "eliminate_noops" in text

    def test_set_as_an_attribute_of_vllms_own_object(self, make):
        given = PassConfig()
        setattr(given, config.FLAG, True)
        made = make(given)
        assert config.is_on(made)
        passes = made.compilation_config.pass_config
        assert passes.compute_hash() != PassConfig().compute_hash()
        assert f"{config.FLAG}=True" in repr(passes)  # as if it had been given

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, replace, dataclasses.replace])
    def test_it_survives_a_copy(self, make, copied):
        made = make(FLAG_ON).compilation_config
        again = copied(made)
        assert again.pass_config == made.pass_config
        assert again.compute_hash() == made.compute_hash()


class TestBadInput:
    @pytest.mark.parametrize(
        ("key", "value"),
        [(config.FLAG.replace("mla", "mal"), True)]
        + [(config.THRESHOLD, value) for value in (0, -1, 2.5, "many")],
    )
    def test_an_unknown_key_or_a_threshold_that_is_no_positive_integer(self, key, value):
        with pytest.raises(Exception, match=key):
            CompilationConfig(pass_config={key: value})

    @pytest.mark.parametrize(
        "options, names",
        [
            ({"mla_fusion": {"provider": "cuda"}}, "reference, triton, aiter"),
            ({"mla_fusion": {"provder": "triton"}}, "provder"),
            ({"mla_fusion": {"attention": "triton"}}, "choose one of auto, portable, aiter"),
            ({"mla_fusion": {"attention": "aiter", "max_split_per_batch": 0}}, "got 0"),
            ({"mla_fusion": {"attention": "aiter", "max_split_per_batch": -2}}, "-1, for no cap"),
            ({"mla_fusion": {"attention": "aiter", "max_split_per_batch": True}}, "got True"),
            ({"mla_fusion": {"attention": "aiter", "max_split_per_batch": "16"}}, "whole number"),
            ({"mla_fusion": {"max_split_per_batch": 16}}, 'attention is "auto"'),
            ({"mla_fusion": {"attention": "portable", "max_split_per_batch": -1}}, '"portable"'),
            *(
                ({"mla_fusion": {"layers": bad}}, 'ranges of them, such as "0-30", "5" or "0-3,7"')
                for bad in ("", "3-1", "1,", "-2", "1 - 2", "all", 5, None)
            ),
            ({"mla_fusion": {"split": 16}}, "max_split_per_batch .-1, or a whole number"),
            ({"mla_fusion": "triton"}, "must be a dictionary"),
            ({"mla-fusion": {"provider": "reference"}}, 'the key is "mla_fusion"'),
        ],
    )
    def test_options(self, make, options, names):
        with pytest.raises(Exception, match=names):
            make(FLAG_ON, options=options)


class TestHashes:
    def test_hash_covers_the_flag_and_the_threshold(self):
        hashes = {
            PassConfig(**kwargs).compute_hash()
            for kwargs in ({}, FLAG_ON, {**FLAG_ON, config.THRESHOLD: 8})
        }
        assert len(hashes) == 3
        assert PassConfig(**{config.THRESHOLD: 8}).compute_hash() == PassConfig().compute_hash()

    def test_registering_twice_changes_nothing(self, monkeypatch):
        from vllm.compilation.backends import CompilerManager
        from vllm.compilation.passes.pass_manager import PostGradPassManager
        from vllm.platforms import current_platform
        from vllm.v1.worker.worker_base import WorkerBase

        owners = (PassConfig, VllmConfig, CompilerManager, PostGradPassManager, WorkerBase,
                  type(current_platform))  # fmt: skip
        before = [dict(vars(owner)) for owner in owners]
        monkeypatch.setattr(plugin, "_registered", False)
        plugin.register()
        assert plugin._registered
        assert [dict(vars(owner)) for owner in owners] == before
