"""The attention backend CUSTOM: vLLM's own classes, with this library's decode of small steps."""

import functools
import gc
import json
import re
import types
import weakref
from pathlib import Path

import pytest
import torch

from mla_fusion import plugin
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import sparse, workers
from mla_fusion.runtime import sparse_step
from tests.sparse import layers as imitated
from tests.sparse.layers import PAGE, Batch, Step, layer, load, run, unavailable
from tests.step import forward_pass

plugin.register()

most_tokens = sparse_step.most_tokens  # `imitate` replaces it
DECODE = Batch(((40, 1), (0, 1), (200, 1)))
BATCHES = {
    "one": Batch(((130, 1),)), "decode": DECODE, "drafts": Batch(((40, 3), (100, 3))),
    "padded": Batch(((40, 1), (200, 1)), padding=2),
    "most": Batch(tuple((9 * i, 1) for i in range(15))),
}  # fmt: skip


@pytest.fixture
def make(config, monkeypatch):
    """make(**what differs) -> a layer."""
    imitated.imitate(monkeypatch)
    return lambda **changes: layer(config, **changes)


@pytest.fixture
def vllms(monkeypatch):
    """Calls of vLLM's own decode, which is not run."""
    calls = []

    def forward_mqa(self, *given):
        calls.append(given)
        return "latents", "lse"

    monkeypatch.setattr(vllm_compat.sparse_backend()[1], "forward_mqa", forward_mqa)
    return calls


def test_a_worker_that_has_loaded_its_model_prepares_the_layers(config, make, monkeypatch):
    """The flag is off. The constants of a plan would not survive vLLM's sleep among the weights."""
    impl = make()
    impl.mla_fusion_step = None
    layers = config.compilation_config.static_forward_context
    made = types.SimpleNamespace(impl=impl, attn_backend=vllm_compat.sparse_backend()[0])
    worker = types.SimpleNamespace(vllm_config=config)

    def load_model(self):
        assert impl.mla_fusion_step is None
        monkeypatch.setitem(layers, "of CUSTOM", made)
        monkeypatch.setitem(layers, "other", types.SimpleNamespace(impl=object()))
        monkeypatch.setitem(layers, "without", object())
        return "result"

    assert workers.prepare_layers(load_model, worker) == "result"
    assert impl.mla_fusion_step.scratch.plan.settings.num_heads == impl.num_heads


def test_everything_but_the_decode_is_vllms(config):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    backend = AttentionBackendEnum.CUSTOM.get_class()
    base, impl = vllm_compat.sparse_backend()
    assert issubclass(backend, base) and issubclass(backend.get_impl_cls(), impl)
    assert ".".join(backend.full_cls_name()) == AttentionBackendEnum.CUSTOM.get_path()
    assert backend.get_name() == "FLASHMLA_SPARSE"
    assert set(vars(backend)) & set(vars(base)) <= {"__module__", "__doc__", "get_impl_cls", *[
        name for name in vars(backend) if name.startswith(("__", "_abc"))
    ]}  # fmt: skip

    def refused(**changes):
        asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla",
                 "block_size": PAGE, "use_mla": True, "use_sparse": True} | changes  # fmt: skip
        selected = AttentionSelectorConfig(**asked)._asdict()
        return backend.validate_configuration(device_capability=DeviceCapability(9, 0), **selected)

    assert refused() == []
    assert "non-sparse not supported" in refused(use_sparse=False)
    assert refused(use_batch_invariant=True) == ["batch invariance not supported"]


def test_the_slot_of_another_plugin_is_left_to_it(monkeypatch):
    from vllm.v1.attention.backends import registry

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "another.Backend")
    sparse.offer()
    assert custom.get_path() == "another.Backend"
    custom.clear_override()
    for _ in range(2):
        sparse.offer()
        assert custom.get_path() == vllm_compat.SPARSE_BACKEND


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "auto"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_decode_step_is_attention_over_what_was_chosen(config, make, vllms, cache, name):
    impl = make(cache=cache)
    step = Step(config, impl, BATCHES[name], seed=len(name))
    for q in (step.parts(), step.q):
        impl.mla_fusion_step.out.fill_(torch.nan)
        out, lse = run(impl, step, q)
        assert lse is None and not vllms
        torch.testing.assert_close(out.double(), step.expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("heads", [32, 64, 128])
def test_ranks_of_more_heads(config, make, vllms, monkeypatch, heads):
    """vLLM's builder hands over decode tokens by another path from 32 heads on."""
    from vllm.v1.attention.backends.mla import flashmla_sparse

    monkeypatch.setattr(sparse_step, "most_tokens", most_tokens)
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(flashmla_sparse, "MIN_HEADS_FOR_BF16_PREFILL", 0)
    impl = make(heads=heads)
    assert len(impl.mla_fusion_step.out) == 128
    for tokens in (1, 33):
        step = Step(config, impl, Batch(tuple((40 + i, 1) for i in range(tokens))))
        out, _ = run(impl, step, step.q)
        assert not vllms
        torch.testing.assert_close(out.double(), step.expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_layers_share_a_scratch_that_is_made_with_the_first(config, make, heads):
    layers, other = [make(heads=heads) for _ in range(3)], make(heads=heads, cache="auto")
    load(config, *layers, other)
    shared = layers[0].mla_fusion_step
    assert all(impl.mla_fusion_step is shared for impl in layers)
    assert other.mla_fusion_step is not shared
    plan = shared.scratch.plan
    before = [tensor.data_ptr() for tensor in shared.tensors()]
    for name, batch in BATCHES.items():
        step = Step(config, layers[0], batch)
        count = plan.refreshes
        with forward_pass():
            for impl in layers:
                impl.topk_indices_buffer.copy_(layers[0].topk_indices_buffer)
                out, _ = impl.forward_mqa(step.parts(), step.cache, step.metadata, None)
                assert out.data_ptr() == shared.out.data_ptr(), name
        assert plan.refreshes == count + 1, "a forward pass refreshes once"
    assert [tensor.data_ptr() for tensor in shared.tensors()] == before


def test_an_engine_owns_its_scratch(config, make):
    """Engines of one process and one shape have one each; its memory goes with its layers."""
    one, other = make(), make()
    assert one.mla_fusion_step is not other.mla_fusion_step
    held = [weakref.ref(tensor) for tensor in one.mla_fusion_step.tensors()]
    del one
    gc.collect()
    assert not any(tensor() is not None for tensor in held)


def test_the_plan_is_refreshed_for_each_pass_and_size(config, make):
    impl = make()
    two = Step(config, impl, Batch(((9, 1), (70, 1))), seed=1)
    plan = impl.mla_fusion_step.scratch.plan
    run(impl, two, two.q)
    run(impl, two, two.q)
    assert plan.refreshes == 2
    with forward_pass():  # a drafter runs its tokens and then fewer in one pass
        for number in (2, 1):
            part = Step(config, impl, Batch(((9, 1), (70, 1))[:number]))
            out, _ = impl.forward_mqa(part.q, part.cache, part.metadata, None)
            torch.testing.assert_close(out.double(), part.expected, rtol=1e-2, atol=1e-2)
    assert plan.refreshes == 4


@pytest.mark.parametrize(
    "batch",
    [Batch(tuple((9, 1) for _ in range(16))), Batch(((40, 1), (0, 9))), Batch(((0, 1), (0, 2)))],
    ids=["too many tokens", "with a prefill", "two lengths"],
)
def test_other_steps_are_left_to_vllm(config, make, vllms, batch):
    impl = make()
    step = Step(config, impl, batch)
    assert run(impl, step, step.q) == ("latents", "lse")
    [given] = vllms
    assert given[0] is step.q and given[1] is step.cache and given[2] is step.metadata
    assert impl.mla_fusion_step.scratch.plan.refreshes == 0


def test_of_a_mixed_batch_the_decode_tokens_alone_are_served(config, make, vllms):
    """vLLM then hands only these over, and the prompt to its dense prefill."""
    impl = make()
    step = Step(config, impl, Batch(((40, 1), (90, 1), (0, 9))))
    assert step.metadata.num_decode_tokens == 2
    out, _ = run(impl, step, step.q[:2])
    torch.testing.assert_close(out.double(), step.expected[:2], rtol=1e-2, atol=1e-2)
    assert not vllms


DECLINES = {
    "invariant": ("batch-invariant", "", {"is_batch_invariant": lambda: True}),
    "not Hopper": ("sparse-platform", "", {"gpu_arch": lambda: "sm_100"}),
    "no Triton": ("provider-unavailable", "planted: no Triton here", {"require": unavailable}),
    "heads": ("sparse-slower", "fp8_ds_mla, 17 heads of a rank", {"num_heads": 17}),
    "wider": ("sparse-layer", "latents and rotated part of (512, 128)", {"qk_rope_head_dim": 128}),
    "cache": ("sparse-layer", "kv_cache_dtype nvfp4_ds_mla", {"kv_cache_dtype": "nvfp4_ds_mla"}),
    "no list": ("sparse-layer", "no list of chosen tokens", {"topk_indices_buffer": None}),
    "DCP": ("sparse-layer", "decode context parallelism", {"decode_context_parallel_size": 2}),
    "PCP": ("sparse-layer", "prefill context parallelism", {"prefill_context_parallel_size": 2}),
    "DBO": ("sparse-layer", "dual batch overlap", {"enable_dbo": True}),
    "HiSparse": ("sparse-layer", "HiSparse", {"hisparse_config": object()}),
}


@pytest.mark.parametrize("name", DECLINES)
def test_what_is_declined(config, make, vllms, monkeypatch, said, name):
    """vLLM's class refuses some of these itself: a layer is made, and then changed."""
    code, detail, changes = DECLINES[name]
    impl = make()
    step = Step(config, impl, DECODE)
    imitated.plant(monkeypatch, config, impl, changes)
    loaded = functools.partial(load, config)
    imitated.assert_declined(said, loaded, [impl] * 3, code, detail)
    assert run(impl, step, step.q) == ("latents", "lse") and len(vllms) == 1


def test_what_is_served_and_what_is_left_is_said_once(config, make, said):
    layers = [make() for _ in range(3)]
    said.clear()
    load(config, *layers, None)
    [message] = said.messages
    assert "CUSTOM, 3 layers: decode steps of up to 15 tokens are this library's" in message
    assert "(16 heads, 128 slots, 656 bytes an entry, " in message
    assert "larger ones are FLASHMLA_SPARSE's" in message


def test_the_page_has_the_table(monkeypatch):
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "NVIDIA H200")
    page = (Path(__file__).parents[2] / "docs" / "sparse.md").read_text()
    rows = re.findall(r"^\| (fp8_ds_mla|bf16) \| (\d+) to (\d+) \| 1 to (\d+) \|$",
                      page.replace("`", ""), re.M)  # fmt: skip
    said = {
        (name, heads): int(tokens)
        for name, least, most, tokens in rows
        for heads in range(int(least), int(most) + 1)
    }
    for name, cache in {"fp8_ds_mla": "fp8_ds_mla", "bf16": "auto"}.items():
        for heads in range(1, 130):
            assert said.get((name, heads), 0) == most_tokens(heads, cache), (name, heads)


def test_a_gpu_goes_by_its_own_rows_or_those_of_an_h200(monkeypatch, tmp_path):
    """Rows of more heads decide for fewer, and runs that begin with one token."""
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "NVIDIA H99")
    whole = json.loads((sparse_step.FOLDER / "NVIDIA_H200.json").read_bytes()) | {
        "gpu": "NVIDIA H99"
    }
    [shape] = (
        each for each in whole["shapes"] if (each["dtype"], each["heads"]) == ("fp8_ds_mla", 64)
    )
    few, no_first = ({**shape, "rows": shape["rows"][a:b]} for a, b in ((0, 2), (1, 3)))
    folder = sparse_step.FOLDER
    for each, most in ((None, 128), (few, 4), (no_first, 0)):
        sparse_step._measured.cache_clear()
        monkeypatch.setattr(sparse_step, "FOLDER", folder if each is None else tmp_path)
        if each is not None:
            (tmp_path / "NVIDIA_H99.json").write_text(json.dumps(whole | {"shapes": [each]}))
        assert [most_tokens(heads, "fp8_ds_mla") for heads in (40, 64)] == [most, most]
    sparse_step._measured.cache_clear()
