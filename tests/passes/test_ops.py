"""Every custom op passes torch's own checks: schema, fake shapes, mutation, functionalization."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.forward_context import override_forward_context
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import ops
from tests.passes import linears
from tests.passes.fake_engine import Batch, Engine
from tests.passes.graphs import HEADS, LATENT, MAX_POSITION, NOPE, ROPE, Spec, layer_names

SPEC = Spec("native", quantized="group")  # of outputs that groups divide
TOKENS = (0, 1, 3, 17)
ALL = (ops.ROPE_UPDATE, ops.Q_PREP, ops.FUSED, *ops.ATTENTION_OPS, ops.PROJECTION, ops.NORM)


def arguments(name, tokens, rope="native"):
    """Arguments of an op by name, in the order of its schema."""
    torch.manual_seed(tokens)
    rotates = rope != "none"
    values = {
        "q": torch.randn(tokens, HEADS, NOPE + ROPE), "kv_c": torch.randn(tokens, LATENT),
        "k_pe": torch.randn(tokens, 1, ROPE),
        "prepared_q": torch.randn(tokens, HEADS, LATENT + ROPE),
        "positions": torch.arange(tokens) if rotates else None,
        "cos_sin_cache": torch.randn(MAX_POSITION, ROPE) if rotates else None,
        "q_factor": torch.rand(tokens) if rotates else None, "k_scale": torch.tensor(0.5),
        "layer_name": _encode_layer_name(layer_names(SPEC)[0]), "kv_cache_dtype": "auto",
        "rope": rope, "is_neox": False, "provider": "reference", "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE, "query_dtype": torch.float32, "kv_cache_dummy_dep": None,
        "output": torch.zeros(tokens, HEADS * SPEC.value),
        "quantized": torch.zeros(tokens, HEADS * SPEC.value).to(linears.FP8),
        "scales": torch.zeros(tokens, HEADS), "scale": torch.tensor([0.1]),
        "x": torch.randn(tokens, 3 * ROPE)[:, ROPE:],
        "weights": [torch.randn(n, 2 * ROPE) for n in (7, 4)],
        "xs": [*torch.randn(tokens, 3 * ROPE).split([2 * ROPE, ROPE], 1)], "epsilons": [0.1, 1e-6],
        "added": [torch.randn(tokens, 2 * ROPE)] * (2 * rotates),
        "kv_norm_weight": torch.randn(LATENT) if rotates else None, "kv_norm_epsilon": 1e-5,
        "factor": 2.5, "wide": True, "block_scales": None, "e8m0": False,
        "norm_weights": [torch.randn(2 * ROPE), torch.randn(ROPE)],
        "quantization": "native" if name == ops.TENSOR_ATTENTION else str(ops.Quantization.GROUP),
    }  # fmt: skip
    return {each.name: values[each.name] for each in ops.get(name)._schema.arguments}


def batch(tokens, decode_only):
    return Batch(rows=tokens, actual=tokens, decode=tokens if decode_only else tokens // 2)


def fake(name, args):
    """What an op returns for fake tensors."""
    with FakeTensorMode() as mode:
        return ops.get(name)(**tree_map_only(torch.Tensor, mode.from_tensor, args))


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ALL)
def test_invariant_1_real_shape_is_the_fake_shape(name, tokens, decode_only):
    args = arguments(name, tokens)
    with override_forward_context(Engine(SPEC).context(batch(tokens, decode_only))):
        real = ops.get(name)(**args)
    made = fake(name, args)
    if name in (ops.FUSED, *ops.ATTENTION_OPS):  # they write into buffers of the graph
        assert real is made is None
        return
    for one, other in zip(tree_leaves(real), tree_leaves(made), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_invariant_1_query_type_is_the_one_asked_for(dtype):
    made = fake(ops.Q_PREP, {**arguments(ops.Q_PREP, 3), "query_dtype": dtype})
    assert (made.dtype, tuple(made.shape)) == (dtype, (3, HEADS, LATENT + ROPE))


@pytest.mark.parametrize("decode_only", [True, False])
@pytest.mark.parametrize("rope", ["native", "none"])
@pytest.mark.parametrize("name", ALL)
def test_opcheck(name, rope, decode_only):
    tokens = 3
    checks = ["test_autograd_registration", "test_faketensor"]
    # It multiplies what an op writes, which torch cannot do with fp8; the test below compares it.
    if name not in (ops.GROUP_ATTENTION, ops.TENSOR_ATTENTION):
        checks.append("test_schema")
    # Only a decode batch reads the prepared query; otherwise it is undefined, so never equal.
    if decode_only or name != ops.Q_PREP:
        checks.append("test_aot_dispatch_dynamic")
    with override_forward_context(Engine(SPEC).context(batch(tokens, decode_only))):
        torch.library.opcheck(
            ops.get(name), (), arguments(name, tokens, rope), test_utils=tuple(checks)
        )


@pytest.mark.parametrize("name", ALL)
def test_schema_names_what_is_mutated(name):
    """A mixed batch rotates q and k_pe in place; what is not declared changes in no batch."""
    args = arguments(name, 5)
    kept = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    changed = set()
    for decode_only in (False, True):
        with override_forward_context(Engine(SPEC).context(batch(5, decode_only))):
            ops.get(name)(**args)
        changed |= {k for k, v in kept.items() if not torch.equal(args[k].float(), v.float())}
    schema = ops.get(name)._schema
    declared = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert changed == declared
    assert schema.is_mutable is bool(declared)


def test_ops_are_registered_once():
    with pytest.raises(RuntimeError, match="use one vLLM configuration per process"):
        ops.register("some.OtherType", {})
