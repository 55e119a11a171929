"""Why an engine is declined, and that nothing of it is changed."""

import re
from pathlib import Path

import pytest
import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from mla_fusion import attention, config
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.plugin import decode_graph
from mla_fusion.report import reasons
from mla_fusion.report.reasons import Decline
from tests import aiter_double
from tests.plugin.configs import CHARGED, FLAG_ON, decided, drafted, warnings

DECLINES = {
    "no-mla": {"model": "llama"},
    "not-compiled": {"enforce_eager": True},
    "functionalization-v2": {
        "compilation": {"inductor_compile_config": {"enable_auto_functionalized_v2": True}}
    },
    "provider-platform": {"options": {}},
    "provider-unavailable": {"options": {"mla_fusion": {"provider": "aiter"}}},
}
# A setting of docs/compatibility.md that is no variable of vLLM -> arguments of its engine.
ARGUMENTS = {
    '"deterministic"': {"compilation": {"inductor_compile_config": {"deterministic": True}}},
    "torch.use_deterministic_algorithms": {},
}


def promises():
    """(setting, what becomes of it) for each setting in the table of promises about numbers."""
    page = Path(__file__).parents[2].joinpath("docs/compatibility.md").read_text()
    table = page.partition("## Promises about numbers")[2].partition("\n## ")[0]
    for settings, here in re.findall(r"^\| (`.*?) \| ([\w ]+) \|", table, re.M):
        for setting in re.findall(r"`(.+?)`", settings.partition(" of ")[0]):
            yield setting, here


class TestDeclines:
    @pytest.mark.parametrize("setting, here", [*promises()])
    def test_a_promise_about_numbers_is_declined_or_leaves_the_flag_on(
        self, make, log, monkeypatch, setting, here
    ):
        name, _, value = setting.partition("=")
        # Whatever the GPU is.
        portable = {"mla_fusion": {"provider": "reference", "attention": "portable"}}
        if value:
            assert name in envs.environment_variables
            monkeypatch.setenv(name, value)
        elif name.startswith("torch."):
            torch.use_deterministic_algorithms(True)
        try:
            made = make(FLAG_ON, **({"options": portable} if value else ARGUMENTS[name]))
        finally:
            torch.use_deterministic_algorithms(False)
        assert config.is_on(made) is (here != "declined")
        assert all("[batch-invariant]" in warning for warning in warnings(log))
        if name == '"deterministic"':
            assert made.compilation_config.inductor_compile_config["deterministic"]

    @pytest.mark.parametrize(
        "name", ["VLLM_MLA_DISABLE", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"]
    )
    def test_a_variable_that_switches_off_what_fusion_needs(self, make, log, monkeypatch, name):
        """A model without MLA stays one, whatever the environment says."""
        monkeypatch.setenv(name, "1")
        assert not config.is_on(make(FLAG_ON))
        assert not config.is_on(make(FLAG_ON, model="llama"))
        first, second = warnings(log)
        assert f"({name}=1) [environment]. What would help: unset" in first
        assert "[no-mla]" in second

    @pytest.mark.parametrize("code", DECLINES)
    def test_one_warning_that_names_the_reason_and_the_help(self, make, log, code):
        made = make(FLAG_ON, **DECLINES[code])
        assert not config.is_on(made)
        [warning] = warnings(log)
        assert f"[{code}]" in warning
        assert reasons.REASONS[code].help in warning

    def test_nothing_is_charged(self, make):
        made = [make(flag, model="llama").compilation_config for flag in (FLAG_ON, None)]
        for name in (*CHARGED, "compile_sizes", "use_inductor_graph_partition"):
            assert getattr(made[0], name) == getattr(made[1], name)

    def test_breakable_cudagraphs(self, make, log, monkeypatch):
        """By the operator; tests/coverage has the architectures for which vLLM sets it itself."""
        monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
        assert not config.is_on(make(FLAG_ON))
        [warning] = warnings(log)
        assert "(DeepseekV2ForCausalLM) [breakable-cudagraph]" in warning

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
        monkeypatch.setattr(eligibility.kernels, "get_provider", lambda name: None)
        made = make(FLAG_ON)
        made.additional_config = {"mla_fusion": options}
        assert not decided(made)
        made.parallel_config.decode_context_parallel_size = 2
        decline = eligibility.why_not(made)
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
        why = "attention=portable, reference: no reference here"
        assert eligibility.why_not(made) == Decline("provider-unavailable", why)

    def test_attention_of_aiter(self, make, log, monkeypatch):
        """Off ROCm, without AITER, with one too old for the cap, and with two microbatches."""
        options = {"provider": "reference", "attention": "aiter", "max_split_per_batch": 16}
        assert not config.is_on(make(FLAG_ON, options={"mla_fusion": options}))
        [warning] = warnings(log)
        assert "[attention-platform]" in warning and 'choose "portable"' in warning
        monkeypatch.setattr(vllm_compat, "is_rocm", lambda: True)
        with aiter_double.installed("gfx942", "v0.1.10.post2"):
            made = make(FLAG_ON, options={"mla_fusion": options | {"max_split_per_batch": -1}})
            assert config.is_on(made) and eligibility.why_not(made) is None
            made.parallel_config.enable_dbo = True
            assert decided(made) == "microbatches"
            made.additional_config = {"mla_fusion": options}
            old = "this AITER sizes its buffers without max_split_per_batch: leave it at -1, or "
            old = f"attention=aiter: {old}install v0.1.16 or newer"
            assert eligibility.why_not(made) == Decline("provider-unavailable", old)
        attention.get_provider.cache_clear()
        found = eligibility.why_not(made)
        assert found.code == "provider-unavailable"
        assert found.detail.startswith("attention=aiter: the module aiter is missing")

    def test_the_pass_knows_who_decodes_how_many_rows(self, make):
        from vllm.compilation.passes.pass_manager import PostGradPassManager
        from vllm.config import set_current_vllm_config

        options = {"mla_fusion": {"provider": "reference", "attention": "portable"}}
        made = decode_graph.config_of(make(FLAG_ON, options=options, speculative_config=drafted(3)))
        with set_current_vllm_config(made):
            manager = PostGradPassManager()
            manager.configure(made)
        [ours] = [step for step in manager.passes if type(step).__name__ == "MLAFusionPass"]
        assert (ours.provider, ours.attention, ours.query_len) == ("reference", "portable", 4)

    @pytest.mark.parametrize(
        "platform, provider", [("rocm", "aiter"), ("cuda", "triton"), ("", "")]
    )
    def test_the_default_provider_is_the_platforms_and_no_other_replaces_it(
        self, make, monkeypatch, platform, provider
    ):
        """None of the two can run here."""
        made = make(FLAG_ON)
        made.additional_config = {}
        for name in ("rocm", "cuda"):
            is_it = platform == name
            monkeypatch.setattr(type(current_platform), f"is_{name}", lambda _, is_it=is_it: is_it)
        assert config.read_options({}).provider == provider
        decline = eligibility.why_not(made)
        assert decline.code == ("provider-unavailable" if provider else "provider-platform")
        assert decline.detail.startswith(provider)
