"""Invariants 2, 4 and 9 of the design; 1 is in test_ops.py, 3 and 10 are in test_cases.py."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import report
from mla_fusion.config import identity
from mla_fusion.passes import pipeline
from mla_fusion.passes.pipeline import LastStep, MLAFusionPass
from mla_fusion.passes.result import PassResult
from mla_fusion.report.reasons import REASONS, Decline
from tests.passes import edits, graphs
from tests.passes.fake_engine import (
    DECODE,
    Engine,
    Layer,
    fuse,
    reasons,
)
from tests.passes.graphs import ROPES, Spec, build, printed

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKET = 4
LAYER_REASONS = {code for code, reason in REASONS.items() if reason.scope == "layer"}


@pytest.fixture(autouse=True)
def no_records() -> None:
    """Each test sees its own records only."""
    report.forget()


def last_step(module: fx.GraphModule) -> None:
    """`LastStep` as vLLM's pass manager calls it."""
    with pass_context(Range(start=1, end=BUCKET)):
        LastStep(None)(module.graph)


def run_pass(
    module: fx.GraphModule, spec: Spec, start: int, end: int, attention: str = "auto"
) -> report.GraphRecord:
    """`MLAFusionPass` as vLLM's pass manager calls it for one compile range."""
    engine = Engine(spec)
    for layer in engine.layers.values():
        layer.impl.sinks = torch.zeros(1)  # the portable decode has none
    with (
        override_forward_context(engine.context(DECODE)),
        pass_context(Range(start=start, end=end)),
    ):
        MLAFusionPass("reference", BUCKET, attention)(module.graph)
    (record,) = report._records
    return record


def test_pass_fuses_inside_the_bucket() -> None:
    spec = Spec("deepseek", layers=2)
    record = run_pass(build(spec), spec, 1, BUCKET)
    assert (record.start, record.end, record.layers, record.fused) == (1, BUCKET, 2, 2)
    assert record.declined == {}
    assert record.pass_ms > 0


def test_pass_asks_whether_the_portable_decode_takes_the_layer() -> None:
    spec = Spec("deepseek", layers=2)
    record = run_pass(build(spec), spec, 1, BUCKET, "portable")
    assert (record.fused, reasons(record)) == (0, ["portable-attention"] * 2)


@pytest.mark.parametrize("alike", [True, False])
def test_layer_whose_name_is_not_known_gets_the_facts_of_all(alike: bool) -> None:
    """A graph input without a value: the layers that it may stand for must agree."""
    spec = Spec("native", layers=2)
    engine, module = Engine(spec), build(spec)
    if not alike:
        next(iter(engine.layers.values())).impl.is_sparse = True
    for node in module.graph.nodes:
        if node.name.startswith("layer_name"):
            del node.meta["val"]
    record = fuse(module, spec, engine.facts())
    expected = (2, []) if alike else (0, ["unknown-layer"] * 2)
    assert (record.fused, reasons(record)) == expected


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("start, end", [(BUCKET + 1, 64), (1, BUCKET + 1), (8, 8)])
def test_invariant_2_graph_outside_the_bucket_is_untouched(rope: str, start: int, end: int) -> None:
    spec = Spec(rope, layers=2)
    module = build(spec)
    graph, nodes, before = module.graph, list(module.graph.nodes), printed(module)
    record = run_pass(module, spec, start, end)
    assert module.graph is graph
    assert list(graph.nodes) == nodes
    assert printed(module) == before
    assert (record.layers, record.fused, record.declined, record.layer) == (2, 0, {}, None)


def test_invariant_2_last_step_changes_no_graph_without_own_ops() -> None:
    module = build(Spec("native", layers=2))
    before = printed(module)
    last_step(module)
    assert printed(module) == before


def test_invariant_2_graph_without_mla_is_untouched() -> None:
    module = fx.symbolic_trace(lambda x: torch.relu(x))
    before = printed(module)
    record = run_pass(module, Spec(), 1, BUCKET)
    assert printed(module) == before
    assert (record.layers, record.declined) == (0, {})


class _Exploding:
    """A pass that fails after it changed the graph."""

    def __init__(self, inner: Callable[[fx.Graph], Any]) -> None:
        self.inner = inner

    def __call__(self, graph: fx.Graph) -> None:
        self.inner(graph)
        raise ValueError("planted")


def explode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let one of the passes raise at its end."""
    original = getattr(pipeline, name)
    monkeypatch.setattr(pipeline, name, lambda *args: _Exploding(original(*args)))


PASSES = (
    "CanonicalizeMLARoPEPass",
    "MLADecodeQPrepLiftPass",
    "MLAAiterQkRopeKVCacheFusionPass",
)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("rope", ["native", "flashinfer", "cat_fused"])
def test_invariant_4_failing_pass_puts_the_graph_back(
    name: str, rope: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = Spec(rope, layers=2)
    module = build(spec)
    nodes, before = list(module.graph.nodes), printed(module)
    metas = [dict(node.meta) for node in nodes]
    explode(monkeypatch, name)
    with caplog.at_level(logging.ERROR):
        record = fuse(module, spec)
    assert (record.fused, reasons(record)) == (0, ["pass-error"] * 2)
    assert {decline.detail for decline in record.declined.values()} == {"ValueError('planted')"}
    assert "mla_fusion: a pass failed; this graph stays unfused" in caplog.messages
    assert "ValueError: planted" in caplog.text  # the traceback
    assert list(module.graph.nodes) == nodes
    assert printed(module) == before
    assert [dict(node.meta) for node in nodes] == metas
    module.graph.lint()
    # The graph is as good as new.
    monkeypatch.undo()
    assert fuse(module, spec).fused == 2


def test_invariant_4_invalid_graph_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that does not pass lint counts as an error of a pass."""
    spec = Spec("native")
    module = build(spec)
    before = printed(module)
    monkeypatch.setattr(fx.Graph, "lint", lambda graph: (_ for _ in ()).throw(RuntimeError("x")))
    assert reasons(fuse(module, spec)) == ["pass-error"]
    assert printed(module) == before


def _layer(**attributes: Any) -> Callable[[Layer], None]:
    def change(layer: Layer) -> None:
        for name, value in attributes.items():
            setattr(layer, name, value)

    return change


def _impl(**attributes: Any) -> Callable[[Layer], None]:
    def change(layer: Layer) -> None:
        for name, value in attributes.items():
            setattr(layer.impl, name, value)

    return change


# reason -> layers that decline for it
LAYERS: dict[str, list[Callable[[Layer], None]]] = {
    "sparse-attention": [_impl(is_sparse=True), _layer(use_sparse=True)],
    "hisparse": [_layer(hisparse_cache=SimpleNamespace())],
    "context-parallel": [_impl(dcp_world_size=2), _layer(use_pcp=True)],
    "padded-heads": [_layer(q_pad_num_heads=16)],
    "kv-cache-dtype": [_layer(kv_cache_dtype="fp8_ds_mla"), _layer(kv_cache_dtype="bfloat16")],
    "packed-weights": [_layer(is_amx_bmm_enabled=True), _layer(W_UK_T=None)],
}


@pytest.mark.parametrize(
    "reason, index", [(reason, i) for reason, many in LAYERS.items() for i in range(len(many))]
)
def test_invariant_4_layer_that_cannot_be_served_is_left(reason: str, index: int) -> None:
    """One of two layers declines, whole: the other is fused."""
    spec = Spec("deepseek", layers=2)
    engine, module = Engine(spec), build(spec)
    names = graphs.layer_names(spec)
    LAYERS[reason][index](engine.layers[names[1]])
    record = fuse(module, spec, engine.facts())
    assert (record.fused, reasons(record)) == (1, [reason])
    for name in names:
        LAYERS[reason][index](engine.layers[name])
    module = build(spec)
    before = printed(module)
    record = fuse(module, spec, engine.facts())
    assert (record.fused, reasons(record)) == (0, [reason] * 2)
    assert printed(module) == before


@pytest.mark.parametrize("skipped", PASSES[1:])
@pytest.mark.parametrize("rope", ["native", "flashinfer", "cat_fused", "nope"])
def test_invariant_4_unfused_pair_is_put_back(
    rope: str, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What pass 2 or 3 changed and the next one left, the graph is put back."""
    spec = Spec(rope, layers=2)
    module = build(spec)
    before = printed(module)
    monkeypatch.setattr(pipeline, skipped, lambda *args: lambda graph: PassResult())
    record = fuse(module, spec)
    assert (record.fused, reasons(record)) == (0, ["unfused-pair"] * 2)
    assert printed(module) == before


def test_invariant_4_every_layer_reason_has_a_test() -> None:
    elsewhere = {
        "pass-error",
        "unfused-pair",
        "unknown-layer",  # test_cases.py, as are the next two
        "missing-metadata",
        "shared-rotation",
        "portable-attention",  # tests/test_step_plan.py
        "no-graph",  # tests/test_cli.py
    }
    covered = {*LAYERS, *(reason for _, _, reason in edits.NEAR_MISSES.values()), *elsewhere}
    assert covered >= LAYER_REASONS
    assert covered <= set(REASONS)
    for code in covered:
        assert f"[{code}]" in Decline(code, "detail").explain()


def test_invariant_9_uuid_changes_with_provider_bucket_and_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uuids() -> list[Any]:
        arguments = [("triton", 4), ("reference", 4), ("triton", 8), ("triton", 4, "portable")]
        steps = [MLAFusionPass(*given) for given in arguments]
        return [*(step.uuid() for step in steps), LastStep(None).uuid()]

    first = uuids()
    assert len(set(first)) == len(first)
    assert uuids() == first
    monkeypatch.setattr(pipeline, "source_hash", lambda: "another")
    assert not set(uuids()) & set(first)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("passes/lift.py", True),
        ("patterns/probe.py", True),
        ("mla_fusion/kernels/triton.py", True),
        ("mla_fusion/attention/planner.py", True),
        ("mla_fusion/runtime/step_plan.py", True),
        ("mla_fusion/config/eligibility.py", True),
        ("mla_fusion/ops.py", True),
        ("mla_fusion/plugin.py", True),
        ("mla_fusion/kernels/new.csv", True),
        ("mla_fusion/cli/check.py", False),
        ("mla_fusion/cli/doctor.py", False),
        ("mla_fusion/report/svg.py", False),
    ],
)
def test_invariant_9_source_hash(
    path: str, changes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An edited file that can change a graph or a kernel is another hash; another file is not."""
    for folder in ("mla_fusion", "passes", "patterns"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def module(package: str) -> SimpleNamespace:
        names = package.split(".")
        beside = len(names) > 1 and names[1] in ("passes", "patterns")
        folder = tmp_path / names[1] if beside else tmp_path.joinpath(*names)
        return SimpleNamespace(__file__=str(folder / "__init__.py"))

    monkeypatch.setattr(identity, "import_module", module)
    compute = identity.source_hash.__wrapped__
    before = compute()
    assert compute() == before
    with (tmp_path / path).open("a") as file:
        file.write("#")
    assert (compute() != before) is changes


def test_invariant_9_last_step_covers_the_step_it_wraps() -> None:
    class Rest:
        def uuid(self) -> str:
            return "vllm-step"

        def __call__(self, graph: fx.Graph) -> None: ...

    assert LastStep(Rest()).uuid() != LastStep(None).uuid()
    assert "vllm-step" in LastStep(Rest()).uuid()
