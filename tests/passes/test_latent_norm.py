"""Pass 8: the norm of the latents goes into the fused op, or stays with a reason."""

import pytest
import torch

from mla_fusion import ops
from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from mla_fusion.passes.latent_norm import MLALatentNormFusionPass
from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, fuse, run
from tests.passes.graphs import EPSILON, Spec, build, find, find_all, printed, state
from tests.passes.numbered import after_pass

aten = torch.ops.aten
BF16, FP16 = torch.bfloat16, torch.float16
FUSED = f"{ops.NAMESPACE}::{ops.FUSED}"
IR = "vllm_ir::rms_norm"
SPECS = [
    Spec("nope", dtype=BF16), Spec("nope", dtype=BF16, norm="ir"),
    Spec("nope", dtype=FP16, norm="ir", q_lora=True, layers=2),
    Spec("nope", dtype=BF16, norm="ir", kv_cache_dtype="fp8", dynamic=False),
]  # fmt: skip


def _latents(module):
    """kv_c of the attention, normalized."""
    return edits.attention(module).kwargs["kv_c_normed"]


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_norm_goes_in_and_rounds_as_before(spec):
    """Every kind of batch, to the bit; nothing of the norm is left, nor a copy."""
    module = build(spec)
    record = fuse(module, spec)
    assert (record.fused, record.plain_norms) == (spec.layers, {})
    assert len(find_all(module, aten.rsqrt.default)) == spec.layers * spec.q_lora
    assert not find_all(module, IR)
    for fused in find_all(module, FUSED):
        assert fused.kwargs["kv_norm_epsilon"] == EPSILON
    MLAFixFunctionalizationPass()(module.graph)
    assert not find_all(module, aten.clone.default)
    for batch in BATCHES.values():
        assert_same(run(build(spec), spec, batch), run(module, spec, batch), batch)


def _computed_weight(module):
    node = _latents(module)
    twice = edits.add(module, node, aten.add.Tensor, edits.node_named(module, "gain_0"), 1.0)
    node.replace_input_with(edits.node_named(module, "gain_0"), twice)


def _of_a_part(module):
    node = _latents(module)
    node.args = (*node.args[:3], 4)


def _without_metadata(module):
    del _latents(module).args[0].meta["val"]


def _not_of_a_split(module):
    """k_pe and the latents are slices of one value: the op would write what it reads."""
    node = _latents(module)
    [split] = {n for n in find_all(module, aten.split_with_sizes.default) if len(n.args[1]) == 2}
    node.args = (
        edits.add(module, node, aten.slice.Tensor, split.args[0], 1, 0, 16),
        *node.args[1:],
    )


def _read_twice(module):
    edits.read_also(module, _latents(module))


def _read_before(module):
    """Something reads the latents in front of the fused op, and the graph returns it."""
    node = _latents(module)
    edits.also_return(module, edits.add(module, node.next, aten.neg.default, node))


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(
    "edit, reason",
    [
        (_computed_weight, "norm-form"), (_of_a_part, "norm-form"),
        (_without_metadata, "norm-form"), (_not_of_a_split, "norm-form"),
        (_read_twice, "norm-shared"), (_read_before, "norm-shared"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)  # fmt: skip
def test_a_norm_stays_and_the_layer_fuses(edit, reason):
    spec = Spec("nope", dtype=BF16, norm="ir")
    module, before = build(spec), build(spec)
    for each in (module, before):
        edit(each)
    record = fuse(module, spec)
    assert (record.fused, [d.code for d in record.plain_norms]) == (1, [reason])
    assert len(find_all(module, IR)) == 1
    assert find(module, FUSED).kwargs["kv_norm_weight"] is None
    MLAFixFunctionalizationPass()(module.graph)
    for batch in BATCHES.values():
        assert_same(run(before, spec, batch), run(module, spec, batch), batch)


def test_a_dead_reader_is_none():
    spec = Spec("nope", norm="ir")
    module = build(spec)
    edits.add(module, module.graph.output_node(), aten.neg.default, _latents(module))
    assert fuse(module, spec).plain_norms == {}


def test_a_provider_that_takes_no_norm():
    module = after_pass(4, Spec("nope", norm="ir"))
    module.graph.eliminate_dead_code()
    before = state(module.graph)
    [decline] = MLALatentNormFusionPass("aiter")(module.graph).declined
    assert decline.code == "norm-provider"
    assert state(module.graph) == before


def test_the_pass_alone_and_twice():
    spec = Spec("nope", norm="ir", layers=2)
    module = build(spec)
    assert len(find_all(module, IR)) == 2
    fuse(module, spec)
    before = printed(module)
    again = MLALatentNormFusionPass("reference")(module.graph)
    assert (again.rewritten, again.declined, printed(module)) == ({}, [], before)
