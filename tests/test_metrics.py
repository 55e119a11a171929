"""Steps counted as fused or unfused, and the places where the counts can be read."""

import re
import sys
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from vllm.v1.metrics.prometheus import get_prometheus_registry

from mla_fusion import plugin, report
from mla_fusion.plugin.workers import STEPS, count_steps
from mla_fusion.plugin.wrap import WRAPPED
from mla_fusion.runtime import metrics
from tests.command import run
from tests.test_docs import TEXT

GROUP = "model.layers.0.self_attn.attn"


def batch(tokens, decode):
    return SimpleNamespace(num_actual_tokens=tokens, num_decode_tokens=decode)


def fused_to(last):
    ranges = [report.RangeReport((1, last), 2, fused=2), report.RangeReport((last + 1, 99), 2)]
    return report.Report("triton", last, ranges)


@pytest.mark.parametrize(
    "tokens, decode, sizes, fused",
    [
        (1, 1, [], True),
        (8, 8, [], True),
        (9, 9, [], False),  # its graph is another
        (8, 7, [], False),  # mixed
        (8, 0, [], False),  # prefill
        (0, 0, [], False),
        # The graph that runs is that of the next captured size.
        (6, 6, [4, 8, 16], True),
        (6, 6, [16, 4], False),
        (6, 6, [4], True),
    ],
)
def test_a_pass_is_fused_if_decode_only_and_in_range(tokens, decode, sizes, fused):
    steps = metrics.StepCounter(0, fused_to(8), sizes)
    steps.count(GROUP, batch(tokens, decode))
    assert steps.snapshot() == {GROUP: {"fused": int(fused), "unfused": int(not fused)}}
    none = metrics.StepCounter(
        0, report.Report("triton", 8, [report.RangeReport((1, 8), 2)]), sizes
    )
    none.count(GROUP, batch(tokens, decode))
    assert none.snapshot() == {GROUP: {"fused": 0, "unfused": 1}}


def engine(*names):
    """The config of an engine with these layers."""
    layers = {name: SimpleNamespace() for name in names}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def warmed_up(config, steps):
    """Its layers hold the counter of its worker."""
    for layer in config.compilation_config.static_forward_context.values():
        setattr(layer, STEPS, steps)


def test_what_builders_of_vllm_build_is_counted_under_their_first_layers(monkeypatch):
    """A model of two groups and its draft, whose metadata vLLM builds by another method."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder

    builder = MLACommonMetadataBuilder
    monkeypatch.setattr(builder, "__init__", lambda *args: None)
    monkeypatch.setattr(builder, "build", lambda *args, **kwargs: batch(4, 4))
    monkeypatch.setattr(builder, WRAPPED, frozenset(), raising=False)
    older = builder(None, ["c.0"], engine("c.0"))
    count_steps()
    ours = builder.build  # another plugin wraps it before the next worker of the process
    monkeypatch.setattr(builder, "build", lambda *args, **kwargs: ours(*args, **kwargs))
    count_steps()
    steps, others = (metrics.StepCounter(0, given, []) for given in (fused_to(8), None))
    names = [["a.0", "a.1"], ["b.0", "b.1"], ["draft.0"]]
    config = engine(*(name for group in names for name in group))
    # Made before its builders: a second engine of the process, and one whose flag is off.
    second_engine = engine("a.0")
    first, second, draft = (builder(None, group, config) for group in names)
    elsewhere = builder(None, ["a.0"], second_engine)
    off = builder(None, ["c.0"], engine("c.0"))
    first.build(0, None)  # a pass of the warm-up does not count
    warmed_up(config, steps)
    warmed_up(second_engine, others)
    for made in (first, first, second, elsewhere, off, older):
        assert made.build(0, None).num_decode_tokens == 4
    draft.build_for_drafting(None, 0)
    if hasattr(builder, "update_draft_decode_metadata"):
        # Of a backend that reuses metadata; the base class raises. Not counted, as the docs say.
        monkeypatch.setattr(builder, "update_draft_decode_metadata", lambda *_: None)
        draft.update_draft_decode_metadata(batch(4, 4))
        for said in (TEXT["docs/commands.md"], metrics._HELP):
            assert re.search(r"draft pass(es)? that reuses? (attention )?metadata", said)
    assert steps.snapshot() == {
        "a.0": {"fused": 2, "unfused": 0},
        "b.0": {"fused": 1, "unfused": 0},
        "draft.0": {"fused": 1, "unfused": 0},
    }
    assert others.snapshot() == {"a.0": {"fused": 0, "unfused": 1}}


def test_a_worker_whose_flag_is_off_answers_that_it_counted_nothing():
    from vllm.v1.worker.worker_base import WorkerBase

    plugin.register()
    assert WorkerBase.mla_fusion_steps(SimpleNamespace()) == {}


_WORKER = f"""
from types import SimpleNamespace
from mla_fusion import report
from mla_fusion.runtime import metrics
made = report.Report("triton", 8, [report.RangeReport((1, 8), layers=2, fused=2)])
steps = metrics.StepCounter(3, made, [])
for decode in (4, 4, 0):
    steps.count({GROUP!r}, SimpleNamespace(num_actual_tokens=4, num_decode_tokens=decode))
"""


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_worker_counts_is_served_by_vllms_endpoint_if_they_share_a_folder(
    shared, tmp_path, monkeypatch
):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    if shared:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    run(sys.executable, "-c", _WORKER)
    # What vLLM's /metrics prints.
    shown = generate_latest(get_prometheus_registry()).decode()
    for path, passes in (("fused", "2.0"), ("unfused", "1.0")):
        labels = f'group="{GROUP}",path="{path}",rank="3"'
        assert (f"mla_fusion_steps_total{{{labels}}} {passes}" in shown) is shared
