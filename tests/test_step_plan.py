"""The portable decode in place of a backend's `forward_mqa`: one plan for all layers of a pass."""

import dataclasses
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import attention, runtime
from mla_fusion.attention import reference
from mla_fusion.config import Options, eligibility
from mla_fusion.report.reasons import Decline
from mla_fusion.runtime import decode_choice, layer_state, step_plan
from mla_fusion.runtime.decode_choice import Choice
from tests.attention.decodes import definition
from tests.passes import fake_engine
from tests.passes.graphs import HEADS, LATENT, ROPE, VALUE, Spec
from tests.prepared import attach
from tests.step import forward_pass

SPEC = Spec()
PAGE = fake_engine.BLOCK_SIZE
PORTABLE = Options("reference", "portable")


class Impl(fake_engine.Impl):
    """A backend whose own decode must not be called."""

    scale = 0.3

    def forward_mqa(self, *args):
        raise AssertionError("the backend's decode was called")


def states(engine):
    return [layer_state.of(layer) for layer in engine.layers.values()]


class Engine:
    """Two layers with full caches, and the metadata of a decode-only batch."""

    def __init__(self, drafts=0, change=(), **facts):
        self.layers = {name: fake_engine.Layer(name, SPEC) for name in ("a", "b")}
        generator = torch.Generator().manual_seed(0)
        for layer in self.layers.values():
            layer.impl = Impl(False)
            layer.kv_cache = torch.randn(
                (fake_engine.BLOCKS, PAGE, LATENT + ROPE), generator=generator
            ).to(SPEC.dtype)
        for name, value in dict(change).items():
            setattr(self.layers["a"], name, value)
        attach(self.layers, PORTABLE, SPEC.dtype, drafts=drafts, **facts)

    def metadata(self, query_lens, seq_lens):
        tokens = sum(query_lens)
        return SimpleNamespace(
            num_actual_tokens=tokens,
            num_decode_tokens=tokens,
            max_query_len=max(query_lens),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            decode=SimpleNamespace(
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
                block_table=torch.tensor([[4, 1], [0, 2], [3, 5]], dtype=torch.int32),
            ),
        )

    def step(self, metadata):
        """vLLM's context of a forward pass over this batch."""
        return forward_pass(self.layers, metadata, torch.arange(metadata.num_actual_tokens))


def attend(name, query):
    """The attention op on `name` inside the forward context that is set."""
    tokens = query.shape[0]
    output = torch.full((tokens, HEADS * VALUE), 7.0).to(SPEC.dtype)
    unused = torch.empty(0)
    runtime._attention(unused, query, unused, unused, output, _encode_layer_name(name))
    return output


def check(engine, metadata, *names):
    """The attention of these layers in one step against its definition."""
    q, decode = query(metadata.num_actual_tokens), metadata.decode
    given = {"q": q, "block_table": decode.block_table, "softmax_scale": Impl.scale}
    rows, lengths = metadata.query_start_loc.diff().tolist(), decode.seq_lens.tolist()
    with engine.step(metadata):
        for name in names:
            layer = engine.layers[name]
            out, _ = definition(given | {"kv_cache": layer.kv_cache}, rows, lengths, LATENT)
            expected = torch.empty((q.shape[0], HEADS * VALUE), dtype=SPEC.dtype)
            layer._v_up_proj(out.to(SPEC.dtype), expected)
            torch.testing.assert_close(attend(name, q), expected, rtol=1e-5, atol=1e-5)


def watch_decodes(monkeypatch, run=True):
    """The named arguments of all decodes from here on, in their order; `run`: they are made."""
    seen, decode = [], attention.persistent_mla_decode

    def watched(*args, **kwargs):
        seen.append(kwargs | {"rows": len(args[0])})
        if run:
            decode(*args, **kwargs)

    monkeypatch.setattr(step_plan.attention, "persistent_mla_decode", watched)
    return seen


def query(tokens):
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn((tokens, HEADS, LATENT + ROPE), generator=generator).to(SPEC.dtype)


@pytest.fixture
def refreshes(monkeypatch):
    """Number of tokens of each refresh."""
    seen = []
    original = step_plan.attention.PersistentDecodePlan.refresh

    def refresh(self, **arguments):
        seen.append(arguments["num_tokens"])
        original(self, **arguments)

    monkeypatch.setattr(step_plan.attention.PersistentDecodePlan, "refresh", refresh)
    return seen


def test_all_layers_of_a_pass_share_one_refresh(refreshes, monkeypatch):
    engine, decodes = Engine(drafts=2), watch_decodes(monkeypatch)
    assert len({state.plan for state in states(engine)}) == 1
    for lengths in (([3, 1, 2], [8, 5, 7]), ([1, 3, 1], [1, 6, 2])):
        check(engine, engine.metadata(*lengths), *engine.layers)
    assert refreshes == [6, 5]
    # The cache of this engine is not fp8, so no result depends on the scales.
    layer, given = engine.layers["a"], decodes[0]
    assert given["q_scale"] == layer._q_scale != given["kv_scale"] == layer._k_scale


def test_lengths_that_grow_in_place_are_seen_by_the_next_pass(refreshes):
    """Drafting runs several forward passes with one metadata object."""
    engine = Engine()
    metadata = engine.metadata([1, 1, 1], [3, 4, 5])
    for _ in range(2):
        check(engine, metadata, "a")
        metadata.decode.seq_lens += 1
    assert len(refreshes) == 2


def test_padded_rows_are_zero():
    """vLLM pads the batch of a CUDA graph with sequences without rows."""
    engine = Engine()
    metadata = engine.metadata([1, 1, 1], [8, 8, 8])
    with engine.step(metadata):
        attend("a", query(3))
    metadata = engine.metadata([1, 0, 0], [4, 0, 0])
    metadata.num_actual_tokens = metadata.num_decode_tokens = 3
    with engine.step(metadata):
        out = attend("a", query(3))
    assert out[0].any() and not out[1:].any()


def test_the_decode_multiplies_with_w_uv_itself(monkeypatch):
    """In bf16: what the layer's own product gives, padded rows included."""
    monkeypatch.setattr(sys.modules[__name__], "SPEC", Spec(dtype=torch.bfloat16))
    engine = Engine(drafts=1)
    layer = engine.layers["a"]
    decodes = watch_decodes(monkeypatch)
    monkeypatch.setattr(layer, "_v_up_proj", Mock(side_effect=AssertionError("called")))
    assert layer_state.epilogues(states(engine)) == "W_UV"
    metadata = engine.metadata([2, 0, 0], [4, 0, 0])
    metadata.num_actual_tokens = metadata.num_decode_tokens = 4
    with engine.step(metadata):
        out = attend("a", query(4))
    assert decodes[0]["epilogue"].w_uv is layer.W_UV and decodes[0]["epilogue"].scale is None
    latents = layer_state.of(layer).plan.out[:4]
    assert latents[:2].any() and not latents[2:].any()
    want = torch.einsum("thl,hlv->thv", latents.double(), layer.W_UV.double()).flatten(1)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-6)
    # The object that vllm#55741 puts in the place of W_UV.
    layer.W_UV = SimpleNamespace(weight=layer.W_UV)
    with engine.step(metadata):
        assert torch.equal(attend("a", query(4)), out)


@pytest.mark.parametrize(
    "change, why",
    [
        ({}, "W_UV is torch.float32, the activations are torch.float32"),
        ({"W_UV": None}, "neither W_UV nor W_UV.weight is a plain tensor"),
        ({"W_UV": torch.zeros(2, 16, 6).bfloat16()}, "W_UV is torch.bfloat16, the activations"),
    ],
)
def test_layers_whose_product_is_their_own(change, why):
    """They are decoded as before, and the report says why."""
    engine = Engine(change=change)
    layer = engine.layers["a"]
    assert why in layer_state.of(layer).facts.plain_output
    assert layer_state.epilogues(states(engine)).startswith(f"none: {why}")
    assert layer_state.epilogues([]) == ""
    called = Mock()
    layer._v_up_proj = called
    metadata = engine.metadata([1, 1, 1], [3, 8, 1])
    with engine.step(metadata):
        attend("a", query(3))
    assert called.call_count == 1


def test_a_warm_up_runs_each_kind_of_w_uv(monkeypatch):
    """Layers that share a plan may have W_UV of other strides, which compile other kernels."""
    monkeypatch.setattr(sys.modules[__name__], "SPEC", Spec(dtype=torch.bfloat16))
    engine = Engine()
    layer = engine.layers["b"]
    layer.W_UV = layer.W_UV.transpose(1, 2).contiguous().transpose(1, 2)
    decodes = watch_decodes(monkeypatch, run=False)
    runtime.warm_up_attention(engine.layers)
    strides = sorted(each["epilogue"].w_uv.stride() for each in decodes)
    assert strides == sorted(layer.W_UV.stride() for layer in engine.layers.values())


@pytest.mark.parametrize(
    "query_lens, causal, error, said",
    [
        ([1, 1, 4], True, AssertionError, "backend's decode was called"),  # longer than a draft
        ([1, 1, 1], False, RuntimeError, "not causal"),
    ],
)
def test_batches_that_the_plan_does_not_serve(query_lens, causal, error, said):
    engine = Engine()
    metadata = engine.metadata(query_lens, [8, 8, 8])
    metadata.causal = causal
    with engine.step(metadata), pytest.raises(error, match=said):
        attend("a", query(sum(query_lens)))


@pytest.mark.parametrize(
    "batches, steps", [(None, [(1, 1), (2, 1)]), ([1, 3], [(1, 1), (3, 3), (2, 1), (6, 3)])]
)
def test_a_warm_up_runs_what_the_provider_asks_for(refreshes, monkeypatch, batches, steps):
    """Batches that compile something else, for a query of one token and for the longest: the plan
    of both layers, and no cache is changed."""
    if batches:
        monkeypatch.setattr(reference, "warm_up_batches", lambda *_: batches)
    decodes, engine = watch_decodes(monkeypatch), Engine(drafts=1)
    before = [layer.kv_cache.clone() for layer in engine.layers.values()]
    runtime.warm_up_attention(engine.layers)
    assert [(each["rows"], len(each["block_table"])) for each in decodes] == steps
    assert refreshes == [rows for rows, _ in steps]
    for layer, cache in zip(engine.layers.values(), before, strict=True):
        assert torch.equal(layer.kv_cache, cache)


def test_a_warm_up_leaves_out_what_has_no_plan_or_no_cache(refreshes):
    engine = Engine()
    setattr(engine.layers["a"], layer_state.ATTRIBUTE, layer_state.LayerState())
    runtime.warm_up_attention(engine.layers)
    assert refreshes == [1]
    engine.layers["b"].kv_cache = torch.empty(0)
    runtime.warm_up_attention(engine.layers)
    assert refreshes == [1]


def test_a_warm_up_that_fails_says_what_to_do(monkeypatch):
    fail = Mock(side_effect=ValueError("planted"))
    monkeypatch.setattr(step_plan.attention, "persistent_mla_decode", fail)
    with pytest.raises(ValueError, match="planted") as caught:
        runtime.warm_up_attention(Engine().layers)
    assert caught.value.__notes__ == [
        "mla_fusion: the persistent decode of reference failed to prepare its kernels. Start "
        'with "attention": "vllm" in additional_config["mla_fusion"].'
    ]


def test_a_draft_of_another_type_has_a_plan_of_its_own():
    engine = Engine(change={"W_UK_T": torch.zeros(HEADS, 8, LATENT).bfloat16()})
    plans = [state.plan for state in states(engine)]
    assert [each.plan.settings.q_dtype for each in plans] == [torch.bfloat16, SPEC.dtype]
    assert [each.out.dtype for each in plans] == [torch.bfloat16, SPEC.dtype]


class AiterMLAImpl(Impl):
    pass


@pytest.mark.parametrize(
    "change, detail",
    [
        ({"sliding_window": 128}, "a sliding window"),
        ({"non_causal_multi_token_decode": True}, "a draft layer without causal mask"),
        ({"impl": AiterMLAImpl(False)},
         "AiterMLAImpl has a persistent plan of its own, and attention=aiter another"),
    ],
)  # fmt: skip
def test_layers_that_are_declined(change, detail):
    layer = Engine(change=change).layers["a"]
    facts = eligibility.facts(layer, "reference", SPEC.dtype, "portable")
    assert facts.decline == Decline("portable-attention", detail)
    auto = eligibility.facts(layer, "reference", SPEC.dtype, planner="portable")
    assert (auto.decline, auto.no_plan) == (None, facts.decline)  # it fuses, and vLLM decodes
    state = layer_state.of(layer)
    assert state.plan is None and state.facts == dataclasses.replace(facts, planner="")


@pytest.mark.parametrize("runs", [((1, 2),), ((1, 1), (4, 4))])
def test_layers_whose_decode_was_measured_in_other_steps_share_no_plan(monkeypatch, runs):
    """With auto a backend of its own gives a layer a range of its own: here a step has three."""
    engine, options = Engine(), Options("reference")
    choices = {"a": Choice("portable", runs, "small"), "b": Choice("portable", ((1, 1), (3, 4)))}
    choose = Mock(side_effect=lambda layer, *_: choices[layer.layer_name])
    monkeypatch.setattr(layer_state, "choose", choose)
    attach(engine.layers, options, SPEC.dtype)
    plans = [state.plan for state in states(engine)]
    assert [each.plan.settings.max_batch for each in plans] == [runs[-1][1], 4]
    step = engine.metadata([1, 1, 1], [5, 8, 3])
    assert [each.serves(step) for each in plans] == [False, True]
    # The report has the choices that were made.
    assert decode_choice.described([s.choice for s in states(engine)], options) == "small"
    assert choose.call_count == 2


def test_a_plan_with_the_entries_of_pages_is_not_that_of_a_backend_that_lists_them(monkeypatch):
    layers = {name: fake_engine.Layer(name, SPEC) for name in ("ROCM_AITER_MLA", "TRITON_MLA", "c")}
    for name, layer in layers.items():
        layer.attn_backend = SimpleNamespace(get_name=lambda name=name: name)
    made, allocate = [], step_plan.attention.PersistentDecodePlan.allocate

    def portable(planner, max_kv_len=None, max_split_per_batch=-1, **arguments):
        made.append(max_kv_len)
        return allocate(ctas=4, **arguments)

    choice = Choice("aiter", ((1, 4),))
    monkeypatch.setattr(layer_state, "choose", lambda *_: choice)
    monkeypatch.setattr(step_plan.attention.PersistentDecodePlan, "allocate", portable)
    attach(layers, PORTABLE, SPEC.dtype, context=64)
    assert made == [None, 64]
