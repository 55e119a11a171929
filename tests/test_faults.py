"""Faults: the user reads what happened, and the engine serves the same tokens or does not start.

`docs/development.md` lists every fault with its test. The layers, caches and batches are those of
`tests/passes/fake_engine.py`, the config objects vLLM's own; faults in whole engines are in
`tests/engine/test_engine.py`.
"""

import json
import logging
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from mla_fusion import config, kernels, plugin, report, runtime
from mla_fusion.cli import child
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import aiter, reference
from mla_fusion.runtime import layer_state, ready, tables
from tests.aiter_double.test_require import ABSENT, on_path, write  # noqa: F401  a fixture
from tests.models import DEEPSEEK_V2
from tests.passes.fake_engine import DECODE, MIXED, Engine, assert_same, fuse, run
from tests.passes.graphs import Spec, build

plugin.register()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

SPEC = Spec("native", layers=2)
# Of an error of a provider: when, and one more sentence where memory ran out.
NOTE = (
    "mla_fusion: the reference provider failed {}. The compiled graphs call it, so the engine "
    "cannot go on without it, and nothing falls back silently.{} Or start with another provider "
    '(additional_config={{"mla_fusion": {{"provider": ...}}}}), or without '
    "pass_config.fuse_aiter_qk_rope_kvcache_mla."
)
IN_A_STEP = NOTE.format("in a decode step of 5 rows, in layer model.layers.0.attn", "")


class Planted(Exception):
    """The fault."""


@pytest.fixture
def make(tmp_path, monkeypatch, vllm_loggers):
    """make(provider) -> vLLM's config with the flag on and a cache folder of its own."""
    child.share_facts(tmp_path / "cache")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))

    def build_config(provider="reference"):
        (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V2))
        return EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4,
            additional_config={"mla_fusion": {"provider": provider}},
            compilation_config={"pass_config": {config.FLAG: True}},
        ).create_engine_config()  # fmt: skip

    return build_config


def worker(vllm_config, body):
    """A worker with the layers of `SPEC`, which runs `body` where vLLM warms up."""
    from vllm.v1.worker.worker_base import WorkerBase

    class Worker(WorkerBase):
        def load_model(self):
            vllm_config.compilation_config.static_forward_context = Engine(SPEC).layers

        def compile_or_warm_up_model(self):
            return body()

    made = Worker(vllm_config, 0, 0, "")
    made.load_model()
    return made


def compiled():
    """A graph that the passes fused, as vLLM compiles it while it profiles."""
    module = build(SPEC)
    report.add(fuse(module, SPEC))
    return module


def fail(*args, **kwargs):
    raise Planted("the kernel did not compile")


@pytest.mark.parametrize(
    "error, remedy",
    [
        (Planted, ""),
        (torch.OutOfMemoryError, " It needs memory beside vLLM's: lower gpu_memory_utilization."),
    ],
)
def test_provider_raises_at_warm_up(make, monkeypatch, caplog, error, remedy):
    """The engine does not start, and vLLM's own warm-up does not begin."""
    made = worker(make(), lambda: pytest.fail("vLLM's warm-up"))
    compiled()
    monkeypatch.setattr(reference, "warmup", Mock(side_effect=error("planted")), raising=False)
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    with pytest.raises(error, match="planted") as caught:
        made.compile_or_warm_up_model()
    when = "to prepare its kernels for up to 4 tokens"
    assert caught.value.__notes__ == [NOTE.format(when, remedy)]
    assert "layers" not in caplog.text  # nothing is reported as fused


def test_provider_raises_at_capture(make, monkeypatch, caplog, plain_kernels):
    """vLLM captures by running a decode batch inside its warm-up: the engine stops there."""
    made = worker(make(), lambda: run(module, SPEC, DECODE))
    module = compiled()
    monkeypatch.setattr(reference, "fused_mla_decode_prep", fail)
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    with pytest.raises(Planted) as caught:
        made.compile_or_warm_up_model()
    assert caught.value.__notes__ == [IN_A_STEP]
    assert "layers" not in caplog.text


def test_provider_raises_in_a_step(monkeypatch, plain_kernels):
    """A decode step ends with the error; a batch that needs no provider is served as before."""
    module = build(SPEC)
    fuse(module, SPEC)
    monkeypatch.setattr(reference, "fused_mla_decode_prep", fail)
    with pytest.raises(Planted, match="the kernel did not compile") as caught:
        run(module, SPEC, DECODE)
    assert caught.value.__notes__ == [IN_A_STEP]
    assert_same(run(build(SPEC), SPEC, MIXED), run(module, SPEC, MIXED), MIXED)


@pytest.mark.parametrize("method", vllm_compat.LOADS_WEIGHTS)
def test_what_is_derived_from_buffers_follows_a_reload(make, method, monkeypatch):
    """Through `.data`, as vLLM restores buffers after a sleep of level 2; aiter keeps halves."""
    from vllm.v1.worker.worker_base import WorkerBase

    source, q = torch.randn(4, 8), torch.zeros(1, 8, dtype=torch.bfloat16)

    def load(self, *args, **kwargs):
        source.data.mul_(-1)

    load.__name__ = method
    methods = {method: load, "load_model": lambda self: None}
    made = type("Worker", (WorkerBase,), methods)(make(), 0, 0, "")
    made.vllm_config.compilation_config.static_forward_context = layers = Engine(SPEC).layers
    made.load_model()
    for layer in layers.values():
        kept = layer_state.of(layer).tables
        table = tables.in_type(kept, source, "native", torch.bfloat16)
    monkeypatch.setattr(ready, "compile_ahead", fail)  # graphs and kernels are kept
    given = SimpleNamespace(cos_sin_cache=table, q=q, k_pe=q, derived=kept)
    _, *halves = aiter.halves(given)
    getattr(made, method)()
    assert torch.equal(table, source.bfloat16())
    assert torch.equal(torch.cat(halves, 1), table)
    if method == "wake_up":
        made.wake_up(["kv_cache"])  # weights still sleep: nothing is read
        assert torch.equal(table, -source.bfloat16())


def test_more_slots_than_query_rows(monkeypatch, plain_kernels):
    """A provider would read behind the query: an error, and no byte of the cache is written."""
    layer, cache, q = SimpleNamespace(layer_name="layer-0"), torch.zeros(8), torch.zeros(2, 1, 8)
    batch = SimpleNamespace(num_actual_tokens=3, num_decode_tokens=3)
    context = batch, layer, cache, torch.arange(3)
    monkeypatch.setattr(vllm_compat, "attention_context", lambda name: context)
    with pytest.raises(ValueError, match="layer-0 has 2 query rows for 3 slots"):
        runtime.fused_decode_prep(
            q, q, q, q, None, None, None, q, "layer-0", "auto", "none", True, "reference"
        )


def switched_off(make, provider, caplog):
    """The one line this library logs about an engine whose flag it switches off: a warning."""
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    assert not config.is_on(make(provider))
    [record] = [r for r in caplog.records if r.name == "vllm.mla_fusion"]
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(f"mla-fusion: {config.FLAG} is switched off: ")
    return message


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize("why", ["missing", "too old", "half-installed", "another project's"])
def test_an_aiter_that_cannot_serve(make, caplog, tmp_path, why):
    files, words = ABSENT[why]
    write(tmp_path, files)
    warning = switched_off(make, "aiter", caplog)
    assert all(said in warning for said in ("[provider-unavailable]", *words))


def test_triton_missing(make, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels.get_provider.cache_clear()
    warning = switched_off(make, "triton", caplog)
    assert "[provider-unavailable]" in warning
    assert "provider 'triton' needs the triton package (pip install triton" in warning


@pytest.fixture
def outside(monkeypatch):
    """A vLLM outside the window, to which the plugin is not yet known."""
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(vllm_compat, "installed_version", lambda: "0.99.0")


def test_vllm_outside_the_window_that_still_takes_the_flag(outside, make, caplog):
    plugin.register()
    warning = switched_off(make, "reference", caplog)
    assert "this vLLM release is outside the window" in warning
    assert "(0.99.0, supported are 0.26 to 0.33) [vllm-version]" in warning


def test_without_vllm_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="needs vLLM, which is not installed; `mla-"):
            plugin.register()


def test_an_engine_that_died_leaves_nothing_to_the_report_of_the_next(make, caplog):
    """Two engines in one process: the first one compiled and ran out of memory."""
    caplog.set_level(logging.INFO, logger="vllm.mla_fusion")
    worker(make(), lambda: None)
    compiled()
    second = worker(make(), lambda: None)
    compiled()
    second.compile_or_warm_up_model()
    assert "decode range (1, 4): 2 of 2 MLA layers fused;" in caplog.text


def test_a_request_arrives_at_the_latest_when_all_others_have_ended():
    """An engine in processes of its own waits for ever for what a step without a request makes."""
    running, ended = [], []

    def step():
        ended.append(running.pop())
        return []

    busy, add = (lambda: bool(running)), (lambda name, *_: running.append(name))
    engine = SimpleNamespace(has_unfinished_requests=busy, add_request=add, step=step)
    assert len([*child.steps(engine, [(0, [1]), (9, [2]), (4, [3])], 1)]) == 3
    assert ended == ["0", "2", "1"]
