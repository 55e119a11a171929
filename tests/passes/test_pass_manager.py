"""The passes in vLLM's form: their gate (invariant 2), cache key (9) and record for the report."""

import importlib
import itertools
import pickle
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import fx
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range
from vllm.forward_context import override_forward_context

from mla_fusion import ops, report
from mla_fusion.config import eligibility, identity
from mla_fusion.passes import describe, pipeline
from mla_fusion.passes.pipeline import LastStep, MLAFusionPass
from tests.passes import edits, graphs
from tests.passes.fake_engine import DECODE, Engine, reasons
from tests.passes.graphs import Spec, build, printed
from tests.passes.rotations import ROPES

BUCKET = 4


@pytest.fixture(autouse=True)
def no_records():
    """Each test sees its own records only."""
    report.forget()


def run_pass(
    module,
    spec,
    start,
    end,
    attention="auto",
    provider="reference",
    projections="auto",
    layers="",
    **of_layers,
):
    """`MLAFusionPass` as vLLM's pass manager calls it for one compile range."""
    engine = Engine(spec)
    for layer in engine.layers.values():
        layer.impl.sinks = torch.zeros(1)  # the portable decode has none
        vars(layer).update(of_layers)
    with (
        override_forward_context(engine.context(DECODE)),
        pass_context(Range(start=start, end=end)),
    ):
        MLAFusionPass(provider, BUCKET, attention, 1, projections, layers)(module.graph)
    (record,) = report._records
    return record


@pytest.mark.parametrize("attention, fused", [("auto", 2), ("portable", 0)])
def test_pass_inside_the_bucket_asks_whether_the_decode_takes_the_layer(attention, fused):
    spec = Spec("deepseek", layers=2)
    record = run_pass(build(spec), spec, 1, BUCKET, attention)
    assert (record.range, record.layers, record.fused) == ((1, BUCKET), 2, fused)
    assert reasons(record) == ["portable-attention"] * (2 - fused)
    assert record.pass_ms > 0


def test_pass_outside_the_piecewise_backend_says_what_to_set():
    with pytest.raises(RuntimeError, match="use compilation mode 3 with backend inductor"):
        MLAFusionPass("reference", BUCKET)(build(Spec()).graph)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("start, end", [(BUCKET + 1, 64), (1, BUCKET + 1), (8, 8)])
def test_invariant_2_graph_outside_the_bucket_is_untouched(rope, start, end):
    spec = Spec(rope, layers=2)
    module = build(spec)
    graph, nodes, before = module.graph, list(module.graph.nodes), printed(module)
    record = run_pass(module, spec, start, end)
    assert module.graph is graph
    assert list(graph.nodes) == nodes
    assert printed(module) == before
    assert (record.layers, record.fused, record.declined, record.layer) == (2, 0, {}, None)


def test_invariant_2_graph_without_mla_is_untouched():
    module = fx.symbolic_trace(lambda x: torch.relu(x))
    before = printed(module)
    record = run_pass(module, Spec(), 1, BUCKET)
    assert printed(module) == before
    assert (record.layers, record.declined) == (0, {})


@pytest.fixture
def clock(monkeypatch):
    """A quarter of a second passes between one look and the next."""
    seconds = itertools.count(100, 0.25)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))


def test_record_of_a_graph_says_what_a_warm_up_needs(monkeypatch, clock):
    shown = []
    monkeypatch.setattr(
        torch._dynamo.utils, "lazy_format_graph_code", lambda *given: shown.append(given)
    )
    spec = Spec("native", is_neox=True, dtype=torch.bfloat16, table_dtype=torch.float32)
    module = build(spec)
    owner = module.graph.owning_module
    record = run_pass(module, spec, 1, BUCKET)
    assert record.variants == [ops.Variant(True, graphs.ROPE, "float32", "bfloat16", "auto")]
    assert record.pass_ms == 250
    assert shown == [("mla_fusion.before", owner), ("mla_fusion.after", owner)]
    assert record.layer.before and record.layer.before != record.layer.after
    report.forget()
    nope = Spec("nope", dtype=torch.bfloat16, kv_cache_dtype="fp8", scaled="in_place")
    [only] = run_pass(build(nope), nope, 1, BUCKET).variants
    assert only == ops.Variant(False, graphs.ROPE, "", "bfloat16", "fp8", "float32")


def test_record_of_the_ops_before_and_behind_each_pass():
    """Also before its end, when replaced nodes are in the graph, dead code does not count."""
    module = build(Spec(layers=2))
    passes = run_pass(module, Spec(layers=2), 1, BUCKET).passes
    assert [*passes] == ["2", "3", "4", "6", "7", "8"]
    assert all(a.after == b.before for a, b in itertools.pairwise(passes.values()))
    assert passes["4"].after == passes["6"].after == describe.counts(module.graph)
    own = [
        {op: n for op, n in ops_.after.items() if ops.NAMESPACE in op} for ops_ in passes.values()
    ]
    rope, prep, fused, attention = (
        f"{ops.NAMESPACE}::{op}" for op in (ops.ROPE_UPDATE, ops.Q_PREP, ops.FUSED, ops.ATTENTION)
    )
    assert own[:3] == [{rope: 2}, {rope: 2, prep: 2, attention: 2}, {fused: 2, attention: 2}]
    gone = {op for op, _, after in passes["2"].changes() if not after}
    assert edits.UPDATE in gone and edits.ATTENTION not in gone


@pytest.mark.parametrize("layers, last", [("", 2), ("0-1", 1), ("0,2", 2)])
def test_the_layer_of_a_report_names_what_it_reads(layers, last):
    """The last one that fused, alone, also if the layer behind or in front of it declined."""
    spec = Spec(layers=3)
    module = build(spec)
    for number, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node.name = f"arg{number}_1"
    layer = run_pass(module, spec, 1, BUCKET, layers=layers).layer
    for nodes in layer.before, layer.after:
        read = {name for node in nodes for name in node.inputs}
        assert {name for name in read if "layer" in name} == {f"layer {last}"}
        assert {"positions", "cos_sin_cache", "k_scale"} <= read
        assert sum("attention" in node.op for node in nodes) == 1
    bounds = {(node.op.partition("::")[2], node.bounds) for node in layer.before if node.bounds}
    slices = {("slice", f"[:, :, {part}]") for part in (f"{graphs.NOPE}:", "::2", "1::2")}
    assert bounds == slices | {("slice_scatter", f"[:, :, {graphs.NOPE}:]")}


def test_record_of_the_last_step(clock):
    seen: list[fx.Graph] = []
    module = build(Spec())
    with pass_context(Range(start=2, end=9)):
        LastStep(seen.append)(module.graph)
    assert seen == [module.graph]
    [record] = report._records
    assert (record.range, record.layers, record.pass_ms) == ((2, 9), 0, 250)
    assert [*record.passes] == ["5"]
    assert LastStep(None).uuid() == f"mla_fusion-{identity.source_hash()}-"


def test_each_pass_leaves_its_graph_in_the_structured_trace(monkeypatch):
    traced = {}
    monkeypatch.setattr(
        pipeline, "trace_structured",
        lambda kind, metadata_fn, payload_fn: traced.update({metadata_fn()["name"]: payload_fn()}),
    )  # fmt: skip
    module = build(Spec())
    run_pass(module, Spec(), 1, BUCKET)
    with pass_context(Range(start=1, end=BUCKET)):
        LastStep(None)(module.graph)
    stages = "before", *(f"pass_{number}" for number in (2, 3, 4, 6, 7, 8, 5))
    assert [*traced] == [f"mla_fusion_{stage}" for stage in stages]
    fused = [name for name, code in traced.items() if ops.FUSED in code]
    assert fused == [*traced][3:]
    assert "auto_functionalized(" not in traced["mla_fusion_pass_5"]


def test_pass_is_built_anew_in_a_worker():
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
def test_ops_must_split_the_graph_where_the_attention_does(partition, fused):
    spec = Spec()
    with torch._inductor.config.patch(custom_should_partition_ops=partition):
        record = run_pass(build(spec), spec, 1, BUCKET)
    assert record.fused == fused
    assert reasons(record) == ([] if fused else ["splitting-ops"])


def test_products_decline_alone():
    """The layer fuses; pass 7 does not look at them if it is told so, or outside the bucket."""
    spec = Spec(layers=2)
    for end, projections, kept in ((4, "auto", 6), (4, "vllm", 0), (5, "auto", 0)):
        report.forget()
        record = run_pass(build(spec), spec, 1, end, projections=projections)
        assert record.fused == (2 if end == BUCKET else 0)
        assert sum(record.plain_products.values()) == kept
        assert {decline.code for decline in record.plain_products} <= {"product-form"}


@pytest.mark.parametrize("layers, slower", [("1", 2), ("0", 2), ("0-1", 4), ("1,7-9", 2)])
def test_layers_that_are_left_out_decline_with_their_products(layers, slower):
    """Two products in front of each attention have a form that pass 7 takes."""
    spec, chosen = Spec(layers=2, dtype=torch.bfloat16), 1 + (layers == "0-1")
    record = run_pass(build(spec), spec, 1, BUCKET, layers=layers)
    assert (record.fused, reasons(record)) == (chosen, [eligibility.UNCHOSEN] * (2 - chosen))
    kept = {"product-slower": slower, eligibility.UNCHOSEN: 4 - slower, "product-form": 2}
    assert Counter({d.code: n for d, n in record.plain_products.items()}) == Counter(kept)


def test_equal_pieces_have_one_key_if_their_layers_fuse_alike():
    """The names of their layers are inputs, which vLLM's cache key leaves out."""
    keys = []
    for names in (), ["model.layers.3.attn"], ["model.layers.4.attn"], ["model.layers.0.attn"]:
        with pipeline.piece_of(names):
            keys.append([MLAFusionPass("triton", 4, layers=x).uuid() for x in ("3-9", "")])
    chosen, every = zip(*keys, strict=True)
    assert chosen[1] == chosen[2] and len({*chosen}) == 3 and len({*every}) == 1


def test_latents_without_metadata_are_declined():
    """The facts of a layer depend on the type of the activations, which the latents have."""
    spec = Spec(layers=2)
    module = build(spec)
    for call in (edits.attention(module, layer) for layer in range(2)):
        call.kwargs["kv_c_normed"].meta.pop("val", None)
    record = run_pass(module, spec, 1, BUCKET)
    assert (record.fused, reasons(record)) == (0, ["missing-metadata"] * 2)


def test_provider_reaches_the_layers_facts_and_the_fused_node():
    """Only AITER reads packed weights, and only for activations of bf16."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for provider, dtype, fused in (("aiter", bf16, 1), ("aiter", fp16, 0), ("triton", bf16, 0)):
        spec = Spec(dtype=dtype)
        report.forget()
        module = build(spec)
        packed = {"W_UK_T": None, "is_aiter_triton_fp8_bmm_enabled": True}
        record = run_pass(module, spec, 1, BUCKET, provider=provider, **packed)
        assert record.fused == fused
        if fused:
            node = graphs.find(module, f"{ops.NAMESPACE}::{ops.FUSED}")
            assert node.kwargs["provider"] == provider


def test_invariant_9_uuid_changes_with_provider_bucket_and_source(monkeypatch, tmp_path):
    def uuids():
        arguments = [("triton", 4), ("reference", 4), ("triton", 8), ("triton", 4, "portable")]
        arguments += [("triton", 4, "aiter"), ("triton", 4, "aiter", 4)]
        arguments += [("triton", 4, "aiter", 4, "vllm"), ("triton", 4, "aiter", 4, "vllm", "0-2")]
        steps: list[Any] = [MLAFusionPass(*given) for given in arguments]
        steps += [LastStep(None), LastStep(SimpleNamespace(uuid=lambda: "vllm-step"))]
        return [step.uuid() for step in steps]

    first = uuids()
    assert len(set(first)) == len(first) and first[-1].endswith("vllm-step")
    assert uuids() == first
    monkeypatch.setattr(identity, "tables_folder", lambda: tmp_path)
    assert uuids() == first
    (tmp_path / "measured.json").write_text("{}")
    assert {*uuids()} & {*first} == {*first[-2:]}  # pass 5 reads no measurements
    for module in (identity, pipeline):
        monkeypatch.setattr(module, "source_hash", lambda: "another")
    assert not set(uuids()) & set(first)


@pytest.fixture
def library(tmp_path):
    """The folder of each package of a copy of the library."""
    folders = {}
    for package in identity._PACKAGES:
        source = importlib.import_module(package).__file__
        assert source is not None
        folders[package] = tmp_path / package
        shutil.copytree(Path(source).parent, folders[package])
    return folders


def test_invariant_9_source_hash(library):
    """A file that can change a graph or a kernel, edited or new, changes it; others do not."""
    before = identity.hash_of(library)
    assert before == identity.hash_of(library) == identity.source_hash()
    for path, changes in {
        "mla_fusion.passes/lift.py": True,
        "mla_fusion.patterns/probe.py": True,
        "mla_fusion/kernels/triton.py": True,
        "mla_fusion/runtime/step_plan.py": True,
        "mla_fusion/config/eligibility.py": True,
        "mla_fusion/config/models.toml": True,
        "mla_fusion/ops.py": True,
        "mla_fusion/plugin/workers.py": True,
        "mla_fusion/kernels/new.csv": True,
        "mla_fusion/projections/gpus/new.json": True,
        "mla_fusion/attention/nested/new.py": True,
        "mla_fusion.passes/nested/deeper/new.py": True,
        "mla_fusion/new/room.py": True,
        "mla_fusion/cli/check/command.py": False,
        "mla_fusion/cli/nested/new.py": False,
        "mla_fusion/report/views.py": False,
        "mla_fusion/kernels/__pycache__/new.pyc": False,
    }.items():
        package, _, name = path.partition("/")
        file = library[package] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as opened:
            opened.write("#")
        assert (identity.hash_of(library) != before) is changes, path
        before = identity.hash_of(library)


def test_invariant_9_source_hash_covers_names(library):
    """Two files that swap their content, or one of another name in the same place of the order."""
    hashes = [identity.hash_of(library)]
    one, other = (library["mla_fusion"] / "kernels" / name for name in ("triton.py", "aiter.py"))
    texts = one.read_bytes(), other.read_bytes()
    other.write_bytes(texts[0])
    one.write_bytes(texts[1])
    hashes.append(identity.hash_of(library))
    one.rename(one.with_name("triton.py_"))
    hashes.append(identity.hash_of(library))
    assert len(set(hashes)) == 3
