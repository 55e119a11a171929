"""The attention ops that quantize their output, with a plan: by the epilogue, or as vLLM does.

The layers, the plan and the formula of the attention are those of test_step_plan.py.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import ops, runtime
from mla_fusion.attention.plan.epilogue import in_groups
from mla_fusion.ops import Quantization
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.passes.pipeline import MLAFusionPass
from mla_fusion.runtime import layer_state
from mla_fusion.runtime.output import QuantizedOutput
from tests import test_step_plan
from tests.attention.decodes import definition
from tests.passes import fake_engine, linears
from tests.passes.graphs import HEADS, LATENT, NOPE, ROPE, Spec, build
from tests.prepared import attach

WIDTH = HEADS * linears.GROUP
SPEC = Spec(dtype=torch.bfloat16, quantized="group")
SPELLINGS = {
    "rows": (Quantization.GROUP, lambda t: torch.full((t, 2), 7.0)),
    "columns": (Quantization.GROUP, lambda t: torch.full((2, t), 7.0).T),
    "aligned columns": (Quantization.GROUP, lambda t: torch.full((2, -(-t // 4) * 4), 7.0).T[:t]),
    "powers of two": (Quantization.GROUP_UE8M0, lambda t: torch.full((2, t + -t % 4), 7.0).T[:t]),
    "tensor": (Quantization.TENSOR, lambda t: torch.tensor(0.02)),
    "native": (Quantization.TENSOR_NATIVE, lambda t: torch.tensor([[0.02]])),
}


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(test_step_plan, "SPEC", SPEC)
    return test_step_plan.Engine(drafts=1)


def unwritten(rows, spelling):
    """Buffers for `rows` rows, every byte of the values 0x7f, which is NaN."""
    quantization, scales = SPELLINGS[spelling]
    values = torch.full((rows, WIDTH), 0x7F, dtype=torch.uint8).view(linears.FP8)
    return QuantizedOutput(values, scales(rows), quantization)


def attend(rows, spelling, q=None):
    """The registered op on layer a; (what it wrote, its workspace)."""
    out = unwritten(rows, spelling)
    workspace = torch.full((rows, WIDTH), 7.0).to(SPEC.dtype)
    zeros = torch.zeros(rows, HEADS * (NOPE + ROPE)).to(SPEC.dtype)
    q = zeros.view(rows, HEADS, -1) if q is None else q
    grouped = in_groups(out.spelling.kind)
    ops.get(ops.GROUP_ATTENTION if grouped else ops.TENSOR_ATTENTION)(
        q, test_step_plan.query(rows).to(SPEC.dtype), zeros[:, :LATENT], zeros[:, None, :ROPE],
        workspace, _encode_layer_name("a"), out.values, out.scale, str(out.spelling),
    )  # fmt: skip
    return out, workspace


def vllms(product, spelling):
    """What vLLM's quantization makes of the whole `product`."""
    wanted = unwritten(len(product), spelling)
    values, scale = wanted.values, wanted.scale
    if in_groups(wanted.spelling.kind):
        ue8m0 = wanted.spelling == Quantization.GROUP_UE8M0
        linears.group_quantize(product, values, scale, 128, 1e-10, -448.0, 448.0, ue8m0, True, True)
    else:
        linears.static_quantize(values, product, scale)
    return wanted


def assert_equal(found, wanted, rows):
    """The first `rows` rows to the bit, and zeros behind them."""
    for name in ("values", "scale"):
        a, b = getattr(found, name), getattr(wanted, name)
        if name == "scale" and not in_groups(found.spelling.kind):
            assert torch.equal(a, b)
            continue
        assert torch.equal(a[:rows].float(), b[:rows].float())
        assert not a[rows:].float().any()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("rows", [4, 6])
def test_a_decode_quantizes_in_its_epilogue(engine, spelling, rows, monkeypatch):
    """Equal to vLLM's quantization of the product, padding in zeros, the workspace unwritten."""
    layer = engine.layers["a"]
    monkeypatch.setattr(layer, "_v_up_proj", None)
    decodes = test_step_plan.watch_decodes(monkeypatch)
    metadata = engine.metadata([2, 1, 1], [5, 8, 3])
    with engine.step(metadata):
        found, workspace = attend(rows, spelling)
    assert [each["epilogue"].quantization for each in decodes] == [found.spelling.kind]
    latents = layer_state.of(layer).plan.out[:4]
    assert latents.any()
    product = torch.bmm(latents.transpose(0, 1), layer.W_UV).transpose(0, 1).reshape(4, WIDTH)
    monkeypatch.undo()
    assert_equal(found, vllms(product, spelling), 4)
    assert bool((workspace == 7).all())
    assert bool((found.values[:4].float() != 0).any(1).all())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_layer_without_an_epilogue_is_quantized_as_by_vllm(monkeypatch, spelling):
    """W_UV is packed, and the graph quantizes all the same."""

    def v_up_proj(x, out):
        out.copy_(x.flatten(1).repeat(1, WIDTH // (HEADS * LATENT)))

    monkeypatch.setattr(test_step_plan, "SPEC", SPEC)
    engine = test_step_plan.Engine(change={"W_UV": None, "_v_up_proj": v_up_proj})
    metadata = engine.metadata([1, 1, 1], [5, 8, 3])
    with engine.step(metadata):
        found, workspace = attend(3, spelling)
    assert not (workspace == 7).any(1).all()
    assert_equal(found, vllms(workspace, spelling), 3)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_queries_longer_than_the_plan_are_decoded_by_the_backend(engine, spelling, monkeypatch):
    layer = engine.layers["a"]
    attended = torch.randn(5, HEADS, LATENT).to(SPEC.dtype)
    monkeypatch.setattr(layer.impl, "forward_mqa", lambda *args: (attended, None))
    metadata = engine.metadata([3, 1, 1], [5, 8, 3])
    with engine.step(metadata):
        found, workspace = attend(5, spelling)
    wanted = torch.empty_like(workspace)
    layer._v_up_proj(attended, out=wanted)
    assert torch.equal(workspace, wanted)
    assert_equal(found, vllms(wanted, spelling), 5)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("profile", [False, True])
def test_any_other_batch_is_vllms_to_the_bit(engine, spelling, profile, monkeypatch):
    """A mixed batch, with a row of padding, and the profile run."""
    layer = engine.layers["a"]
    monkeypatch.setattr(
        fake_engine.Impl, "forward_mqa", lambda _, q, *__: (q[..., :LATENT].contiguous(), None)
    )
    monkeypatch.setattr(layer, "impl", fake_engine.Impl(False))
    slots, metadata = {}, None
    if not profile:
        slots = {"a": torch.arange(5)}
        metadata = SimpleNamespace(num_actual_tokens=5, num_decode_tokens=2, slots=slots["a"])
    layers = dict(engine.layers)
    context = ForwardContext(layers, attn_metadata={"a": metadata}, slot_mapping=slots)
    q = torch.randn(6, HEADS, NOPE + ROPE).to(SPEC.dtype)
    with override_forward_context(context):
        found, workspace = attend(6, spelling, q)
    wanted = torch.full((6, WIDTH), 7.0).to(SPEC.dtype)
    zeros = torch.zeros(6, LATENT).to(SPEC.dtype), torch.zeros(6, 1, ROPE).to(SPEC.dtype)
    layer.forward_impl(q, *zeros, layer.kv_cache, metadata, output=wanted)
    assert torch.equal(workspace, wanted)
    assert_equal(found, vllms(wanted, spelling), 6)


def test_a_warm_up_runs_each_kind_of_output(engine, monkeypatch):
    """Those of the report, for layers that can have them."""
    decodes = test_step_plan.watch_decodes(monkeypatch, run=False)

    def kinds():
        found = [each["epilogue"] for each in decodes]
        decodes.clear()
        return ["own" if epilogue is None else epilogue.quantization for epilogue in found]

    layers = {"a": engine.layers["a"]}
    runtime.warm_up_attention(layers, {"none", "group", "group_ue8m0", "tensor"})
    # Queries of one and of two tokens.
    assert sorted(kinds()) == sorted(["group", "group_ue8m0", "none", "tensor"] * 2)
    layer = layers["a"]
    layer.v_head_dim, layer.W_UV = 80, layer.W_UV[..., :80].contiguous()
    runtime.warm_up_attention(layers, {"group", "group_ue8m0"})
    assert kinds() == ["none", "none"]
    layer.W_UV, layer._v_up_proj = layer.W_UV.float(), lambda x, out: None
    attach(layers, test_step_plan.PORTABLE, SPEC.dtype, drafts=1)
    runtime.warm_up_attention(layers, {"tensor"})
    assert kinds() == ["own", "own"]


def test_with_auto_the_pass_asks_who_decodes_the_layer(engine):
    """The choice was made when the model was loaded; the graph knows it from the layer."""
    layer, planned = engine.layers["a"], MLAFusionPass("reference", 4)
    assert planned._facts(layer, SPEC.dtype).plain_output == ""
    setattr(layer, layer_state.ATTRIBUTE, layer_state.LayerState())
    assert planned._facts(layer, SPEC.dtype).plain_output == "vLLM's backend decodes"


class Causal(fake_engine.Impl):
    """A backend that decodes as a plan does."""

    scale = 0.3

    def forward_mqa(self, q, kv_cache, metadata, layer):
        given = {"q": q, "kv_cache": kv_cache, "softmax_scale": self.scale}
        given["block_table"] = metadata.decode.block_table[: len(q)]
        lengths = metadata.decode.seq_lens[: len(q)].tolist()
        return definition(given, [1] * len(q), lengths, LATENT)[0].to(q.dtype), None


class PlannedEngine(fake_engine.Engine):
    """Every token is a sequence that ends at its slot; layers have a plan."""

    def __post_init__(self):
        super().__post_init__()
        for layer in self.layers.values():
            layer.impl = Causal(False)
        attach(self.layers, test_step_plan.PORTABLE, self.spec.dtype, sequences=8)

    def context(self, batch):
        made = super().context(batch)
        for metadata in {id(m): m for m in made.attn_metadata.values()}.values():
            if metadata is not None:
                slots = metadata.slots[: batch.decode].clamp(min=0)
                metadata.max_query_len = 1
                metadata.query_start_loc = torch.arange(batch.decode + 1, dtype=torch.int32)
                metadata.decode = SimpleNamespace(
                    seq_lens=(slots % fake_engine.BLOCK_SIZE + 1).int(),
                    block_table=(slots // fake_engine.BLOCK_SIZE).int()[:, None],
                )
        return made


@pytest.mark.parametrize("name", linears.FUSED)
def test_the_passes_and_the_ops_agree(name, monkeypatch):
    """A graph of two layers as vLLM runs it, before and after all passes, with plans attached."""
    monkeypatch.setattr(fake_engine, "Engine", PlannedEngine)
    spec = Spec("nope", dtype=torch.bfloat16, quantized=name, layers=2)
    module = build(spec)
    assert fake_engine.fuse(module, spec).outputs == {linears.kind(name): 2}
    MLAFixFunctionalizationPass()(module.graph)
    for kind in ("decode", "padded", "mixed", "prefill", "profile"):
        batch = fake_engine.BATCHES[kind]
        before = fake_engine.run(build(spec), spec, batch)
        after = fake_engine.run(module, spec, batch)
        after.queries = before.queries  # a plan records none
        # The decode's order of sums: a step of 2**-3 of one fp8 value, in a sum of 256 products.
        tolerance = 0.05 if batch.decode_only else None
        fake_engine.assert_same(before, after, batch, tolerance=tolerance)
