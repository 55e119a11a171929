"""The property tests find bugs: each one planted here must make them fail."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import Phase, given, settings

from mla_fusion import ops, runtime
from mla_fusion.kernels import arithmetic, reference
from mla_fusion.passes import canonicalize, fix_functionalization, lift, output
from mla_fusion.patterns import memory, native, output_quantization, probe, rows, scaling
from mla_fusion.patterns.site import arguments, outputs
from mla_fusion.runtime import output as runtime_output
from tests import tally
from tests.passes import test_fuzz, test_fuzz_batches
from tests.passes.graphs import NOPE

pytestmark = pytest.mark.nightly

# No search for the smallest example: that there is one is the point.
FIRST = settings(max_examples=5000, phases=[Phase.generate])


def finds_a_bug(test, cases):
    """Whether a property test fails, of 5,000 examples."""
    try:
        FIRST(given(**cases)(test.hypothesis.inner_test))()
    except Exception:  # noqa: BLE001  whatever the bug makes of it
        return True
    return False


@pytest.fixture(autouse=True)
def uncounted(monkeypatch, plain_kernels):
    """Nothing is counted."""
    monkeypatch.setattr(tally, "add", lambda *args, **counts: None)
    test_fuzz_batches.compiled.cache_clear()


def _flipped(*args):
    verdict = _judge(*args)
    return None if verdict is None else not verdict


_judge = native._judge
_prep = reference.fused_mla_decode_prep


def _any_group(node):
    """Arguments are not compared."""
    args = arguments(node)
    buffers = [args["output_q"], args["output_s"]]
    values, scales = outputs(node, 1), outputs(node, 2)
    return output_quantization.OutputQuantization(
        ops.Quantization.GROUP, node, values, None, scales, buffers
    )


# Scales are computed without rounding.
_NOT_ROUNDED = {each.name: each for each in ops.Quantization} | {
    "GROUP_UE8M0": ops.Quantization.GROUP
}


_readers = output_quantization._readers

# name -> (where, what, the bug), or several
IN_GRAPHS = {
    "an old value that is read later": (fix_functionalization, "_read_later", lambda *a: False),
    "aliases by a list of names": [
        (memory, "_shown", lambda n: n.all_input_nodes if n.target in probe.VIEWS else []),
        (memory, "_storages", lambda node: ()),
    ],
    "rows behind the third": (rows, "mixing", lambda interior: None),
    "a scale of three magnitudes": [
        (output_quantization, "_takes_reciprocal", lambda *a: True),
        (output_quantization, "_SCALES", (0.01, 0.7, 3.0)),
    ],
    "a cache write in front of the quantization": (output, "_check_cache", lambda *a: None),
    "a cache write in front of the attention": (canonicalize, "_check_order", lambda site: None),
    "a slice put back into another value": (
        fix_functionalization, "same_view", lambda a, b: True
    ),
    "anything is a rotation": (probe, "same", lambda a, b: a.shape == b.shape),
    "NeoX for GPT-J": (native, "_judge", _flipped),
    "a slice that is put back elsewhere": (fix_functionalization, "_normal", lambda place: ()),
    "a call that pass 2 left is lifted": (
        lift, "made_by", lambda q: f"{ops.NAMESPACE}::{ops.ROPE_UPDATE}"
    ),
    "a cast that loses precision": (probe, "_keeps_precision", lambda *a: True),
    "a factor of each head or channel": (scaling, "_factors", lambda node, query: node),
    "any product with a factor": (scaling, "_is_the_product", lambda *a: True),
    "any quantization in aten ops": (output_quantization, "_is_formula", lambda *a: True),
    "any scales of groups": (output_quantization, "_OPS", {
        **output_quantization._OPS, "_C::per_token_group_fp8_quant": _any_group
    }),
    "scales that are powers of two as others": (
        output_quantization, "Quantization", SimpleNamespace(**_NOT_ROUNDED)
    ),
    "an output that something else reads": (
        output_quantization, "_readers", lambda node: _readers(node)[:1]
    ),
    "no metadata is missed": (output_quantization, "_shape", lambda node: []),
}  # fmt: skip


@pytest.mark.parametrize("bug", IN_GRAPHS)
def test_graphs(bug, monkeypatch):
    planted = IN_GRAPHS[bug]
    for patch in planted if isinstance(planted, list) else [planted]:
        monkeypatch.setattr(*patch)
    assert finds_a_bug(test_fuzz.test_edited_graphs_compute_the_same, test_fuzz.CASES)


def _writes_row_without_slot(inputs):
    """Slot -1 is the last entry of the cache, as in Python."""
    result = _prep(inputs)
    if (inputs.slot_mapping < 0).any():
        inputs.kv_cache.view(torch.uint8)[-1, -1] = 0
    return result


def _wrong_slots(inputs):
    slots = inputs.slot_mapping
    return _prep(
        inputs._replace(slot_mapping=torch.where(slots >= 0, slots.roll(1).clamp(min=0), slots))
    )


def _wrong_fp8_query(inputs):
    """Seen in the query only: outputs of rounded queries are not compared."""
    q_out = _prep(inputs)
    if q_out.dtype is torch.float8_e4m3fn:
        q_out.copy_((q_out.float() * 1.5).to(q_out.dtype))
    return q_out


def _unscaled(columns):
    """The factor is not applied to some columns of the query."""

    def scale(inputs):
        if inputs.q_factor is None:
            return _prep(inputs)
        q = inputs.q.clone()
        q[..., columns] /= inputs.q_factor.to(q.dtype)[:, None, None]
        return _prep(inputs._replace(q=q))

    return scale


def _scaled_key(inputs):
    if inputs.q_factor is None:
        return _prep(inputs)
    k_pe = inputs.k_pe * inputs.q_factor.to(inputs.k_pe.dtype)[:, None]
    return _prep(inputs._replace(k_pe=k_pe))


def _part_scaled(q, factor, out=None):
    """In place, of the part that is not rotated only."""
    return _scale(q[..., :NOPE], factor, out=q[..., :NOPE])


_scale = arithmetic.scale


def _unquantized(self, output):
    """Only the first rows of a batch that is not decode-only."""
    _quantize(type(self)(self.values[:1], self.scale, self.spelling), output[:1])


_quantize = runtime_output.QuantizedOutput.quantize

IN_BATCHES = {
    "a mixed batch taken for decode": (
        runtime, "is_decode_only", lambda step: step is not None and step.num_decode_tokens > 0
    ),
    "a row without a slot is written": (
        reference, "fused_mla_decode_prep", _writes_row_without_slot
    ),
    "rows in the slots of others": (reference, "fused_mla_decode_prep", _wrong_slots),
    "a quantized query of another scale": (reference, "fused_mla_decode_prep", _wrong_fp8_query),
    "q_nope is not scaled": (reference, "fused_mla_decode_prep", _unscaled(slice(None, NOPE))),
    "q_pe is not scaled": (reference, "fused_mla_decode_prep", _unscaled(slice(NOPE, None))),
    "the key is scaled": (reference, "fused_mla_decode_prep", _scaled_key),
    "no factor in a mixed batch": (arithmetic, "scale", lambda q, factor, out: q),
    "q_pe is not scaled in a mixed batch": (arithmetic, "scale", _part_scaled),
    "some rows are not quantized": (runtime_output.QuantizedOutput, "quantize", _unquantized),
}  # fmt: skip


@pytest.mark.parametrize("bug", IN_BATCHES)
def test_batches(bug, monkeypatch):
    monkeypatch.setattr(*IN_BATCHES[bug])
    assert finds_a_bug(
        test_fuzz_batches.test_any_batch_writes_what_the_unfused_graph_writes,
        test_fuzz_batches.CASES,
    )


def test_without_a_bug_they_pass(monkeypatch):
    """Else the tests above would prove nothing."""
    for test, cases in (
        (test_fuzz.test_edited_graphs_compute_the_same, test_fuzz.CASES),
        (
            test_fuzz_batches.test_any_batch_writes_what_the_unfused_graph_writes,
            test_fuzz_batches.CASES,
        ),
    ):
        assert not finds_a_bug(test, cases)
