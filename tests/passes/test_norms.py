"""Pass 8: norms beside products of this library, traced from vLLM's IR ops as on a GPU that lets
launches begin early, and norms of the latents in front of the fused op."""

import operator
from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.models.deepseek_v2  # noqa: F401  registers the op of qkv_a
from torch import fx
from torch.nn.functional import linear
from vllm import _custom_ops, ir
from vllm.config.utils import Range

from mla_fusion import ops, projections, report, runtime
from mla_fusion.ops import Norm
from mla_fusion.passes import pipeline
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass, apart
from mla_fusion.passes.norms import MLANormPass
from mla_fusion.passes.projections import MLAProjectionPass
from mla_fusion.passes.rewrite import drop_dead
from mla_fusion.patterns.products import QKV_A
from mla_fusion.projections import reference, triton
from mla_fusion.report.reasons import Decline
from tests.gpus import imitate
from tests.passes import declare, edits, recorded
from tests.passes.fake_engine import BATCHES, Engine, assert_same, fuse
from tests.passes.fake_engine import run as run_layers
from tests.passes.graphs import LATENT, Spec, find, find_all, layer_names, printed
from tests.passes.graphs import build as build_layers
from tests.passes.linear_layers import BF16, KV, OUT, K, Q, build, rewrite, run, values

aten = torch.ops.aten
NORM, PROJECTION, FUSED = (
    f"{ops.NAMESPACE}::{op}" for op in (ops.NORM, ops.PROJECTION, ops.FUSED)
)  # fmt: skip
IR = ("vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm")
EPSILON = 1e-5
runtime.register_ops()


def _experts(x):
    return x.sin(), x.cos()


declare.op(
    "mla_fusion_tests", "experts(Tensor x) -> (Tensor, Tensor)", _experts,
    fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
)  # fmt: skip


def vllms(x, weight, *added, factor=None, wide=False):
    if not added:
        return ir.ops.rms_norm(x, weight, EPSILON)
    x = x if factor is None else x * factor
    for term in added[:-1]:
        x = term + x
    return ir.ops.fused_add_rms_norm(x, added[-1], weight, EPSILON)


def rounded_once(x, weight, *added, factor=1.0, wide=False):
    made = reference.normalize([x], [weight], [EPSILON], added, factor, wide)
    return tuple(made) if added else made[0]


def in_front(norm):
    """Of products: of a value and a residual, which the next layer reads."""

    def model(t):
        x, total = norm(t["x"], t["gain_x"], t["residual"])
        return linear(x, t["w_q"]), linear(x, t["w_kv"]), total

    return model


def of_experts(norm, **factor):
    """The same of what shared and routed experts make."""

    def model(t):
        shared, routed = torch.ops.mla_fusion_tests.experts(t["x"])
        x, total = norm(routed, t["gain_x"], shared, t["residual"], **factor)
        return linear(x, t["w_q"]), total

    return model


def of_scaled_experts(norm):
    """The same where the model scales what the routed ones make."""
    return of_experts(norm, factor=2.5)


def chained(norm):
    """Two in a row, as of a layer with an MLP: only the second reads the sum of the first."""

    def model(t):
        x, total = norm(t["x"], t["gain_x"], t["residual"], wide=True)
        x = linear(linear(linear(x, t["w_q"]), t["w_o"]), t["w_up"])
        x, total = norm(x, t["gain_x"], total)
        return linear(x, t["w_kv"]), total

    return model


def behind(norm):
    """Of both parts of a product; a product reads one, something else the other."""

    def model(t):
        of_query, kv_c = linear(t["x"], t["w_q"]).split([KV, Q - KV], dim=-1)
        return linear(norm(of_query, t["gain"]), t["w_b"]), norm(kv_c, t["gain_rest"]).sin()

    return model


def before_qkv_a(norm):
    """Of a value and a residual, in front of vLLM's op of qkv_a."""

    def model(t):
        x, total = norm(t["x"], t["gain_x"], t["residual"])
        return torch.ops.vllm.min_latency_fused_qkv_a_proj(x, t["w_q"]), total

    return model


MODELS = {
    made: [made(norm) for norm in (vllms, rounded_once)]
    for made in (in_front, of_experts, of_scaled_experts, chained, behind, before_qkv_a)
}


@pytest.fixture
def faster(monkeypatch):
    """faster(launches, ...) says which products are ours, all if none is given."""
    imitate(monkeypatch, "sm_90")

    def put(*launches):
        def plan_for(device, of, tokens):
            return not launches or (of.k, *of.sizes) in launches

        monkeypatch.setattr(projections, "plan_for", plan_for)
        monkeypatch.setattr(triton, "launch", lambda _, *given: reference.project(*given))

    return put


@pytest.mark.parametrize(
    "made, widths",
    [
        (in_front, [Norm((K,), 2)]),
        (of_experts, [Norm((K,), 3)]),
        (of_scaled_experts, [Norm((K,), 3)]),
        (chained, [Norm((K,), 2, kept=True), Norm((K,), 2, one=True)]),
        (behind, [Norm((KV, Q - KV))]),
    ],
)
def test_norms_become_one_launch_that_rounds_once(made, widths, faster):
    faster()
    ours, wanted = map(build, MODELS[made])
    old = {*ours.graph.nodes}
    record = rewrite(ours)
    assert not [n for op in IR for n in find_all(ours, op)]
    assert (record.passes["8"].after[NORM], record.passes["7"].after[NORM]) == (len(widths), 0)
    assert [*record.norms.elements()] == widths
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
        (in_front, [(K, KV)], True), (in_front, [(1, 1)], False), (of_experts, [(K, Q)], True),
        # The norms go together where the product in front is ours, or that behind either.
        (behind, [(K, Q)], True), (behind, [(KV, OUT)], True), (behind, [(1, 1)], False),
    ],
)  # fmt: skip
def test_only_beside_a_launch_of_ours(made, launches, taken, faster):
    faster(*launches)
    module = build(MODELS[made][0])
    rewrite(module)
    assert len(find_all(module, NORM)) == taken


@pytest.mark.parametrize("early", [True, False])
def test_vllms_qkv_a_is_launched_early_behind_a_norm_of_ours(early, faster, monkeypatch):
    """A norm in front of it becomes ours in any case."""
    kernel, ran = SimpleNamespace(_schema=SimpleNamespace(arguments=())), []
    if early:
        kernel._schema.arguments = (SimpleNamespace(name="enable_pdl"),)

    def launch(out, x, weight, enable_pdl):
        ran.append((len(x), enable_pdl))
        torch.mm(x, weight, out=out)

    launch.default = kernel
    monkeypatch.setattr(torch.ops._C, "dsv3_fused_a_gemm", launch, raising=False)
    monkeypatch.setattr(
        _custom_ops, "dsv3_fused_a_gemm", lambda out, x, weight: torch.mm(x, weight, out=out)
    )
    faster()
    ours, wanted = map(build, MODELS[before_qkv_a])
    record = rewrite(ours)
    assert [*record.norms] == [Norm((K,), 2)]
    assert [*record.plain_products] == [Decline("product-slower", QKV_A)]
    assert len(find_all(ours, f"{ops.NAMESPACE}::{ops.QKV_A}")) == early
    for tokens in (1, 16, 17):
        given = values(tokens=tokens, residual=torch.randn(tokens, K).to(BF16))
        assert all(map(torch.equal, run(ours, given), run(wanted, given)))
    assert ran == [(1, True), (16, True)] * early


def test_not_where_no_launch_begins_early(faster, monkeypatch):
    faster()
    imitate(monkeypatch, "sm_89")
    module = build(MODELS[behind][0])
    rewrite(module)
    assert not find_all(module, NORM) and find_all(module, PROJECTION)


def of_sum(x, t, value, alpha=1):
    """A norm of a sum and a residual."""
    total = torch.add(torch.ops.mla_fusion_tests.experts(x)[0], value, alpha=alpha)
    return ir.ops.fused_add_rms_norm(total, t["residual"], t["gain_x"], EPSILON)[0], total


def of_scaled(x, t):
    """The same, and a factor in front of it that something else reads."""
    scaled = torch.ops.mla_fusion_tests.experts(x)[1] * 2.5
    return of_sum(x, t, scaled)[0], scaled


NEAR_MISSES = {
    "computed": lambda x, t: ir.ops.rms_norm(x.sin(), t["gain_x"], EPSILON),
    "a computed term": lambda x, t: of_sum(x, t, x.sin())[0],
    "a number": lambda x, t: of_sum(x, t, 2.0)[0],
    "a factor of each row": lambda x, t: of_sum(x, t, x * x[:, :1])[0],
    "a scaled term with another reader": of_scaled,
    "a broadcast term": lambda x, t: of_sum(x, t, t["gain_x"])[0],
    "a scaled term": lambda x, t: of_sum(x, t, x, 3)[0],
    "a sum with another reader": lambda x, t: of_sum(x, t, x),
    "of a norm": lambda x, t: vllms(vllms(x, t["gain_x"]), t["gain_x"]),
    "of a part": lambda x, t: ir.ops.rms_norm(x, t["gain_x"], EPSILON, K // 2),
    "without weight": lambda x, t: ir.ops.rms_norm(x, None, EPSILON),
    "another weight": lambda x, t: ir.ops.rms_norm(x, t["gain_x"] + 1, EPSILON),
    "turned": lambda x, t: ir.ops.rms_norm(linear(t["w_q"], x).t()[:, :K], t["gain_x"], EPSILON),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_kept(name, faster):
    def model(t):
        made = NEAR_MISSES[name](t["x"], t)
        x, *read = made if isinstance(made, tuple) else [made]
        return linear(x, t["w_q"]), *read

    faster()
    module = build(model)
    rewrite(module)
    assert not find_all(module, NORM) and [n for op in IR for n in find_all(module, op)]


def test_a_weight_of_another_type_and_a_layer_that_is_left_out(faster):
    faster()
    module = build(MODELS[in_front][0])
    MLAProjectionPass((1, 16))(module.graph)
    [norm], weight = find_all(module, IR[1]), edits.node_named(module, "gain_x")
    assert not MLANormPass("triton", {norm})(module.graph).rewritten
    weight.meta["val"] = weight.meta["val"].half()
    assert not MLANormPass("triton")(module.graph).rewritten


def absorbed(module, spec):
    """The fused ops of a graph, once passes 2 to 6, 8 for provider triton and 5 have run."""
    assert fuse(module, spec).fused == spec.layers
    dead = MLANormPass("triton")(module.graph).dead
    drop_dead(module.graph, dead)
    fused = find_all(module, FUSED)
    MLAFixFunctionalizationPass()(module.graph)
    module.graph.lint()
    return fused


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(
    "spec",
    [Spec("nope", dtype=BF16, ir_norm=True),
     Spec("nope", dtype=torch.float16, ir_norm=True, layers=2),
     Spec("nope", dtype=BF16, ir_norm=True, kv_cache_dtype="fp8", dynamic=False),
     Spec("nope", dtype=BF16, ir_norm=True, quantized="group"),
     Spec("nope", dtype=BF16, ir_norm=True, quantized="tensor", q_lora=True)],
    ids=str,
)  # fmt: skip
def test_the_norm_of_the_latents_goes_into_the_fused_op(spec):
    """Every kind of batch, to the bit of a norm rounded once; no norm is left, nor a copy."""
    module, before = build_layers(spec), build_layers(spec)
    for node in find_all(before, IR[0]):
        node.target = lambda *given: reference.normalize(*([each] for each in given))[0]
    assert [fused.kwargs["kv_norm_epsilon"] for fused in absorbed(module, spec)]
    assert not find_all(module, IR[0]) and not find_all(module, aten.clone.default)
    for batch in BATCHES.values():
        assert_same(run_layers(before, spec, batch), run_layers(module, spec, batch), batch)


def also_read(module, node):
    edits.read_also(module, node)


def not_of_a_split(module, node):
    """k_pe and the latents are slices of one value, so that no split tells them apart."""
    [split] = (n for n in find_all(module, aten.split_with_sizes.default) if len(n.args[1]) == 2)
    part = edits.add(module, node, aten.slice.Tensor, split.args[0], 1, 0, LATENT)
    node.args = (part, *node.args[1:])


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("edit", [also_read, not_of_a_split])
def test_a_norm_that_stays_in_front_of_the_fused_op(edit):
    spec = Spec("nope", dtype=BF16, ir_norm=True)
    module, before = build_layers(spec), build_layers(spec)
    for each in (module, before):
        edit(each, edits.attention(each).kwargs["kv_c_normed"])
    [fused] = absorbed(module, spec)
    assert "kv_norm_weight" not in fused.kwargs and find(module, IR[0])
    for batch in BATCHES.values():
        assert_same(run_layers(before, spec, batch), run_layers(module, spec, batch), batch)


@pytest.mark.parametrize("stride, distinct", [(24, True), (20, False)])
def test_parts_of_rows_that_overlap_are_not_apart(stride, distinct):
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    rows.meta["val"] = torch.empty(200).as_strided((5, 24), (stride, 1))
    split = graph.call_function(aten.split_with_sizes.default, (rows, [16, 8], 1))
    parts = [graph.call_function(operator.getitem, (split, index)) for index in (0, 1)]
    assert [apart(a, b) for a in parts for b in parts] == [False, distinct, distinct, False]


@pytest.mark.parametrize(
    "name, provider, taken",
    [("native-no_q_lora", "triton", True), ("native-no_q_lora", "aiter", False),
     ("flashinfer-q_lora", "triton", False)],
)  # fmt: skip
def test_graphs_of_engines_on_a_gpu(name, provider, taken, faster):
    """With vLLM's products. The query's latents have a norm too, in one kernel of Inductor's."""
    faster((1, 1))
    module = recorded.read(recorded.FOLDER / f"{name}.json.gz")
    facts = Engine(Spec()).facts_of()(*layer_names(Spec()))

    def work(graph, record):
        pipeline.fuse(graph, lambda name: facts, provider, record, "auto")

    pipeline.contained(module.graph, Range(start=1, end=4), work)
    record = report._records.pop()
    fused = find_all(module, FUSED)
    assert len(fused) == record.fused > 0 and not find_all(module, NORM) and not record.norms
    assert all(("kv_norm_weight" in each.kwargs) == taken for each in fused)
    assert all((variant.kv_norm_epsilon == 1e-6) == taken for variant in record.variants)
    copies = len(find_all(module, aten.clone.default))
    MLAFixFunctionalizationPass()(module.graph)
    assert len(find_all(module, aten.clone.default)) == copies
