"""What vLLM's pass manager hands to the passes, and what they hand to the report."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import ops, report
from mla_fusion.config import identity
from mla_fusion.passes import pipeline
from mla_fusion.passes.pipeline import LastStep, MLAFusionPass
from tests.passes import edits, graphs
from tests.passes.fake_engine import DECODE, Engine, reasons
from tests.passes.graphs import Spec, build
from tests.passes.test_invariants import BUCKET, run_pass

if TYPE_CHECKING:
    from torch import fx


@pytest.fixture(autouse=True)
def no_records() -> None:
    """Each test sees its own records only."""
    report.forget()


class Clock:
    """Seconds that pass between one look and the next."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 100.0, seconds

    def perf_counter(self) -> float:
        self.now += self.seconds
        return self.now


def test_record_of_a_graph_says_what_a_warm_up_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(pipeline, "_show", lambda stage, graph: shown.append(stage))
    monkeypatch.setattr(pipeline, "time", Clock(0.25))
    spec = Spec("native", is_neox=True, dtype=torch.bfloat16, table_dtype=torch.float32)
    record = run_pass(build(spec), spec, 1, BUCKET)
    want = ops.Variant(True, graphs.ROPE, "float32", "bfloat16", "auto")
    assert record.variants == {want}
    assert record.pass_ms == 250
    assert shown == ["before", "after"]
    report.forget()
    nope = Spec("nope", dtype=torch.bfloat16, kv_cache_dtype="fp8")
    record = run_pass(build(nope), nope, 1, BUCKET)
    assert record.variants == {ops.Variant(False, graphs.ROPE, "", "bfloat16", "fp8")}


def test_record_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "time", Clock(0.25))
    seen: list[fx.Graph] = []

    class Rest:
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(graph)

    module = build(Spec())
    with pass_context(Range(start=2, end=9)):
        LastStep(Rest())(module.graph)
    assert seen == [module.graph]
    [record] = report._records
    assert (record.start, record.end, record.layers, record.pass_ms) == (2, 9, 0, 250)
    assert LastStep(None).uuid() == f"mla_fusion-{identity.source_hash()}-"


def test_pass_is_built_anew_in_a_worker() -> None:
    again = pickle.loads(pickle.dumps(MLAFusionPass("triton", 7)))
    assert (type(again), again.provider, again.max_tokens) == (MLAFusionPass, "triton", 7)


@pytest.mark.parametrize(
    "partition, fused",
    [
        ([edits.ATTENTION], 0),
        ([edits.ATTENTION, ops.RUNTIME_OPS[0]], 0),
        ([edits.ATTENTION, *ops.RUNTIME_OPS], 1),
        ([edits.UPDATE], 1),
    ],
)
def test_ops_must_split_the_graph_where_the_attention_does(
    partition: list[str], fused: int
) -> None:
    spec = Spec()
    with torch._inductor.config.patch(custom_should_partition_ops=partition):
        record = run_pass(build(spec), spec, 1, BUCKET)
    assert record.fused == fused
    assert reasons(record) == ([] if fused else ["splitting-ops"])
    assert set(record.declined) <= {edits.attention(build(spec)).name}


def test_latents_that_tell_no_type_are_declined() -> None:
    """The facts of a layer depend on the type of the activations, which the latents have."""
    spec = Spec(layers=2)
    module = build(spec)
    for call in (edits.attention(module, layer) for layer in range(2)):
        call.kwargs["kv_c_normed"].meta.pop("val", None)
    record = run_pass(module, spec, 1, BUCKET)
    assert (record.fused, reasons(record)) == (0, ["missing-metadata"] * 2)


def test_provider_reaches_the_layers_facts_and_the_fused_node() -> None:
    """AITER alone reads packed weights, and for activations of bf16."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for provider, dtype, fused in (("aiter", bf16, 1), ("aiter", fp16, 0), ("triton", bf16, 0)):
        spec = Spec(dtype=dtype)
        report.forget()
        engine, module = Engine(spec), build(spec)
        for layer in engine.layers.values():
            layer.W_UK_T, layer.is_aiter_triton_fp8_bmm_enabled = None, True
        with (
            override_forward_context(engine.context(DECODE)),
            pass_context(Range(start=1, end=BUCKET)),
        ):
            MLAFusionPass(provider, BUCKET)(module.graph)
        assert report._records[0].fused == fused
        if fused:
            node = graphs.find(module, f"{ops.NAMESPACE}::{ops.FUSED}")
            assert node.kwargs["provider"] == provider
