"""Random batches through fused graphs: equal results, and no byte outside the addressed slots."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_fusion.passes.fix_functionalization import MLAFixFunctionalizationPass
from tests import tally
from tests.passes import grammar
from tests.passes.fake_engine import BLOCK_SIZE, BLOCKS, POISON, Batch, assert_same, fuse, run
from tests.passes.graphs import TRACED_TOKENS, build
from tests.passes.test_fuzz import comparable, tolerance


@st.composite
def batches(draw, spec):
    """Any step: `actual` of `rows` are tokens, `decode` of them decode tokens, in any slots."""
    rows = draw(st.integers(0, 7)) if spec.dynamic else TRACED_TOKENS
    if draw(st.integers(0, 9)) == 9:
        return Batch(rows=rows, actual=rows, decode=rows, profile=True)
    actual = draw(st.integers(0, rows))
    decode = actual if draw(st.booleans()) else draw(st.integers(0, actual))
    slots = st.integers(0, BLOCKS * BLOCK_SIZE - 1)
    return Batch(
        rows=rows,
        actual=actual,
        decode=decode,
        slots=draw(st.none() | st.integers(actual, rows)),
        holes=tuple(draw(st.sets(st.integers(0, actual - 1)))) if actual else (),
        order=tuple(draw(st.lists(slots, min_size=rows, max_size=rows, unique=True))),
    )


def kind(batch):
    """What the step is, for the count."""
    if batch.profile:
        return "profile_run"
    if batch.actual == 0:
        return "empty"
    if batch.decode_only:
        return "decode_only"
    return "mixed" if batch.decode else "prefill"


@functools.cache
def compiled(spec, quantized):
    """A graph as it was, and as vLLM would compile it."""
    module = build(spec)
    assert fuse(module, spec, quantized_query=quantized).fused == spec.layers
    MLAFixFunctionalizationPass(None)(module.graph)
    return build(spec), module


def assert_untouched(caches, batch):
    """Every byte of a slot that no row addresses is as it was before the step."""
    slots = batch.slot_mapping()
    addressed = torch.zeros(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    if slots is not None:
        addressed[slots[slots >= 0]] = True
    for cache in caches:
        written = (cache != POISON).flatten(0, 1).any(-1)
        assert not (written & ~addressed).any(), "a slot that no row addresses was written"
        assert written[addressed].all(), "an addressed slot was not written"


CASES: dict[str, Any] = {
    "data": st.data(),
    "spec": st.sampled_from(grammar.SPECS),
    "quantized": st.booleans(),
}


@pytest.mark.timeout(7200)  # 20,000 steps in the nightly profile
@pytest.mark.usefixtures("plain_kernels")
@given(**CASES)
def test_any_batch_writes_what_the_unfused_graph_writes(data, spec, quantized):
    quantized = quantized and spec.kv_cache_dtype == "fp8"
    batch = data.draw(batches(spec))
    unfused, fused = compiled(spec, quantized)
    before, after = (run(module, spec, batch, quantized) for module in (unfused, fused))
    native = spec.rope in ("native", "native_late_cast", "deepseek")
    # Eager torch rounds every product of a bf16 rotation, as a compiled graph does not.
    exact = not batch.decode_only and not (native and spec.dtype is torch.bfloat16)
    pair = comparable(before, after, spec)
    assert_same(*pair, batch, tolerance=None if exact else tolerance(spec))
    for outcome in (before, after):
        assert_untouched(outcome.caches, batch)
    padded = batch.rows > batch.actual
    tally.add("batches", steps=1, **{kind(batch): 1}, padded=padded, with_holes=bool(batch.holes))
