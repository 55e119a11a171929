"""Pass 7 in the seven cases of CONTRIBUTING.md, on graphs traced from linear layers as vLLM has
them on CUDA, and the body of its op. A made-up table says which products were measured faster."""

import pytest
import torch
import vllm.model_executor.kernels.linear  # noqa: F401  registers an op
from torch import fx
from torch.nn.functional import linear
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.config.utils import Range

from mla_fusion import ops, projections, report, runtime
from mla_fusion.ops import Product
from mla_fusion.passes import pipeline
from mla_fusion.passes.projections import MLAProjectionPass, described
from mla_fusion.passes.rewrite import PassResult
from mla_fusion.patterns.probe import CASTS
from mla_fusion.patterns.products import BLOCK_FP8
from mla_fusion.projections import reference, triton
from mla_fusion.report import RangeReport
from tests.passes import declare, edits, graphs, recorded
from tests.passes.graphs import find, find_all, printed
from tests.passes.linear_layers import (
    BF16,
    KV,
    OUT,
    K,
    Q,
    build,
    in_a_row,
    layer,
    names,
    rewrite,
    routed,
    run,
    two_layers,
    two_of_a_part,
    values,
)  # fmt: skip

aten = torch.ops.aten
PROJECTION = f"{ops.NAMESPACE}::{ops.PROJECTION}"
runtime.register_ops()
declare.op(
    "mla_fusion_tests", "opaque_linear(Tensor x, Tensor w) -> Tensor", linear,
    fake=lambda x, w: x.new_empty((x.shape[0], w.shape[0])),
)  # fmt: skip


class Table:
    """Which launches are faster: (K, *sizes), all if none is given; and the number of tokens of
    those that ran."""

    def __init__(self, *faster, tokens=range(1, 17)):
        self.faster, self.tokens, self.ran = faster, tokens, []

    def plan_for(self, device, of, tokens):
        known = not self.faster or (of.k, *of.sizes) in self.faster
        return "a plan" if known and tokens in self.tokens else None

    def launch(self, plan, x, *args):
        self.ran.append(len(x))
        return reference.project(x, *args)


@pytest.fixture
def table(monkeypatch):
    """table(launches, ...) puts a `Table` in place of the measured rows and the kernels."""

    def put(*faster, **options):
        made = Table(*faster, **options)
        monkeypatch.setattr(projections, "plan_for", made.plan_for)
        monkeypatch.setattr(triton, "launch", made.launch)
        return made

    return put


def test_matched(table):
    """q and kv_a are one launch, the larger first, and o_proj another."""
    table((K, Q, KV), (Q, OUT))
    module = build()
    old, rows = {*module.graph.nodes}, find(module, aten.mm.default).meta["val"].shape[0]
    record = rewrite(module)
    pair, single = find_all(module, PROJECTION)
    assert (pair.args[0].name, names(pair)) == ("x", ["w_q", "w_kv"])
    assert single.args[0].target is aten.sigmoid.default and names(single) == ["w_o"]
    assert not find_all(module, aten.mm.default) and not find_all(module, aten.permute.default)
    assert record.products == {Product(K, (Q, KV)): 1, Product(Q, (OUT,)): 1}
    assert record.plain_products == {}
    for node in {*module.graph.nodes} - old:
        assert "val" in node.meta, node.name
    for launch, widths in ((pair, (Q, KV)), (single, (OUT,))):
        assert [tuple(v.shape) for v in launch.meta["val"]] == [(rows, n) for n in widths]
        assert all(user.meta["val"] is launch.meta["val"][user.args[1]] for user in launch.users)
    before = printed(module)
    assert rewrite(module).products == {} and printed(module) == before


@pytest.mark.parametrize(
    "faster, launches",
    [
        ([(K, Q), (K, KV)], ["24 -> 40", "24 -> 18"]),
        ([(K, KV), (Q, OUT)], ["24 -> 18", "40 -> 32"]),
        ([(K, Q, KV), (K, Q)], ["24 -> 40 + 18"]),
    ],
)
def test_products_of_one_input_are_one_launch_only_where_that_was_measured(table, faster, launches):
    table(*faster)
    module = build()
    record = rewrite(module)
    assert {str(described(node)) for node in find_all(module, PROJECTION)} == {*launches}
    left = 3 - sum(text.count("+") + 1 for text in launches)
    [decline] = record.plain_products or [None]
    assert sum(record.plain_products.values()) == left
    assert left == 0 or decline.code == "product-slower"


def test_what_was_not_measured_faster_is_named(table):
    table((1, 1))
    module = build()
    before = printed(module)
    [(decline, count)] = rewrite(module).plain_products.items()
    assert (count, decline.code) == (3, "product-slower")
    assert decline.detail == f"{K} -> {Q}, {K} -> {KV}, {Q} -> {OUT}"
    assert printed(module) == before


# name -> (model, code, detail); o_proj is read in another way
NEAR_MISSES = {
    "a bias": (lambda t: linear(t["x"] @ t["w_q"].t(), t["w_o"], t["bias"]), "aten::addmm"),
    "a residual": (lambda t: t["x"] + linear(t["x"] @ t["w_q"].t(), t["w_q"].t()), "aten::addmm"),
    "no transpose": (lambda t: torch.mm(t["x"] @ t["w_q"].t(), t["turned"]), "turned"),
    "a part of a weight": (lambda t: linear(t["x"] @ t["w_q"].t(), t["wide"][:OUT]), "wide"),
    "a scaled weight": (lambda t: linear(t["x"] @ t["w_q"].t(), t["w_o"].neg()), "w_o"),
    "computed in fp32": (
        lambda t: linear((t["x"] @ t["w_q"].t())[:, :K].float().sin(), t["router"]),
        "torch.float32",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_is_kept(name, table):
    """The product in front of it is taken all the same."""
    table()
    model, detail = NEAR_MISSES[name]
    module = build(model)
    [(decline, count)] = rewrite(module).plain_products.items()
    assert (decline.code, count) == ("product-form", 1) and detail in decline.detail
    assert len(find_all(module, PROJECTION)) == 1


@pytest.mark.parametrize(
    "options, detail",
    [({"dtype": torch.float32}, "torch.float32"), ({"turned": True}, "w_o has strides (1, 32)")],
)
def test_other_types_and_strides_are_kept(options, detail, table):
    table()
    module = build(**options)
    [decline] = rewrite(module).plain_products
    assert (decline.code, decline.detail) == ("product-form", detail)


def test_opaque_products_are_named_and_other_products_are_none(table):
    table()
    name = "mla_fusion_tests::opaque_linear"
    op = torch.ops.mla_fusion_tests.opaque_linear
    module = build(lambda t: (op(t["x"], t["w_q"]), t["x"] @ t["x"].t()))
    before = printed(module)
    record = rewrite(module)
    [decline] = record.plain_products
    assert (decline.code, decline.detail) == ("product-opaque", name)
    assert record.plain_products[decline] == 1 and printed(module) == before


def test_missing_metadata_is_a_decline(table):
    """Of one node: the products that it belongs to are kept, the others are taken."""
    table((K, Q), (K, KV), (Q, OUT))
    seen = set()
    for index, node in enumerate(build().graph.nodes):
        module = build()
        other = list(module.graph.nodes)[index]
        other.meta.pop("val", None)
        record = rewrite(module)
        codes = {decline.code for decline in record.plain_products}
        assert codes <= {"missing-metadata"}, node.name
        kept = sum(record.plain_products.values())
        assert (
            len(find_all(module, PROJECTION))
            == 3 - kept
            == 3 - len(find_all(module, aten.mm.default))
        )
        seen |= {(node.name, kept)} if kept else set()
    assert {("x", 2), ("w_q", 1), ("mm", 1)} <= seen


def test_other_readers_keep_what_they_read(table):
    """Of the input, of a result, and of the transpose of a weight."""
    table()
    module = build()
    for node in (*find_all(module, aten.mm.default), find(module, aten.permute.default)):
        edits.read_also(module, node)
    edits.read_also(module, edits.node_named(module, "x"))
    before = graphs.copy(module)
    rewrite(module)
    assert (
        len(find_all(module, PROJECTION)) == 2 and len(find_all(module, aten.permute.default)) == 1
    )
    given = values()
    assert all(map(torch.equal, run(before, given), run(module, given)))


def test_a_router_reads_what_was_converted_for_it(table):
    """Weights of two types are no launch."""
    table()
    module = build(routed)
    record = rewrite(module)
    assert record.products == {Product(K, (KV,), 32): 1, Product(K, (KV,)): 1}
    assert {launch.args[0].name for launch in find_all(module, PROJECTION)} == {"x"}
    assert not [n for n in module.graph.nodes if n.target in CASTS]


def test_a_product_of_a_product(table):
    table()
    module = build(in_a_row)
    rewrite(module)
    assert len(find_all(module, PROJECTION)) == 2 and not find_all(module, aten.mm.default)


def test_chain(table):
    table((K, Q, KV), (Q, OUT))
    module = build(two_layers)
    record = rewrite(module)
    assert record.products == {Product(K, (Q, KV)): 2, Product(Q, (OUT,)): 2}
    assert [d.detail for d in record.plain_products] == [f"{OUT} -> {K}"]


def test_nothing_to_do_is_the_same_object(table):
    for module in (fx.symbolic_trace(lambda x: x + 1), build(lambda t: t["x"].sin())):
        graph, before = module.graph, printed(module)
        assert MLAProjectionPass((1, 64))(graph) == PassResult()
        assert module.graph is graph and printed(module) == before


@pytest.mark.parametrize("end, option, taken", [(4, "auto", 2), (5, "auto", 0), (4, "vllm", 0)])
def test_a_piece_without_an_attention(end, option, taken, table):
    """The last one of a model; a graph outside the bucket of 4 is the same printed code."""
    table((K, Q, KV), (Q, OUT))
    module = build()
    before = printed(module)
    report.forget()
    with pass_context(Range(1, end)):
        pipeline.MLAFusionPass("reference", 4, "auto", 1, option)(module.graph)
    [record] = report._records
    assert (record.layers, sum(record.products.values())) == (0, taken)
    assert (printed(module) == before) is not bool(taken)


@pytest.mark.parametrize("first, last, dynamic, taken", [
    (1, 64, True, True), (1, 3, True, False), (9, 64, True, False), (17, 64, True, False),
    (5, 5, False, True), (1, 64, False, True), (4, 4, False, False),
])  # fmt: skip
def test_plans_are_asked_for_the_tokens_that_a_graph_serves(first, last, dynamic, taken, table):
    """The table knows 4 to 8; without a symbol the graph has 5."""
    table(tokens=range(4, 9))
    assert bool(rewrite(build(dynamic=dynamic), first, last).products) is taken


MODELS = [layer, two_layers, two_of_a_part, routed, in_a_row]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_numerics_are_equal(model, dtype, table):
    """To the bit on a CPU. The kernels run up to 16 tokens where they have a plan."""
    known = table(tokens=range(2, 17))
    before, after = build(model, dtype), build(model, dtype)
    rewrite(after)
    for tokens in (1, 2, 16, 17, 40):
        given = values(dtype, tokens)
        assert all(map(torch.equal, run(before, given), run(after, given)))
    assert {*known.ran} == {2, 16}


RECORDED = sorted(recorded.FOLDER.glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_products_of_a_recorded_layer(path, table):
    """All that its graph shows."""
    table()
    module = recorded.read(path)
    opaque = path.name.startswith("output_")  # weights of fp8
    products = len(find_all(module, aten.mm.default))
    record = rewrite(module)
    assert not find_all(module, aten.mm.default)
    assert sum(len(launch.sizes) for launch in record.products) == products or opaque
    assert {d.code for d in record.plain_products} == ({"product-opaque"} if opaque else set())
    assert sum(record.plain_products.values()) == (5 if opaque else 0)


def _block(t, weight="w_fp8", scales="scales", group=128):
    """qkv_a of DeepSeek-V3 in block fp8, behind another product."""
    gemm = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
    return gemm(linear(t["x"], t["w_wide"]), t[weight], t[scales], group, True)


def test_a_product_in_block_fp8(table, monkeypatch):
    """Where no plan serves the tokens, vLLM's op runs, of which a double is here."""
    known, calls = table(tokens=range(2, 17)), []
    before, after = build(_block), build(_block)
    assert rewrite(after).products == {Product(K, (256,)): 1, Product(256, (192,), 8): 1}
    assert not find_all(after, BLOCK_FP8)
    _, launch = find_all(after, PROJECTION)
    x, [weight], scales, _ = launch.args
    given = [torch.empty_like(each.meta["val"], device="meta") for each in (x, weight, scales)]
    [fake] = launch.target(given[0], given[1:2], given[2])
    assert (*fake.shape[1:], fake.dtype) == (192, BF16) == (*launch.meta["val"][0].shape[1:], BF16)

    def double(x, weight, scales, *more):
        calls.append((len(x), *more))
        return known.launch("a plan", x, [weight], scales)[0]

    find(before, BLOCK_FP8).target = double
    monkeypatch.setattr(torch.ops.vllm, BLOCK_FP8.removeprefix("vllm::"), double)
    for tokens in (1, 16, 17):
        given = values(tokens=tokens)
        assert all(map(torch.equal, run(before, given), run(after, given)))
    assert calls == [(n, 128, True) for n in (1, 1, 16, 17, 17)]


@pytest.mark.parametrize("model, detail", [
    (lambda t: _block(t, group=64), "another layout"),
    (lambda t: _block(t, scales="row"), "another layout"),
    (lambda t: _block({**t, "w_fp8": t["w_fp8"].flip(0)}), "another layout"),
    (lambda t: _block(t, weight="w_a"), "torch.bfloat16, torch.float32"),
    (lambda t: _block(t, scales="narrow"), "torch.float8_e4m3fn, torch.bfloat16"),
])  # fmt: skip
def test_block_fp8_with_other_arguments_is_kept(model, detail, table):
    table()
    record = rewrite(build(model))
    [decline] = record.plain_products
    assert decline.code == "product-form" and detail in decline.detail
    assert [*map(str, record.products)] == [f"{K} -> 256"]


def test_inductor_runs_the_op_with_parts_of_rows_and_several_results(table):
    table()
    settings = {
        "post_grad_custom_post_pass": lambda graph: seen.append(rewrite(graph.owning_module)),
        "force_disable_caches": True,
    }  # fmt: skip
    seen: list[RangeReport] = []
    rewrite(module := build(two_of_a_part))
    torch._dynamo.reset()
    with torch._inductor.config.patch(settings), torch.no_grad():
        compiled = torch.compile(two_of_a_part, fullgraph=True)
        for tokens in (3, 40):
            given = values(tokens=tokens)
            torch._dynamo.mark_dynamic(given["x"], 0)
            assert all(map(torch.equal, compiled(given), run(module, given)))
    assert {*seen[0].products} == {Product(K, (Q,)), Product(KV, (OUT, K))}
