"""DeepSeek-V4's decode: vLLM's classes, with this library's kernels replaced by the reference."""

import importlib
import re
import types
from pathlib import Path

import pytest
import torch

from mla_fusion import plugin
from mla_fusion.attention import triton as provider
from mla_fusion.config import vllm_compat
from mla_fusion.plugin import workers
from mla_fusion.runtime import deepseek_v4, sparse_step
from tests.sparse import test_backend, v4
from tests.sparse.layers import assert_declined, imitate, launched, plant
from tests.sparse.v4 import KINDS, LAYERS, Step, layer

plugin.register()

STEPS = {
    "one": {"positions": (300,)}, "decode": {"positions": (5, 126, 127, 700, 2100)},
    "padded": {"positions": (300, 40), "padding": 2},
    "wide": {"positions": (511, 3000), "columns": 256},
}  # fmt: skip


@pytest.fixture
def launches(monkeypatch):
    """What kernels were launched with; the reference computes it."""
    imitate(monkeypatch)
    seen = []

    def launch(given):
        seen.append(given)
        launched(given)

    monkeypatch.setattr(provider, "launch", launch)
    return seen


@pytest.fixture
def load(config, monkeypatch):
    """load(*layers): what happens when a model with these layers is loaded."""
    monkeypatch.setattr(config.model_config, "max_model_len", 65536)
    return lambda *layers: sparse_step.attach(dict(enumerate(layers)), config, True)


@pytest.fixture
def vllms(monkeypatch):
    """Calls of FlashMLA, which is not run."""
    calls = []
    monkeypatch.setattr(
        v4.module(), "flash_mla_with_kvcache", lambda **given: (calls.append(given), None)
    )
    monkeypatch.setattr(v4.module(), "compute_global_topk_indices_and_lens", v4.to_slots)
    return calls


def check(out, step, layer):
    """The real heads are right, and the others are as they were."""
    heads = step.heads
    torch.testing.assert_close(out[:, :heads].double(), step.expected(layer), rtol=1e-2, atol=1e-2)
    assert out[:, heads:].isnan().all()


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize(("package", "ratio"), LAYERS)
@pytest.mark.parametrize("name", STEPS)
def test_a_decode_step_is_attention_over_what_vllm_lists(
    load, launches, vllms, package, ratio, name, heads
):
    one = layer(ratio, heads, package=package)
    step = Step(**STEPS[name], heads=heads)
    load(one)
    with step.context(one):
        check(step.run(one), step, one)
    [given] = launches
    assert not vllms and given.q.shape == (len(step.q), heads, 512)
    assert given.kv_cache.stride() == (v4.STRIDE, 584, 1)


@pytest.mark.parametrize(("package", "ratio"), LAYERS)
def test_a_decode_step_is_what_vllms_kernel_for_cpus_computes(load, launches, package, ratio):
    if tuple(map(int, vllm_compat.installed_version().split(".")[:2])) < (0, 30):
        pytest.skip("vLLM has the kernel from 0.30 on")
    op = getattr(torch.ops._C, "flash_mla_with_kvcache_cpu", None)
    if op is None:
        pytest.skip("vLLM's build for CPUs without AVX-512 has no such kernel")
    one, step = layer(ratio, package=package), Step((5, 700, 2100), padding=1)
    load(one)
    with step.context(one):
        out = step.run(one)
    scopes = []
    for cache, slots, lens in step.slots(one):
        counts = torch.arange(slots.shape[1]) < lens[:, None]
        whole = cache.as_strided((v4.BLOCKS, 584 * cache.shape[1]), (v4.STRIDE, 1))
        scopes.append((whole.contiguous(), torch.where(counts, slots, -1).long()))
    if len(scopes) == 1:
        scopes.append((scopes[0][0], torch.zeros(len(step.q), 0, dtype=torch.long)))
    (window, near), (cache, far) = scopes
    page = v4.BLOCK // max(ratio, 1)
    wanted = torch.empty(len(step.q), step.heads, 512, dtype=torch.bfloat16)
    q, sink = step.q[:, : step.heads].contiguous(), one.attn_sink[: step.heads].contiguous()
    op(wanted, q, window, near, v4.PAGE, cache, far, page, sink, one.scale)
    torch.testing.assert_close(out[:, : step.heads], wanted, rtol=1e-2, atol=1e-2)


def test_kinds_of_layer_with_equal_shapes_share_no_lengths(
    config, load, launches, monkeypatch, said
):
    """512 chosen entries of 4 tokens, and room for 512 of 128: one step runs both, twice. Drafts
    that see each other have rows that hold them beside the window."""
    drafts = types.SimpleNamespace(num_speculative_tokens=7, parallel_drafting=False)
    monkeypatch.setattr(config, "speculative_config", drafts)
    kinds = [layer(ratio, seed=seed) for seed, ratio in enumerate((4, 128, 4, 128, 1))]
    load(*kinds)
    every = "128 + 512 slots, 584 bytes an entry, "
    named = f"(c4a, 8 heads, {every}", f"(c128a, 8 heads, {every}", "(swaonly, 8 heads, 192 slots, "
    for message, what, count in zip(said.messages, named, (2, 2, 1), strict=True):
        assert f"CUSTOM, {count} layers: decode steps of up to 15 tokens" in message
        assert what in message
    steps = [each.mla_fusion_step for each in kinds]
    assert steps[0] is steps[2] and steps[1] is steps[3] and len(set(map(id, steps))) == 3
    assert steps[0].scratch.widths == steps[1].scratch.widths == (128, 512)
    held = [tensor.data_ptr() for each in steps for tensor in each.tensors()]
    for positions in ((300, 2100), (900, 17)):
        step = Step(positions)
        with step.context(*kinds):
            for each in kinds:
                check(step.run(each), step, each)
    assert [each.scratch.plan.refreshes for each in steps] == [2] * 5
    assert [tensor.data_ptr() for each in steps for tensor in each.tensors()] == held


@pytest.mark.parametrize("ratio", [1, 4])
def test_a_pass_plans_once_although_groups_of_caches_have_metadata_of_their_own(
    load, launches, ratio
):
    """Windows of [3, 2], [3, 2] and [4, 1] tokens: as many rows, and as many tokens."""
    one, other = layer(ratio), layer(ratio, seed=1)
    load(one, other)
    for count, positions in enumerate(((2, 1), (2, 1), (3, 0)), 1):
        step, second = Step(positions), Step(positions, seed=1)
        with step.context(one, other):
            check(step.run(one), step, one)
            vllm_compat.forward_context().attn_metadata.update(
                {other.prefix: second.entries, other.swa_cache_layer.prefix: second.window}
            )
            other.topk_indices_buffer[:2] = second.chosen
            check(second.run(other), second, other)
        assert one.mla_fusion_step.scratch.plan.refreshes == count


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_other_steps_are_left_to_vllm(load, launches, vllms, monkeypatch, ratio):
    monkeypatch.setattr(sparse_step, "most_tokens", lambda heads, cache: 3)
    one, step = layer(ratio), Step((5, 126, 127, 700))
    load(one)
    for _ in range(2):  # too many tokens; no step
        with step.context(one):
            step.run(one)
        one.mla_fusion_step, step = None, Step((9,))
    assert [given["q"].shape for given in vllms] == [(4, 1, 64, 512), (1, 1, 64, 512)]
    assert not launches


DECLINES = {
    name: test_backend.DECLINES[name]
    for name in ("not Hopper", "no Triton", "DCP", "PCP", "DBO", "HiSparse")
} | {
    "heads": ("sparse-slower", "17 heads of a rank", {"n_local_heads": 17}),
    "wider": ("sparse-layer", "heads of 576, 64 of them rotated", {"head_dim": 576}),
    "cache": ("sparse-layer", "kv_cache_dtype bfloat16", {"kv_cache_dtype": "bfloat16"}),
    "entries": ("sparse-layer", "entries of 528 bytes", {"swa_bytes_per_token": 528}),
}


@pytest.mark.parametrize("name", DECLINES)
def test_what_is_declined(config, load, launches, monkeypatch, said, name):
    code, detail, changes = DECLINES[name]
    layers = [layer(4, seed=seed) for seed in range(2)]
    for each in layers:
        plant(monkeypatch, config, each, changes)
    left = "every step is left to FLASHMLA_SPARSE_DSV4"
    assert_declined(said, load, layers, code, detail, left)


@pytest.mark.parametrize("package", sorted({package for package, _ in LAYERS}))
def test_a_worker_with_custom_makes_its_model_of_layers_that_decode_here(
    config, monkeypatch, package
):
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(config.model_config, "_architecture", v4.NAMES[package])
    model, seen = importlib.import_module(f"vllm.models.{package}.nvidia.model"), []
    base = v4.module(package).DeepseekV4FlashMLAAttention

    def load_model(self):
        seen.append(model._select_dsv4_attn_cls(config))

    worker = types.SimpleNamespace(vllm_config=config)
    for backend in (None, AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASHMLA_SPARSE):
        monkeypatch.setattr(config.attention_config, "backend", backend)
        workers.prepare_layers(load_model, worker)
    assert seen[0] is seen[2] is base
    assert issubclass(seen[1], base) and seen[1].backend_cls is base.backend_cls
    assert seen[1].mla_fusion_step is None and seen[1].__name__ == base.__name__
    convert = importlib.import_module(f"vllm.models.{package}.common.ops")
    assert seen[1].mla_fusion_slots is convert.compute_global_topk_indices_and_lens


def test_the_page_says_which_steps(monkeypatch):
    monkeypatch.setattr(vllm_compat, "gpu_name", lambda: "NVIDIA H200")
    page = " ".join((Path(__file__).parents[2] / "docs" / "sparse.md").read_text().split())
    said = (
        r"up to (\d+) real heads of V4 and V4.1, over the window alone up to (\d+), in steps of "
        r"up to (\d+) tokens"
    )
    many, alone, tokens = map(int, re.search(said, page).groups())
    for ratio, _ in KINDS["deepseek_v4"]:
        made, last = layer(ratio), many if ratio > 1 else alone
        most = []
        for made.n_local_heads in (1, last, last + 1):
            most.append(deepseek_v4._most_tokens(made))
        assert most == [tokens, tokens, 0], ratio
