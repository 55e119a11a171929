"""Pass 8: norms beside launches of this library, traced from vLLM's IR ops as on a GPU that lets
launches begin early."""

import pytest
import torch
from torch.nn.functional import linear
from vllm import ir
from vllm.config.utils import Range

from mla_fusion import ops, projections, report, runtime
from mla_fusion.passes import pipeline
from mla_fusion.passes.norms import MLANormPass
from mla_fusion.passes.projections import MLAProjectionPass
from mla_fusion.projections import reference
from tests.gpus import imitate
from tests.passes import edits, recorded
from tests.passes.fake_engine import Engine
from tests.passes.graphs import Spec, find, find_all, layer_names, printed
from tests.passes.linear_layers import BF16, KV, OUT, K, Q, build, rewrite, run, values

NORM, PROJECTION = (f"{ops.NAMESPACE}::{op}" for op in (ops.NORM, ops.PROJECTION))
IR = ("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm")
EPSILON = 1e-5
runtime.register_ops()


def vllms(x, weight, residual=None):
    if residual is None:
        return ir.ops.rms_norm(x, weight, EPSILON)
    return ir.ops.fused_add_rms_norm(x, residual, weight, EPSILON)


def rounded_once(x, weight, residual=None):
    made = reference.normalize([x], [weight], [EPSILON], residual)
    return made[0] if residual is None else tuple(made)


def in_front(norm):
    """Of products: of what another op makes and a residual, which the next layer reads."""

    def model(t):
        x, added = norm(t["x"].sin(), t["gain_x"], t["residual"])
        return linear(x, t["w_q"]), linear(x, t["w_kv"]), added

    return model


def behind(norm):
    """Of both parts of a product; a product reads one, something else the other."""

    def model(t):
        of_query, kv_c = linear(t["x"], t["w_q"]).split([KV, Q - KV], dim=-1)
        return linear(norm(of_query, t["gain"]), t["w_b"]), norm(kv_c, t["gain_rest"]).sin()

    return model


MODELS = {made: [made(norm) for norm in (vllms, rounded_once)] for made in (in_front, behind)}


@pytest.fixture
def faster(monkeypatch):
    """faster(launches, ...) says which products are ours, all if none is given."""
    imitate(monkeypatch, "sm_90")

    def put(*launches):
        def plan_for(device, sizes, k, tokens, dtype):
            return not launches or (k, *sizes) in launches

        monkeypatch.setattr(projections, "plan_for", plan_for)
        monkeypatch.setattr(projections, "project", reference.project)

    return put


@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.__name__)
def test_norms_become_one_launch_that_rounds_once(made, faster):
    faster()
    ours, wanted = map(build, MODELS[made])
    old = {*ours.graph.nodes}
    record = rewrite(ours)
    assert len(find_all(ours, NORM)) == 1 and not [n for op in IR for n in find_all(ours, op)]
    assert (record.passes["8"].after[NORM], record.passes["7"].after[NORM]) == (1, 0)
    for node in {*ours.graph.nodes} - old:
        assert "val" in node.meta, node.name
    given = values()
    for got, want in zip(run(ours, given), run(wanted, given), strict=True):
        assert torch.equal(got, want)
    before = printed(ours)
    assert not MLANormPass("triton")(ours.graph).rewritten and printed(ours) == before


@pytest.mark.parametrize(
    "made, launches, taken",
    [
        (in_front, [(K, KV)], True), (in_front, [(1, 1)], False),
        # The norms go together where the product in front is ours, or that behind either.
        (behind, [(K, Q)], True), (behind, [(KV, OUT)], True), (behind, [(1, 1)], False),
    ],
)  # fmt: skip
def test_only_beside_a_launch_of_ours(made, launches, taken, faster):
    faster(*launches)
    module = build(MODELS[made][0])
    rewrite(module)
    assert len(find_all(module, NORM)) == taken


def test_not_where_no_launch_begins_early(faster, monkeypatch):
    faster()
    imitate(monkeypatch, "sm_89")
    module = build(MODELS[behind][0])
    rewrite(module)
    assert not find_all(module, NORM) and find_all(module, PROJECTION)


NEAR_MISSES = {
    "of a part": lambda x, t: ir.ops.rms_norm(x, t["gain_x"], EPSILON, K // 2),
    "without weight": lambda x, t: ir.ops.rms_norm(x, None, EPSILON),
    "another weight": lambda x, t: ir.ops.rms_norm(x, t["gain_x"] + 1, EPSILON),
    "turned": lambda x, t: ir.ops.rms_norm(linear(t["w_q"], x).t()[:, :K], t["gain_x"], EPSILON),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_kept(name, faster):
    faster()
    module = build(lambda t: linear(NEAR_MISSES[name](t["x"], t), t["w_q"]))
    rewrite(module)
    assert not find_all(module, NORM) and find(module, IR[0])


def test_a_weight_of_another_type_and_a_layer_that_is_left_out(faster):
    faster()
    module = build(MODELS[in_front][0])
    MLAProjectionPass((1, 16))(module.graph)
    [norm], weight = find_all(module, IR[1]), edits.node_named(module, "gain_x")
    assert not MLANormPass("triton", {norm})(module.graph).rewritten
    weight.meta["val"] = weight.meta["val"].half()
    assert not MLANormPass("triton")(module.graph).rewritten


@pytest.mark.parametrize(
    "name, provider, layers",
    [("native-no_q_lora", "triton", 1), ("native-no_q_lora", "aiter", 0),
     ("flashinfer-q_lora", "triton", 0)],
)  # fmt: skip
def test_in_front_of_the_fused_op_if_it_is_alone(name, provider, layers, faster):
    """Graphs of engines on a GPU, with vLLM's products: the query's latents have a norm too."""
    faster((1, 1))
    module = recorded.read(recorded.FOLDER / f"{name}.json.gz")
    facts = Engine(Spec()).facts_of()(*layer_names(Spec()))

    def work(graph, record):
        pipeline.fuse(graph, lambda name: facts, provider, record, "auto")

    pipeline.contained(module.graph, Range(start=1, end=4), work)
    record = report._records.pop()
    assert record.fused and not record.declined
    assert len(find_all(module, NORM)) == layers * record.fused
    assert all(node.meta["val"][0].dtype == BF16 for node in find_all(module, NORM))
