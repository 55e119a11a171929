"""Inductor computes what the passes make of a graph, whatever q, kv_c and k_pe are views of: some
of these values it stores, others never."""

import itertools
import operator

import pytest
import torch

from tests.nightly import daily
from tests.passes import edits
from tests.passes.fake_engine import BATCHES, assert_same, run
from tests.passes.graphs import Spec, build_apart
from tests.passes.inductor import through
from tests.passes.rotations import ROPES
from tests.passes.splits import SPLITS

EVERY = [
    Spec(rope, split=split, gated=gated)
    for rope, split, gated in itertools.product(ROPES, ("", *SPLITS), (False, True))
    if split or not gated
]
# In place where nothing else reads the query, and a clone where the gate is read later.
TODAY = [
    Spec("flashinfer"), Spec("cat_fused", layers=2), Spec("native", split="chunk", gated=True),
    *(Spec("nope", split=split, gated=True) for split in ("unbind", "interleaved", "expanded")),
    Spec("nope", split="transposed"),
]  # fmt: skip


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("spec", daily(dict.fromkeys([*TODAY, *EVERY]), *TODAY), ids=str)
def test_a_split_projection(spec):
    """A gate is split off the query's projection, kv_c and k_pe are parts of an activation."""
    module = build_apart(spec)
    compiled, record = through(module, spec)
    if spec.rope == "nope" or not spec.split or spec in TODAY:
        assert record.fused == spec.layers
    if record.fused:
        for name in ("decode", "padded", "mixed", "prefill"):
            batch = BATCHES[name]
            found = run(module, spec, batch, compiled=compiled.call)
            assert_same(run(module, spec, batch), found, batch, tolerance=1e-4)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("rope", ["native", "vllm_c"])
def test_a_value_computed_before_the_rotation_and_read_after_it(rope, halves):
    """Inductor stores no pointwise value of k_pe, nor a half of it, until something reads it."""
    spec = Spec(rope)
    module = build_apart(spec)
    k_pe = edits.unrotated_k(module)
    before = k_pe.next
    early = edits.add(module, before, torch.ops.aten.neg.default, k_pe)
    if halves:
        parts = edits.add(module, before, torch.ops.aten.split.Tensor, early, 4, -1)
        early = edits.add(module, before, operator.getitem, parts, 1)
    edits.read_also(module, early)
    compiled, record = through(module, spec)
    assert record.fused == 1
    for batch in (BATCHES["decode"], BATCHES["prefill"]):
        found = run(module, spec, batch, compiled=compiled.call)
        assert_same(run(module, spec, batch), found, batch, tolerance=1e-4)
