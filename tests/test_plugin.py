"""The flag in vLLM's configuration: every way to set it, what it switches on, when it declines.

Real VllmConfig objects of the installed vLLM on a CPU; no engine is started.
"""

import copy
import dataclasses
import json
import logging
import pickle
import sys

import pytest

import mla_fusion
from mla_fusion import attention, config, ops, plugin
from mla_fusion.config import vllm_compat
from mla_fusion.report import reasons
from mla_fusion.report.reasons import Decline
from tests import aiter_double
from tests.command import run
from tests.models import DEEPSEEK_V2, LLAMA, config_of, register_configs, write

mla_fusion.register()

from pydantic import TypeAdapter  # noqa: E402
from vllm.config import CompilationConfig, CUDAGraphMode, PassConfig  # noqa: E402
from vllm.config.utils import replace  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

FLAG_ON = {config.FLAG: True}
# Fields of the compilation config that the flag sets.
CHARGED = ("mode", "compile_ranges_endpoints", "splitting_ops")
REFERENCE = {"mla_fusion": {"provider": "reference"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    register_configs()
    v32 = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    for name, model in (
        ("mla", DEEPSEEK_V2),
        ("llama", LLAMA),
        ("deepseek_v32", {**DEEPSEEK_V2, **v32, "index_topk": 2048}),
        ("deepseek_v4", {**DEEPSEEK_V2, "architectures": ["DeepseekV4ForCausalLM"]}),
        ("sarvam", config_of("sarvam")),
    ):
        write(folder / name, model)
    return folder


@pytest.fixture
def make(models):
    """make(pass_config=..., **engine arguments) -> VllmConfig."""

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


def warnings(log):
    """This library's."""
    records = [r for r in log.records if (r.name, r.levelname) == ("vllm.mla_fusion", "WARNING")]
    return [r.getMessage() for r in records]


def alone(code, *arguments):
    """What `code` prints in a process of its own, where nothing has loaded the plugin yet."""
    return run(sys.executable, "-c", code, *arguments)


def decided(made):
    """The code that the config is declined for, or an empty string."""
    decline = config.decide(made, partition_refused=False).decline
    return decline.code if decline else ""


def drafted(tokens):
    return {"method": "ngram", "num_speculative_tokens": tokens} if tokens else None


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

    def test_pass_config_object(self, make):
        assert config.is_on(make(PassConfig(**FLAG_ON)))

    def test_dictionary_as_llm_takes_it(self, make):
        assert config.is_on(make(compilation_config={"pass_config": FLAG_ON}))

    def test_it_survives_the_pickle_to_a_worker_that_has_not_loaded_the_plugin(self, make):
        made = make(FLAG_ON)
        code = f"""
import pickle
made = pickle.loads({pickle.dumps(made)!r})
from mla_fusion import config
assert config.is_on(made)
print("hash", made.compute_hash())
"""
        assert f"hash {made.compute_hash()}" in alone(code)

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

    def test_without_the_plugin_it_is_refused(self):
        code = f"""
from pydantic import ValidationError
from vllm.config import CompilationConfig
try:
    CompilationConfig(pass_config={FLAG_ON!r})
except ValidationError as error:
    assert {config.FLAG!r} in str(error), error
else:
    raise SystemExit("accepted without the plugin")
import mla_fusion
mla_fusion.register()
CompilationConfig(pass_config={FLAG_ON!r})
"""
        alone(code)


class TestWhatItSwitchesOn:
    def test_prerequisites_with_one_line_each_at_debug(self, make, caplog, monkeypatch):
        # A logger of its own: vLLM sets the levels of those below it anew while it starts.
        caplog.set_level(logging.DEBUG, logger="apart")
        monkeypatch.setattr(plugin, "logger", logging.getLogger("apart"))
        made = make(FLAG_ON)
        compilation = made.compilation_config
        assert compilation.mode == 3
        assert compilation.use_inductor_graph_partition
        assert 4 in compilation.compile_ranges_endpoints
        assert set(ops.RUNTIME_OPS) <= set(compilation.splitting_ops)
        records = [r for r in caplog.records if r.name == "apart"]
        lines = [r.getMessage() for r in records]
        for word in ("VLLM_COMPILE", "use_inductor_graph_partition", "up to 4 tokens"):
            assert len([line for line in lines if word in line]) == 1, (word, lines)
        assert {r.levelno for r in records} == {logging.DEBUG}

    @pytest.mark.parametrize(
        "seqs, drafts, override, bucket",
        [(4, 0, None, 4), (1, 0, None, 2), (4, 0, 64, 64), (4, 3, None, 16)],
    )
    def test_decode_bucket(self, make, seqs, drafts, override, bucket):
        pass_config = {**FLAG_ON, config.THRESHOLD: override}
        made = make(pass_config, max_num_seqs=seqs, speculative_config=drafted(drafts))
        assert config.decode_bucket(made) == bucket
        assert bucket in made.compilation_config.compile_ranges_endpoints

    @pytest.mark.parametrize(
        "seqs, drafts, sizes, bucket",
        [
            (100, 0, [96, 104, 112], 104),
            (100, 0, [96, 100, 104], 100),
            (100, 0, [64], 100),  # larger batches run without a CUDA graph
            (33, 2, [96, 104], 105),  # whole queries of three tokens
        ],
    )
    def test_the_bucket_holds_the_graph_a_full_batch_is_padded_to(
        self, make, seqs, drafts, sizes, bucket
    ):
        made = make(max_num_seqs=seqs, speculative_config=drafted(drafts))
        made.compilation_config.cudagraph_capture_sizes = sizes
        assert config.decode_bucket(made) == bucket

    def test_the_bucket_stays_when_vllm_changes_its_graphs_later(self, make):
        made = make(FLAG_ON)
        made.compilation_config.cudagraph_capture_sizes = [64]
        assert config.decode_bucket(made) == 4

    def test_a_bucket_as_large_as_the_batch_adds_no_endpoint(self, make):
        off = make()
        tokens = off.scheduler_config.max_num_batched_tokens
        made = make({**FLAG_ON, config.THRESHOLD: 10 * tokens})
        assert config.decode_bucket(made) == tokens
        assert made.compilation_config.compile_ranges_endpoints == [tokens]

    @pytest.mark.parametrize(
        "attention, hopper, asked, pages",
        [("portable", True, None, 64), ("portable", True, 16, 16), ("portable", False, None, 16),
         ("auto", True, None, 16)],
    )  # fmt: skip
    def test_a_page_holds_a_tile_of_the_portable_decode(
        self, make, monkeypatch, attention, hopper, asked, pages
    ):
        monkeypatch.setattr(vllm_compat, "is_hopper", lambda: hopper)
        options = {"mla_fusion": {"provider": "reference", "attention": attention}}
        given = {} if asked is None else {"block_size": asked}
        cache = make(FLAG_ON, options=options, **given).cache_config
        assert cache.block_size == pages
        # What vLLM asks before it lets the backend choose.
        assert cache.user_specified_block_size == (pages == 64 or asked is not None)

    @pytest.mark.parametrize(
        "flag, asked, said",
        [
            (True, 1, "=1 becomes 2"),
            (True, 10**6, "=1000000 becomes 2048"),
            (False, 64, "has no effect"),
            (True, 64, ""),
        ],
    )
    def test_a_threshold_that_is_not_taken_as_it_is(self, make, log, flag, asked, said):
        speculative = drafted(3)  # a draft model's config is made from the engine's
        made = make({config.FLAG: flag, config.THRESHOLD: asked}, speculative_config=speculative)
        replace(made, attention_config=replace(made.attention_config, backend=None))
        assert len(warnings(log)) == bool(said)
        assert said in "".join(warnings(log))

    @pytest.mark.parametrize(
        "compilation", [{"splitting_ops": []}, {"use_inductor_graph_partition": True}], ids=str
    )
    def test_vllms_own_fusion_stays_off_on_a_cpu(self, make, compilation):
        """It is vLLM's default here, and its pass manager then raises NameError on a CPU build."""
        made = make(FLAG_ON, compilation)
        assert config.is_on(made)
        assert not made.compilation_config.pass_config.fuse_rope_kvcache_cat_mla

    @pytest.mark.parametrize(("given", "became", "said"), [(True, True, 0), (False, True, 1)])
    def test_vllms_own_fusion_may_be_on_by_default(
        self, make, log, monkeypatch, given, became, said
    ):
        """As vllm#49142 makes it. It is then no prerequisite that this library sets, nor says."""
        made = make(FLAG_ON, {"use_inductor_graph_partition": True})
        passes = made.compilation_config.pass_config
        passes.fuse_rope_kvcache_cat_mla = given
        monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
        log.clear()
        log.set_level(logging.DEBUG, logger="vllm.mla_fusion")
        plugin._apply_decision(made)
        assert passes.fuse_rope_kvcache_cat_mla is became and config.is_on(made)
        lines = [r.getMessage() for r in log.records if r.name == "vllm.mla_fusion"]
        assert len([line for line in lines if "fuse_rope_kvcache_cat_mla" in line]) == said
        assert not warnings(log)

    def test_endpoints_of_the_operator_stay(self, make):
        made = make(FLAG_ON, {"compile_ranges_endpoints": [32]})
        assert {4, 32} <= set(made.compilation_config.compile_ranges_endpoints)


DECLINES = {
    "no-mla": {"model": "llama"},
    "not-compiled": {"enforce_eager": True},
    "graph-partition": {"compilation": {"use_inductor_graph_partition": False}},
    "functionalization-v2": {
        "compilation": {"inductor_compile_config": {"enable_auto_functionalized_v2": True}}
    },
    "provider-platform": {"options": {}},
    "provider-unavailable": {"options": {"mla_fusion": {"provider": "aiter"}}},
}


class TestDeclines:
    @pytest.mark.parametrize("code", DECLINES)
    def test_one_warning_that_names_the_reason_and_the_help(self, make, log, code):
        made = make(FLAG_ON, **DECLINES[code])
        assert not config.is_on(made)
        [warning] = warnings(log)
        assert f"[{code}]" in warning
        assert reasons.REASONS[code].help in warning

    def test_nothing_is_charged(self, make):
        declined, off = make(FLAG_ON, model="llama"), make(model="llama")
        for name in (*CHARGED, "compile_sizes", "use_inductor_graph_partition"):
            of_declined, of_off = (getattr(c.compilation_config, name) for c in (declined, off))
            assert of_declined == of_off

    @pytest.mark.parametrize("asked", [True, False], ids=["by the operator", "by vLLM"])
    def test_breakable_cudagraphs(self, make, log, monkeypatch, asked):
        """vLLM sets the variable itself for some architectures, most of them without a graph."""
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        if not asked:
            monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
        assert not config.is_on(make(FLAG_ON, model="mla" if asked else "deepseek_v4"))
        [warning] = warnings(log)
        assert "[breakable-cudagraph]" in warning
        assert f"({'DeepseekV2' if asked else 'DeepseekV4'}ForCausalLM)" in warning

    def test_sparse_attention_is_the_reason_before_its_class(self, make, log, monkeypatch):
        """As mla-fusion check says; vLLM would switch torch.compile off for the class as well."""
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # vLLM sets it for this class
        monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
        assert not config.is_on(make(FLAG_ON, model="deepseek_v32"))
        [warning] = warnings(log)
        assert "(index_topk 2048) [sparse-attention]" in warning

    @pytest.mark.parametrize(
        "mode, splitting_ops, parallel, code",
        [
            ("FULL", None, "", "cudagraph-full"),
            ("FULL_AND_PIECEWISE", None, "", ""),
            ("FULL_AND_PIECEWISE", [], "", "cudagraph-full"),
            ("FULL_DECODE_ONLY", [], "", ""),
            ("FULL_DECODE_ONLY", [], "decode_context_parallel_size", ""),
            ("FULL_DECODE_ONLY", [], "prefill_context_parallel_size", "context-parallel"),
        ],
    )
    def test_full_cudagraphs_and_context_parallelism(
        self, make, mode, splitting_ops, parallel, code
    ):
        """Asked of `decide`: vLLM on a CPU resets the mode, and knows no context parallelism."""
        made = make(FLAG_ON)
        made.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        made.compilation_config.splitting_ops = splitting_ops
        if parallel:
            setattr(made.parallel_config, parallel, 2)
        assert decided(made) == code

    @pytest.mark.parametrize(
        "options, detail",
        [
            ({"provider": "aiter"}, "AITER leaves out queries"),
            ({"provider": "reference", "attention": "portable"}, "attention=portable"),
        ],
    )
    def test_what_decode_context_parallelism_leaves_out(self, make, monkeypatch, options, detail):
        monkeypatch.setattr(config.kernels, "get_provider", lambda name: None)
        made = make(FLAG_ON)
        made.additional_config = {"mla_fusion": options}
        assert not decided(made)
        made.parallel_config.decode_context_parallel_size = 2
        decline = config.decide(made, partition_refused=False).decline
        assert decline.code == "context-parallel" and detail in decline.detail

    def test_portable_attention(self, make, log, monkeypatch):
        options = {"mla_fusion": {"provider": "reference", "attention": "portable"}}
        made = make(FLAG_ON, options=options)
        assert config.is_on(made)
        made.parallel_config.enable_dbo = True
        assert decided(made) == "microbatches"
        made.parallel_config.enable_dbo = False

        def unavailable(name):
            raise attention.ProviderUnavailable(f"no {name} here")

        monkeypatch.setattr(attention, "get_provider", unavailable)
        decision = config.decide(made, partition_refused=False)
        assert decision.decline == Decline(
            "provider-unavailable", "attention=portable, reference: no reference here"
        )

    def test_attention_of_aiter(self, make, log, monkeypatch):
        """Off ROCm, without AITER, with one too old for the cap, and with two microbatches."""
        options = {"provider": "reference", "attention": "aiter", "max_split_per_batch": 16}
        assert not config.is_on(make(FLAG_ON, options={"mla_fusion": options}))
        [warning] = warnings(log)
        assert "[attention-platform]" in warning and 'choose "portable"' in warning
        monkeypatch.setattr(vllm_compat, "is_rocm", lambda: True)

        def decline():
            return config.decide(made, partition_refused=False).decline

        with aiter_double.installed("gfx942", "v0.1.10.post2"):
            made = make(FLAG_ON, options={"mla_fusion": options | {"max_split_per_batch": -1}})
            assert config.is_on(made) and decline() is None
            made.parallel_config.enable_dbo = True
            assert decided(made) == "microbatches"
            made.additional_config = {"mla_fusion": options}
            assert decline() == Decline(
                "provider-unavailable",
                "attention=aiter: this AITER sizes its buffers without max_split_per_batch: leave "
                "it at -1, or install v0.1.16 or newer",
            )
        attention.get_provider.cache_clear()
        found = decline()
        assert found.code == "provider-unavailable"
        assert found.detail.startswith("attention=aiter: the module aiter is missing")

    def test_the_pass_knows_who_decodes_how_many_rows(self, make):
        from vllm.compilation.passes.pass_manager import PostGradPassManager
        from vllm.config import set_current_vllm_config

        options = {"mla_fusion": {"provider": "reference", "attention": "portable"}}
        made = make(FLAG_ON, options=options, speculative_config=drafted(3))
        with set_current_vllm_config(made):
            manager = PostGradPassManager()
            manager.configure(made)
        [ours] = [step for step in manager.passes if type(step).__name__ == "MLAFusionPass"]
        assert (ours.provider, ours.attention, ours.query_len) == ("reference", "portable", 4)

    @pytest.mark.parametrize(
        "platform, provider, code",
        [
            ("rocm", "aiter", "provider-unavailable"),
            ("cuda", "triton", "provider-unavailable"),
            ("cpu", "", "provider-platform"),
        ],
    )
    def test_the_default_provider_is_the_platforms_and_no_other_replaces_it(
        self, make, monkeypatch, platform, provider, code
    ):
        """None of the two can run here."""
        made = make(FLAG_ON)
        made.additional_config = {}
        for name in ("rocm", "cuda"):
            is_it = platform == name
            monkeypatch.setattr(type(current_platform), f"is_{name}", lambda _, is_it=is_it: is_it)
        decision = config.decide(made, partition_refused=False)
        assert (decision.provider, decision.decline.code) == (provider, code)
        assert decision.decline.detail.startswith(provider)


class TestDraftModels:
    """vLLM makes a draft model's config by `replace`; both share one compilation config."""

    def test_the_config_can_be_replaced(self, make):
        made = make(FLAG_ON, speculative_config=drafted(3))
        again = replace(made, attention_config=replace(made.attention_config, backend=None))
        assert again.compilation_config is made.compilation_config
        assert config.is_on(again)

    def test_a_draft_without_mla_does_not_switch_the_flag_off(self, make, log):
        made = make(FLAG_ON, speculative_config=drafted(3))
        before = copy.deepcopy(made.compilation_config)
        replace(made, model_config=make(model="llama").model_config)
        assert config.is_on(made)
        assert not warnings(log)
        for name in ("backend", *CHARGED):
            assert getattr(made.compilation_config, name) == getattr(before, name)


def test_a_model_with_mla_that_is_not_in_vllms_list_of_types(make, log):
    assert config.is_on(make(FLAG_ON, model="sarvam"))
    assert not warnings(log)


class TestBadInput:
    def test_unknown_key(self):
        with pytest.raises(Exception, match="fuse_aiter_qk_rope_kvcache_mal"):
            CompilationConfig(pass_config={"fuse_aiter_qk_rope_kvcache_mal": True})

    @pytest.mark.parametrize("value", [0, -1, 2.5, "many"])
    def test_threshold_that_is_no_positive_integer(self, value):
        with pytest.raises(Exception, match=config.THRESHOLD):
            CompilationConfig(pass_config={config.THRESHOLD: value})

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
        import vllm.config
        from vllm.compilation.passes.pass_manager import PostGradPassManager
        from vllm.platforms import current_platform
        from vllm.v1.worker.worker_base import WorkerBase

        def changed():
            return [
                vllm.config.PassConfig,
                vllm.config.PassConfig.__mro__,
                vllm.config.VllmConfig.__post_init__,
                vllm.config.VllmConfig._set_compile_ranges,
                PostGradPassManager.configure,
                current_platform.check_and_update_config.__func__,
                WorkerBase.__init__,
            ]

        before = changed()
        monkeypatch.setattr(plugin, "_registered", False)
        plugin.register()
        assert plugin._registered
        assert changed() == before
