"""Random edits of real graphs: no exception, the same results, no layer lost without a reason.

And random batches through fused graphs: equal results, and no byte outside the addressed slots.
"""

import functools
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch._inductor.pattern_matcher import stable_topological_sort

from mla_fusion import ops, projections
from mla_fusion.passes import pipeline
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.patterns import norms, products
from mla_fusion.patterns.site import ATTENTION, attention_calls, functionalized_op
from mla_fusion.report import RangeReport
from mla_fusion.report.reasons import REASONS
from tests.gpus import imitated
from tests.passes import fake_engine, grammar, graphs, inductor, programs
from tests.passes.fake_engine import BATCHES, Batch, assert_found, assert_same, fuse, run
from tests.passes.graphs import TRACED_TOKENS, build, find_all, printed, state
from tests.passes.numbered import passes

# fp32: the order of a sum. bf16: a rounding of 2**-9 to either side, which the attention and the
# projection after it carry on. fp8: one step of the type.
TOLERANCE = {"float32": 1e-3, "bfloat16": 6e-2, "fp8": 0.13}
FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"
ATTENTIONS = {ATTENTION, *ops.RUNTIME_OPS} - {FUSED}
# An error of this library is never a reason for a decline.
ERRORS = {"pass-error", "unfused-pair", "unknown-layer"}
SLOTS = fake_engine.BLOCKS * fake_engine.BLOCK_SIZE


def _weight(spec):
    """How often graphs of it come: the oracle is strictest where nothing is rounded, the only
    graphs that go through Inductor too, and a scale is a free value in aten ops alone."""
    native = spec.quantized == "tensor_native" and spec.dtype is torch.bfloat16
    return 6 if native else 8 if spec.dtype is torch.float32 else 1


# One of how many programs in fp32 also goes through Inductor, which takes 3 s: of all programs a
# fifth in the nightly profile, 10 of those of every day.
SHARE = 1 if settings.default.max_examples > 1000 else 8
SPECS = [spec for spec in grammar.SPECS for _ in range(_weight(spec))]


def outcome(module, spec, batch, quantized, seed):
    """What the graph computes; None if the edits made one that does not run."""
    try:
        return run(module, spec, batch, quantized, seed)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return None


def tolerance(spec):
    """How far the results may lie apart."""
    name = "fp8" if spec.kv_cache_dtype == "fp8" else str(spec.dtype).removeprefix("torch.")
    return TOLERANCE[name]


def comparable(before, after, spec):
    """Both outcomes; without outputs where the attention amplifies a rounding.

    A fused decode step rounds a rotated value once, straight to fp8, the unfused one to bf16
    before. Where that gives the neighbouring fp8 number, in the cache or in a quantized query, a
    sharp softmax moves the output by any amount. A factor makes it as sharp in bf16: with scores of
    48 one step of 17 elements of a query moved the output by 0.09, in float64. What the attention
    is given, queries and cache, is compared in any case; in fp32 the output is too, if it is not
    rounded to fp8.
    """
    sharp = spec.kv_cache_dtype == "fp8" or (spec.scaled and spec.dtype != torch.float32)
    sharp = sharp or spec.quantized
    if not sharp or _same_given(before, after):
        return before, after
    return replace(before, outputs=[]), replace(after, outputs=[])


def _same_given(before, after):
    """Whether the attention is given the same rows and caches, to the bit."""
    given = zip([*before.queries, *before.prompts], [*after.queries, *after.prompts], strict=True)
    try:
        for wanted, found in given:
            for rows in wanted:
                assert_found(rows, found, tolerance=None)
    except AssertionError:
        return False
    return all(torch.equal(a, b) for a, b in zip(before.caches, after.caches, strict=True))


def compiled(module, spec, quantized):
    """The graph with the passes, through Inductor; None if it fails alike without them."""
    try:
        return inductor.through(module, spec, quantized)[0]
    except Exception as error:  # noqa: BLE001  asked again without the passes, for the same error
        with pytest.raises(type(error)):
            inductor.through(module, spec, quantized, fused=False)
        return None


def undefined(module, wanted, spec, batch, *where):
    """Whether what a graph computes depends on memory that nothing wrote."""
    with mock.patch.object(fake_engine, "UNDEFINED", -3.0):
        found = run(module, spec, batch, *where)
    try:
        assert_same(wanted, found, batch)
        return False
    except AssertionError:
        return True


def twice(graph, step):
    """Run a pass, then again: the second run must change nothing."""
    step(graph)
    graph.lint()
    once = state(graph)
    again = step(graph)
    assert not again.rewritten
    assert state(graph) == once


def fuse_twice(module, twin, spec, quantized):
    """Passes 2 to 4 as vLLM runs them: how many layers fused, and declined by reason.

    `twin` is the same graph, to compare with.
    """
    calls = [call.name for call in attention_calls(module.graph)]
    record = fuse(module, spec, quantized_query=quantized)
    module.graph.lint()
    codes = Counter({decline.code: layers for decline, layers in record.declined.items()})
    assert record.fused + codes.total() == record.layers == len(calls)
    assert sum(functionalized_op(node) in ATTENTIONS for node in module.graph.nodes) == len(calls)
    assert set(codes) <= set(REASONS) - ERRORS, record.declined
    if not record.fused:
        stable_topological_sort(twin.graph)
        assert printed(module) == printed(twin)
    once = state(module.graph)
    again = fuse(module, spec, quantized_query=quantized)
    plain = record.plain_outputs
    # A reader that kept a layer or its output may have gone with another rewrite, or be dead.
    kept = {"shared-rotation", "output-shared", "missing-metadata"}
    if not kept & {*codes, *(decline.code for decline in plain)}:
        assert again.fused == 0
        assert state(module.graph) == once
    assert again.layers == codes.total()
    assert {decline.code for decline in plain} <= set(REASONS) - ERRORS, plain
    assert sum(record.outputs.values()) == record.fused
    assert sum(plain.values()) <= record.outputs.get("none", 0)
    found = Counter({f"output: {kind}": layers for kind, layers in record.outputs.items()})
    return found + codes + Counter(fused=record.fused)


def project_twice(module):
    """Passes 7 and 8, as on a GPU where every product is faster, of fp32 too: how many launches of
    products and of norms they made, and how many norms went into a fused op."""
    record = RangeReport((1, 4))
    types = (*products.TYPES, torch.float32)
    with (
        mock.patch.object(products, "TYPES", types), mock.patch.object(norms, "TYPES", types),
        mock.patch.object(projections, "plan_for", lambda *_: "a plan"), imitated("sm_90"),
    ):  # fmt: skip
        pipeline.project(module.graph, "auto", record, "triton")
        module.graph.lint()
        once = state(module.graph)
        pipeline.project(module.graph, "auto", again := RangeReport((1, 4)), "triton")
    assert state(module.graph) == once and not again.products and not again.norms
    assert {decline.code for decline in record.plain_products} <= set(REASONS) - ERRORS
    taken = sum("kv_norm_weight" in node.kwargs for node in find_all(module, FUSED))
    return Counter(products=sum(record.products.values()), norms=sum(record.norms.values()),
                   norms_in_the_op=taken)  # fmt: skip


def one_by_one(module, spec, quantized, last):
    """Passes 2 to 4, and 6, up to `last`, each on its own and twice."""
    steps = passes(spec, quantized)
    stable_topological_sort(module.graph)
    for number in (2, 3, 4, 6):
        if number <= last:
            twice(module.graph, steps[number])


def batches(kind, spec, padding):
    """Steps of a kind: up to 11 rows, more than any constant of the grammar has."""
    rows = st.integers(2, 11) if spec.dynamic else st.just(TRACED_TOKENS)
    return rows.flatmap(lambda n: st.integers(2 if padding else n, n).flatmap(
        lambda actual: st.builds(
            Batch,
            rows=st.just(n),
            actual=st.just(actual),
            decode={"decode": st.just(actual), "prefill": st.just(0),
                    "mixed": st.integers(1, actual - 1)}[kind],
            slots=st.sampled_from([None, actual]),
            holes=st.sampled_from([(), (1,)] if padding else [()]),
        )
    ))  # fmt: skip


@pytest.mark.timeout(36_000)  # 20,000 graphs in the nightly profile
@pytest.mark.filterwarnings("error:erase_node")  # of a node that is gone
@pytest.mark.usefixtures("plain_kernels")
@given(
    data=st.data(),
    spec=st.sampled_from(SPECS),
    steps=grammar.STEPS,
    misplaced=st.none() | st.integers(0, 1 << 12),
    quantized=st.booleans(),
    last=st.sampled_from((5, 5, 5, 5, 5, 5, 5, 2, 3, 4, 6)),
    seed=st.integers(1, 1 << 12),
    share=st.integers(1, SHARE),
)
def test_edited_graphs_compute_the_same(data, spec, steps, misplaced, quantized, last, seed, share):
    """`last` is the pass after which the graph is run: 2 to 4 or 6 alone, or all as in vLLM."""
    quantized = quantized and spec.kv_cache_dtype == "fp8"
    compiles = share == SHARE and spec.dtype is torch.float32
    compiles = compiles and not grammar.EAGER.intersection(edit for edit, _, _ in steps)
    module = (graphs.build_apart if compiles else build)(spec)
    grammar.apply(module, steps)
    padding = not grammar.mixes_rows(steps)
    before = {}
    for offset, kind in enumerate(("decode", "mixed", "prefill")):
        batch = data.draw(batches(kind, spec, padding))
        key = (batch, seed + offset)
        before[key] = found = outcome(module, spec, batch, quantized, key[1])
        assume(found is not None)
    original, twin = graphs.copy(module), graphs.copy(module)
    untouched = state(original.graph)
    if misplaced is not None:
        for graph_module in (module, twin):
            grammar.misplace(graph_module, misplaced)
    if last != 5:
        one_by_one(twin, spec, quantized, 6)
        one_by_one(module, spec, quantized, last)
    else:
        counts = fuse_twice(module, twin, spec, quantized)
        if all(edit in grammar.HARMLESS for edit, _, _ in steps):
            assert counts["fused"] == spec.layers, counts
            quantizes = spec.quantized and spec.dtype is not torch.float32
            viewed = programs.all_rows in {edit for edit, _, _ in steps}
            assert not quantizes or viewed or counts["output: none"] == 0
        counts += project_twice(module)
        twice(module.graph, MLAFixFunctionalizationPass())
        for what in counts:
            event(what)
    way = compiled(original, spec, quantized) if compiles else None
    event(f"through Inductor: {way is not None}")
    for (batch, seed), wanted in before.items():
        where = batch, quantized, seed
        after = run(module, spec, *where)
        assert_same(*comparable(wanted, after, spec), batch, tolerance=tolerance(spec))
        if way and way.holds(batch.rows) and not undefined(original, wanted, spec, *where):
            event("steps through Inductor")
            compare = functools.partial(assert_same, batch=batch, tolerance=tolerance(spec))
            try:
                compare(*comparable(wanted, run(module, spec, *where, way.call), spec))
            except AssertionError:  # Inductor drops a write of the cache that no op waits for
                plain, _ = inductor.through(original, spec, quantized, fused=False)
                with pytest.raises(AssertionError):
                    compare(*comparable(wanted, run(original, spec, *where, plain.call), spec))
                event("other numbers through Inductor without the passes too")
    # Nothing of it touched the nodes of a graph that shares its fake values.
    assert state(original.graph) == untouched


@pytest.mark.nightly
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("spec", grammar.every_spec(), ids=str)
def test_every_spelling_of_the_grammar_fuses(spec):
    """All combinations of the options; the default run has every pair of them."""
    module, quantized = build(spec), spec.kv_cache_dtype == "fp8"
    before = {batch: run(module, spec, batch, quantized) for batch in BATCHES.values()}
    record = fuse(module, spec, quantized_query=quantized)
    assert (record.fused, record.declined) == (spec.layers, {})
    MLAFixFunctionalizationPass()(module.graph)
    for batch, want in before.items():
        pair = comparable(want, run(module, spec, batch, quantized), spec)
        assert_same(*pair, batch, tolerance=tolerance(spec))


# --- random batches


@st.composite
def any_batch(draw, spec):
    """Any step: `actual` of `rows` are tokens, `decode` of them decode tokens, in any slots."""
    rows = draw(st.integers(0, 7)) if spec.dynamic else TRACED_TOKENS
    if draw(st.integers(0, 9)) == 9:
        return Batch(rows=rows, actual=rows, decode=rows, profile=True)
    actual = draw(st.integers(0, rows))
    decode = actual if draw(st.booleans()) else draw(st.integers(0, actual))
    slots = st.integers(0, SLOTS - 1)
    return Batch(
        rows=rows,
        actual=actual,
        decode=decode,
        slots=draw(st.none() | st.integers(actual, rows)),
        holes=tuple(draw(st.sets(st.integers(0, actual - 1)))) if actual else (),
        order=tuple(draw(st.lists(slots, min_size=rows, max_size=rows, unique=True))),
    )


@functools.cache
def unfused_and_fused(spec, quantized):
    """A graph as it was, and as vLLM would compile it."""
    module = build(spec)
    assert fuse(module, spec, quantized_query=quantized).fused == spec.layers
    MLAFixFunctionalizationPass()(module.graph)
    return build(spec), module


def assert_untouched(caches, batch):
    """Every byte of a slot that no row addresses is as it was before the step."""
    slots = batch.slot_mapping()
    addressed = torch.zeros(SLOTS, dtype=torch.bool)
    if slots is not None:
        addressed[slots[slots >= 0]] = True
    for cache in caches:
        written = (cache != fake_engine.POISON).flatten(0, 1).any(-1)
        assert not (written & ~addressed).any(), "a slot that no row addresses was written"
        assert written[addressed].all(), "an addressed slot was not written"


@pytest.mark.timeout(7200)  # 20,000 steps in the nightly profile
@pytest.mark.usefixtures("plain_kernels")
@given(data=st.data(), spec=st.sampled_from(grammar.SPECS), quantized=st.booleans())
def test_any_batch_writes_what_the_unfused_graph_writes(data, spec, quantized):
    quantized = quantized and spec.kv_cache_dtype == "fp8"
    batch = data.draw(any_batch(spec))
    unfused, fused = unfused_and_fused(spec, quantized)
    before, after = (run(module, spec, batch, quantized) for module in (unfused, fused))
    native = spec.rope in ("native", "native_late_cast", "deepseek")
    # Eager torch rounds every product of a bf16 rotation, as a compiled graph does not.
    exact = not batch.decode_only and not (native and spec.dtype is torch.bfloat16)
    pair = comparable(before, after, spec)
    assert_same(*pair, batch, tolerance=None if exact else tolerance(spec))
    for outcome in (before, after):
        assert_untouched(outcome.caches, batch)
    event(f"decode-only: {batch.decode_only}, padded: {batch.rows > batch.actual}")
