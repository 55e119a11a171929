"""What the ops do in a step, called one by one on the layers of the fake engine."""

import functools
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import runtime
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import reference
from mla_fusion.ops import Rope
from mla_fusion.report import Variant
from mla_fusion.runtime import layer_state, step_plan, tables
from tests.passes.fake_engine import DECODE, MIXED, Batch, Engine, Layer
from tests.passes.graphs import HEADS, LATENT, MAX_POSITION, NOPE, ROPE, VALUE, Spec, layer_names

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SPEC = Spec("native", dtype=BF16, table_dtype=torch.float32)
NAME = layer_names(SPEC)[0]


def step(tokens, seed=0):
    """Arguments of the fused op for bf16 activations and an fp32 table."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(BF16)

    return {
        "q": random(tokens, HEADS, NOPE + ROPE),
        "kv_c": random(tokens, LATENT),
        "k_pe": random(tokens, 1, ROPE),
        "positions": torch.randint(0, MAX_POSITION, (tokens,), generator=generator),
        "cos_sin_cache": torch.randn((MAX_POSITION, ROPE), generator=generator),
        "q_factor": None,
        "k_scale": torch.tensor(0.5),
        "layer_name": _encode_layer_name(NAME),
        "kv_cache_dtype": "auto",
        "rope": Rope.NATIVE,
        "is_neox": False,
    }


def prepare(context, args):
    """The prepared query of a step; NaN where the op writes nothing."""
    prepared = torch.full((len(args["q"]), HEADS, LATENT + ROPE), torch.nan, dtype=BF16)
    with override_forward_context(context):
        runtime.fused_decode_prep(**args, prepared_q=prepared, provider="reference")
    return prepared


def attend(context, args, prepared):
    """The attention's output of a step."""
    output = torch.full((len(prepared), HEADS * VALUE), torch.nan, dtype=BF16)
    q, kv_c, k_pe, name = (args[key] for key in ("q", "kv_c", "k_pe", "layer_name"))
    with override_forward_context(context):
        runtime._attention(q, prepared, kv_c, k_pe, output, name)
    return output


@pytest.mark.parametrize(
    "actual, decode, expected",
    [(0, 0, False), (1, 1, True), (3, 3, True), (3, 2, False), (3, 0, False)],
)
def test_decode_only(actual, decode, expected):
    metadata = SimpleNamespace(num_actual_tokens=actual, num_decode_tokens=decode)
    assert runtime.is_decode_only(metadata) is expected
    assert not runtime.is_decode_only(None)  # the profile run


def test_without_slots_every_op_takes_the_path_of_vllm(monkeypatch):
    """Else the attention would read a query that nobody prepared."""
    engine = Engine(SPEC)
    context = engine.context(DECODE)
    context.slot_mapping = {}
    args = step(5) | {"rope": Rope.NONE, "positions": None, "cos_sin_cache": None}
    prepared = prepare(context, args)
    assert prepared.isnan().all()
    with override_forward_context(context), monkeypatch.context() as patch:
        patch.setattr(engine.layers[NAME], "W_UK_T", None)  # no product could be computed
        runtime.decode_q_prep(args["q"], args["layer_name"], LATENT, ROPE, BF16)
    assert not attend(context, args, prepared).isnan().any()


@pytest.mark.parametrize("rope", [Rope.NATIVE, Rope.NATIVE_FP32])
def test_cosines_are_rounded_where_the_graph_rounds_them(rope):
    """To the bit, in the decode step and in a mixed one."""
    args = step(5) | {"rope": rope}
    table = args["cos_sin_cache"]
    if rope is Rope.NATIVE:
        table = table.to(BF16)
    prepared = prepare(Engine(SPEC).context(DECODE), args)
    rotated = reference.rotate(args["q"][..., NOPE:], args["positions"], table, False).to(BF16)
    assert torch.equal(prepared[..., LATENT:], rotated)
    with override_forward_context(Engine(SPEC).context(MIXED)):
        runtime.rope_and_cache_update(**args)
    assert torch.equal(args["q"][..., NOPE:], rotated)


@pytest.mark.parametrize("factor_type", [torch.float32, BF16])
@pytest.mark.parametrize("rope", [Rope.NONE, Rope.NATIVE])
def test_a_scaled_query_is_rounded_as_in_vllm(rope, factor_type):
    """To the bit: after its rotation, and again after `q *= factor`; the key is not scaled."""
    args = step(5) | {"rope": rope, "q_factor": (torch.rand(5) + 1).to(factor_type)}
    if rope is Rope.NONE:
        args |= {"positions": None, "cos_sin_cache": None}
    q, k_pe = args["q"].clone(), args["k_pe"].clone()
    if rope is Rope.NATIVE:
        table = args["cos_sin_cache"].to(BF16)
        for x in (q[..., NOPE:], k_pe):
            x.copy_(reference.rotate(x, args["positions"], table, False))
    q *= args["q_factor"][:, None, None]
    engine = Engine(SPEC)
    prepared = prepare(engine.context(DECODE), args)
    absorbed = reference.absorb(q[..., :NOPE], engine.layers[NAME].W_UK_T)
    assert torch.equal(prepared, torch.cat((absorbed, q[..., NOPE:]), dim=-1))
    prepare(Engine(SPEC).context(MIXED), args)
    assert torch.equal(args["q"], q)
    assert torch.equal(args["k_pe"], k_pe)


def test_a_table_is_converted_once():
    one, other = torch.randn(4, ROPE), torch.randn(4, ROPE)
    in_type = functools.partial(tables.in_type, {})
    first = in_type(one, Rope.NATIVE, BF16)
    assert torch.equal(first, one.to(BF16))
    assert in_type(one, Rope.NATIVE, BF16) is first
    assert torch.equal(in_type(other, Rope.NATIVE, BF16), other.to(BF16))
    assert torch.equal(in_type(one, Rope.NATIVE, torch.float16), one.half())
    assert in_type(one, Rope.NATIVE_FP32, BF16) is one
    assert in_type(one, Rope.NATIVE, torch.float32) is one
    converted = one.to(BF16)
    assert in_type(converted, Rope.NATIVE, BF16) is converted


def test_views_of_one_address_are_other_tables():
    whole, kept = torch.randn(4, 2 * ROPE), {}
    for view in (whole, whole[:, :ROPE], whole[:2], whole.view(8, ROPE), whole[::2, :ROPE]):
        assert torch.equal(tables.in_type(kept, view, Rope.NATIVE, BF16), view.to(BF16))


@pytest.mark.parametrize("inference", [False, True])
def test_a_table_follows_its_source_in_place(inference):
    """At the address that a captured graph has."""
    source, kept = torch.randn(4, ROPE), {}
    first = tables.in_type(kept, source.view(4, ROPE), Rope.NATIVE, BF16)
    address = first.data_ptr()
    for _ in range(2):
        with torch.inference_mode(inference):
            source.mul_(-1)
        again = tables.in_type(kept, source, Rope.NATIVE, BF16)
        assert again.data_ptr() == address and torch.equal(again, source.to(BF16))
    with torch.inference_mode():
        assert tables.in_type(kept, torch.zeros(4, ROPE), Rope.NATIVE, BF16).dtype == BF16


def test_an_engine_owns_its_tables():
    """Its layers share them, those of another engine do not; they go with the layers."""
    spec = Spec("native", layers=3)
    one, other = Engine(spec), Engine(spec)
    source = torch.randn(4, ROPE)

    def kept(engine):
        with override_forward_context(engine.context(MIXED)):
            kept = [layer_state.of(layer).tables for layer in engine.layers.values()]
            return [tables.in_type(each, source, Rope.NATIVE, BF16) for each in kept]

    first, *rest = kept(one)
    assert all(table is first for table in rest)
    assert not any(table is first for table in kept(other))
    held = weakref.ref(first)
    del one, first, rest
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_rows_without_a_slot_are_zero(slots):
    """vLLM passes fewer slots than there are rows; heads are 2."""
    batch = Batch(rows=5, actual=slots, decode=slots, slots=slots)
    prepared = prepare(Engine(SPEC).context(batch), step(5))
    assert prepared[slots:].eq(0).all()
    assert prepared[:slots].ne(0).any(-1).all() and not prepared.isnan().any()


def test_query_preparation_casts_with_the_layers_scale():
    spec = Spec("nope", dtype=BF16, kv_cache_dtype="fp8")
    engine, q = Engine(spec), step(5)["q"]
    with override_forward_context(engine.context(DECODE)):
        out = runtime.decode_q_prep(q, _encode_layer_name(NAME), LATENT, ROPE, FP8)
    layer = engine.layers[NAME]
    both = torch.cat((reference.absorb(q[..., :NOPE], layer.W_UK_T), q[..., NOPE:]), dim=-1)
    want = reference.cast(both, FP8, layer._q_scale)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))


def test_vllms_fused_rope_op_gets_its_own_shapes_and_the_scale(monkeypatch):
    seen: dict[str, Any] = {}

    def record(positions, q_pe, k_pe, kv_c, *rest):
        seen.update(q_pe=q_pe, k_pe=k_pe, scale=rest[-1])

    monkeypatch.setattr("vllm._custom_ops.concat_and_cache_mla_rope_fused", record)
    args = step(5) | {"rope": Rope.CAT_FUSED}
    with override_forward_context(Engine(SPEC).context(MIXED)):
        runtime.rope_and_cache_update(**args)
    assert seen["q_pe"].shape == (5, HEADS, ROPE)
    assert seen["k_pe"].shape == (5, ROPE)
    assert seen["scale"] is args["k_scale"] or torch.equal(seen["scale"], args["k_scale"])


@pytest.mark.parametrize("shape", [(3, 4, 10), (3, 1, 4, 10), (1, 1, 4, 10), (3, 1, 10)])
def test_cache_with_and_without_a_head_dimension(shape):
    """The dimension of three is that of the entries of a block, also of one entry."""
    cache = torch.randn(shape)
    plain, fp8 = (SimpleNamespace(kv_cache_dtype=each) for each in ("auto", "fp8"))
    view = step_plan.cache_view(plain, cache)
    assert view.shape == (shape[0], *shape[-2:])
    assert view.data_ptr() == cache.data_ptr()
    assert step_plan.cache_view(fp8, cache.view(torch.uint8)).dtype is FP8


VARIANTS = (
    Variant(False, ROPE, "bfloat16", "bfloat16", "auto"),
    Variant(True, ROPE, "", "float8_e4m3fn", "fp8", "float32", 1e-5),
)


class TestWarmUp:
    @pytest.fixture
    def calls(self, monkeypatch):
        """What the provider was asked to prepare: a batch of one row, and the most tokens."""
        seen: list[Any] = []

        def warmup(batch, max_tokens, progress):
            seen.append((batch(1), max_tokens))

        monkeypatch.setattr(reference, "warmup", warmup, raising=False)
        return seen

    def test_every_variant_on_one_layer_of_each_shape(self, calls):
        layers: dict[str, Any] = dict(Engine(Spec("native", dtype=BF16, layers=3)).layers)
        odd = Layer("model.layers.9.attn", Spec("native", dtype=BF16, kv_cache_dtype="fp8"))
        bound = Layer("unbound", SPEC)
        bound.kv_cache = torch.empty(0)
        first = layers["model.layers.0.attn"]
        other = Layer("model.layers.8.attn", SPEC)  # of a draft model, say
        other.qk_rope_head_dim = 2 * ROPE
        layers = {"unbound": bound, "other": other, **layers, "odd": odd}
        runtime.warm_up(layers, VARIANTS, "reference", 4)
        used = zip(VARIANTS, (first, odd), calls, strict=True)
        for variant, layer, (row, max_tokens) in used:
            assert row.w_uk_t is layer.W_UK_T
            assert row.kv_cache.data_ptr() == layer.kv_cache.data_ptr()
            assert row.kv_cache.dtype is (FP8 if layer is odd else BF16)
            assert row.k_scale is layer._k_scale and row.q_scale is layer._q_scale
            assert (row.k_pe.shape[1], row.is_neox) == (ROPE, variant.is_neox)
            assert row.q_out.dtype is getattr(torch, variant.query_dtype)
            assert max_tokens == 4
            factor = row.q_factor
            assert (row.kv_norm_weight is None) is (variant.kv_norm_epsilon is None)
            assert row.kv_norm_epsilon == (variant.kv_norm_epsilon or 0)
            if variant.factor_dtype:
                assert (factor.shape, factor.dtype) == ((1,), torch.float32)
            else:
                assert factor is None
            table = row.cos_sin_cache
            if variant.table_dtype:
                assert (table.shape, table.dtype) == ((1, ROPE), BF16)
                assert table.device == row.w_uk_t.device
            else:
                assert table is None

    def test_every_form_and_shape_of_the_weight(self, calls):
        layers = {name: Layer(f"model.layers.{name}.attn", SPEC) for name in "0123"}
        layers["2"].W_UK_T = torch.zeros((2 * HEADS, NOPE, LATENT), dtype=BF16)
        packed = layers["3"]
        del packed.W_UK_T
        packed.is_aiter_triton_fp8_bmm_enabled = True
        packed.W_K, packed.W_K_scale = torch.zeros(HEADS, LATENT, NOPE, dtype=FP8), torch.ones(())
        runtime.warm_up(layers, VARIANTS[:1], "reference", 4)
        plain, wide, last = (row.w_uk_t for row, _ in calls)
        assert plain is layers["0"].W_UK_T and wide is layers["2"].W_UK_T
        assert last.kind == "fp8" and last.weight is packed.W_K
        assert last.shape == plain.shape

    def test_the_operator_reads_what_is_prepared(self, monkeypatch, capsys):
        """Before it is done: AITER may end the process. Of all ranks the first one says it."""
        seen: list[str] = []

        def warmup(*args, progress, **kwargs):
            for what in ("compiling 1 of 2", "compiling 2 of 2"):
                progress(what)
                seen.append(capsys.readouterr().err)

        monkeypatch.setattr(reference, "warmup", warmup, raising=False)
        runtime.warm_up(Engine(SPEC).layers, VARIANTS[:1], "reference", 4)
        assert seen == ["compiling 1 of 2\n", "compiling 2 of 2\n"]
        monkeypatch.setattr(vllm_compat, "is_first_rank", lambda: False)
        runtime.warm_up(Engine(SPEC).layers, VARIANTS[:1], "reference", 4)
        assert seen[2:] == ["", ""]
