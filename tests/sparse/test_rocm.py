"""The backend CUSTOM over vLLM's ROCM_AITER_MLA_SPARSE, and vLLM's own decode over the double of
AITER beside it. No AMD hardware is involved.
"""

import functools
import importlib.util
import types
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_fusion import plugin
from mla_fusion.attention import triton as provider
from mla_fusion.config import vllm_compat
from mla_fusion.runtime import sparse_step
from tests import aiter_double, gpus
from tests.sparse import layers, rocm, test_backend
from tests.sparse.layers import Batch, Step, build, layer, load, run
from tests.step import forward_pass

plugin.register()

ASKED = {"mla_fusion": {"attention": "portable"}}
BATCHES = {name: test_backend.BATCHES[name] for name in ("one", "decode", "drafts")}
BATCHES["most"] = Batch(tuple((9 * i, 1) for i in range(16)))


@pytest.fixture
def engine(config, monkeypatch):
    """The config of an engine that asked for this library's decode."""
    monkeypatch.setattr(config, "additional_config", ASKED)
    monkeypatch.setattr(config.model_config, "dtype", torch.bfloat16)
    return config


@pytest.fixture
def double(request):
    """Of gfx942, unless a test names another."""
    with aiter_double.installed(getattr(request, "param", "gfx942")) as installed:
        yield installed


@pytest.fixture
def make(engine, double, monkeypatch):
    """make(**what differs) -> a layer."""
    rocm.imitate(monkeypatch, double)
    return lambda cache="auto", **changes: layer(engine, cache=cache, **changes)


def decoded(impl, step, q):
    return run(impl, step, q, rocm.scales())[0]


def close(out, expected):
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("double", ["gfx942", "gfx950"], indirect=True)
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_decode_step_is_attention_over_what_vllm_reads(engine, make, monkeypatch, cache, name):
    """By the metadata of vLLM's builder, with the query in parts, as vLLM's layer has it."""
    if name == "drafts":
        drafts = types.SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
        monkeypatch.setattr(engine, "speculative_config", drafts)
    impl = make(cache)
    step = Step(engine, impl, BATCHES[name], seed=len(name), dense=True, gap=rocm.gap())
    assert step.metadata.num_decode_tokens == len(step.q)
    ours = impl.mla_fusion_step
    ours.out.fill_(torch.nan)
    out = decoded(impl, step, step.parts())
    assert out.data_ptr() == ours.out.data_ptr() and ours.scratch.plan.refreshes == 1
    close(out, step.expected)
    impl.mla_fusion_step = None
    close(decoded(impl, step, step.parts()), step.expected)


def test_a_replay_reads_the_lengths_and_positions_of_its_step(engine, make):
    """A captured graph calls with the tensors of its capture; vLLM writes them anew, and pads with
    requests that have no tokens, whose rows are zero."""
    impl = make()
    captured = Step(engine, impl, Batch(((9, 1),) * 4), dense=True)
    decoded(impl, captured, captured.q)
    step = Step(engine, impl, Batch(((150, 1), (20, 1))), seed=3, dense=True)
    captured.tables[:2] = step.tables
    build(engine, impl, Batch(((150, 1), (20, 1)), padding=2), captured.tables, captured.builder)
    captured.q[:2], captured.cache = step.q, step.cache
    impl.mla_fusion_step.out.fill_(torch.nan)
    out = decoded(impl, captured, captured.q)
    close(out[:2], step.expected)
    assert not out[2:].any()


class NewMemory(TorchDispatchMode):
    """Notes the ops whose result lies in memory that none of their arguments has."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors, made = (
            [x.untyped_storage().data_ptr() for x in tree_leaves(part) if torch.is_tensor(x)]
            for part in ((args, kwargs), result)
        )
        if not set(made) <= set(tensors):
            self.seen.append(str(func))
        return result


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_decode_allocates_nothing(engine, make, monkeypatch, cache):
    """Beside the kernels, which are replaced here."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as module

    impl = make(cache)
    step = Step(engine, impl, BATCHES["decode"], dense=True)
    parts, layer = step.parts(), rocm.scales()
    plan, calls = impl.mla_fusion_step.scratch.plan, []
    decoded(impl, step, parts)
    before = [tensor.data_ptr() for tensor in impl.mla_fusion_step.tensors()]
    slots = "triton_convert_req_index_to_global_index"
    for owner, name in ((provider, "launch"), (plan, "refresh"), (module, slots)):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setattr(_custom_ops, "concat_mla_q", lambda *_: calls.append("concat_mla_q"))
    with forward_pass(), NewMemory() as memory:
        impl.forward_mqa(parts, step.cache, step.metadata, layer)
        impl.forward_mqa(parts, step.cache, step.metadata, layer)
    assert not memory.seen
    assert calls == ["refresh", *["concat_mla_q", slots, "launch"] * 2]
    assert [tensor.data_ptr() for tensor in impl.mla_fusion_step.tensors()] == before


DECLINES = {
    "by default": ("sparse-unmeasured", "", {"additional_config": {}}),
    "vllm": ("sparse-unmeasured", "", {"additional_config": {"mla_fusion": {"attention": "vllm"}}}),
    "another GPU": ("sparse-platform", "", {"of": lambda device: gpus.described("gfx1201")}),
    "Triton 3.6": ("provider-unavailable", "Triton 3.6 does not compile",
                   {"triton_version": lambda: (3, 6)}),
    **{name: test_backend.DECLINES[name] for name in ("no Triton", "no list", "HiSparse")},
    "fp16": ("sparse-layer", "activations of torch.float16", {"dtype": torch.float16}),
    "fp16 cache": ("sparse-layer", "kv_cache_dtype float16", {"kv_cache_dtype": "float16"}),
    "sinks": ("sparse-layer", "attention sinks", {"sinks": torch.zeros(16)}),
    "fp8 query": ("sparse-layer", "a quantized query", {"supports_quant_query_input": True}),
    "a tail": ("sparse-layer", "130 columns for 128 chosen tokens",
               {"topk_indices_buffer": torch.zeros(4, 130)}),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINES)
def test_what_is_declined(engine, make, monkeypatch, said, name):
    code, detail, changes = DECLINES[name]
    impl = make()
    step = Step(engine, impl, BATCHES["decode"], dense=True)
    layers.plant(monkeypatch, engine, impl, changes)
    left = "every step is left to ROCM_AITER_MLA_SPARSE"
    layers.assert_declined(said, functools.partial(load, engine), [impl], code, detail, left)
    if code in ("sparse-platform", "provider-unavailable"):
        close(decoded(impl, step, step.parts()), step.expected)


def test_what_is_served_is_said(make, said):
    make("fp8")
    [message] = said.messages
    assert "decode steps of up to 16 tokens are this library's (16 heads, 128 slots, fp8" in message
    assert "larger ones are ROCM_AITER_MLA_SPARSE's" in message


@pytest.mark.parametrize("asked", [True, False])
def test_a_model_that_names_its_backend_is_said(engine, said, asked):
    """vLLM's class for ROCm does from 0.31 on: CUSTOM was chosen, and no layer has it."""
    backend = types.SimpleNamespace(get_name=lambda: "ROCM_AITER_MLA_SPARSE")
    sparse = types.SimpleNamespace(is_sparse=True)
    layer = types.SimpleNamespace(impl=sparse, attn_backend=backend)
    dense = types.SimpleNamespace(impl=types.SimpleNamespace(is_sparse=False))
    sparse_step.attach({"a": layer, "b": layer, "c": dense, "d": object()}, engine, asked)
    assert len(said.messages) == asked
    if asked:
        assert "CUSTOM, 2 layers: every step is left to ROCM_AITER_MLA_SPARSE" in said.messages[0]
        assert "[sparse-unasked]" in said.messages[0]


def test_vllms_class_for_rocm_names_its_backend():
    """docs/sparse.md says in which releases."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    source = folder / "models/deepseek_v32/amd/rocm.py"
    named = source.exists() and "attn_backend=ROCMAiterMLASparseBackend" in source.read_text()
    release = tuple(map(int, vllm_compat.installed_version().split(".")[:2]))
    assert named == (release >= (0, 31))
