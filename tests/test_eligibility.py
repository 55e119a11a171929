"""Types and widths that a provider cannot serve decline the layer before it is compiled."""

from types import SimpleNamespace

import pytest
import torch

from mla_fusion import attention, kernels
from mla_fusion.attention import triton
from mla_fusion.attention.aiter import selection
from mla_fusion.config import eligibility, vllm_compat
from tests.gpus import imitate

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def layer(**changes):
    """What `facts` reads of a layer of DeepSeek-V2-Lite with W_UK as it is."""
    fields = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    fields |= {"W_UK_T": torch.zeros(1), "_k_scale": torch.ones(()), "kv_cache_dtype": "auto"}
    fields |= {"impl": SimpleNamespace(supports_quant_query_input=False)}
    return SimpleNamespace(**fields | changes)


def declined(layer, provider, activation, attention="auto", query_len=1):
    if isinstance(layer.W_UK_T, torch.Tensor):
        layer.W_UK_T = layer.W_UK_T.to(activation)
    decline = eligibility.facts(layer, provider, activation, attention, query_len).decline
    return f"{decline.code} {decline.detail}" if decline else ""


def packed(*kinds):
    return {"W_UK_T": None} | {f"is_aiter_triton_{kind}_bmm_enabled": True for kind in kinds}


@pytest.mark.parametrize("provider", ["aiter", "triton", "reference"])
@pytest.mark.parametrize("activation", [BF16, FP16, FP32])
@pytest.mark.parametrize("stored", ["auto", "fp8", "fp8_e4m3", "bfloat16", "float16", "float32"])
def test_a_cache_follows_the_activations_or_is_fp8(provider, activation, stored):
    declines = getattr(torch, stored, activation) != activation
    expected = f"kv-cache-dtype {stored} cache, {activation} activations" if declines else ""
    assert declined(layer(kv_cache_dtype=stored), provider, activation) == expected


def test_passes_without_the_plugin_keep_batch_invariance(monkeypatch):
    assert not declined(layer(), "triton", BF16)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert declined(layer(), "triton", BF16) == "batch-invariant "


@pytest.mark.parametrize("major, minor", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_fp8_needs_a_gpu_for_which_triton_compiles_it(major, minor, monkeypatch):
    """Also in a call of the kernels; Triton's CompilationError would be all else that is said."""
    imitate(monkeypatch, f"sm_{major}{minor}")
    device, old = torch.device("cuda"), (major, minor) < (8, 9)
    given = layer(kv_cache_dtype="fp8", _k_scale=SimpleNamespace(device=device))
    why = f"Triton compiles fp8 (e4m3) for sm_89 and newer, not for sm_{major}{minor}"
    assert declined(given, "triton", BF16) == (f"kv-cache-dtype {why}" if old else "")
    assert not declined(layer(_k_scale=given._k_scale), "triton", BF16)
    triton.refuse_fp8(device, q=BF16)
    if old:
        with pytest.raises(ValueError, match="not for sm_8"):
            triton.refuse_fp8(device, q=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "changes, declining",
    [
        ({"kv_lora_rank": 256, "qk_nope_head_dim": 64}, {}),
        ({"kv_lora_rank": 320, "qk_rope_head_dim": 32, "qk_nope_head_dim": 192}, {}),
        ({"kv_lora_rank": 1024, "qk_rope_head_dim": 128, "qk_nope_head_dim": 256}, {}),
        ({"kv_lora_rank": 1028}, {"triton": "kv_lora_rank of 1 to 1024, not 1028",
                                  "aiter": "a multiple of 8, not 64 and 1028"}),
        ({"qk_nope_head_dim": 512}, {"triton": "qk_nope_head_dim of 1 to 256, not 512"}),
        ({"qk_rope_head_dim": 192}, {"triton": "qk_rope_head_dim up to 128, not 192"}),
        ({"qk_rope_head_dim": 63}, dict.fromkeys(kernels.PROVIDERS, "even qk_rope_head_dim")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("provider", kernels.PROVIDERS)
def test_widths(provider, changes, declining):
    reason = declining.get(provider, "")
    found = declined(layer(**changes), provider, BF16)
    assert found.startswith(f"shape provider {provider}: ") == bool(reason) and reason in found


class TestPackedWeight:
    @pytest.mark.parametrize("kinds, used", [(("fp8",), "fp8"), (("fp8", "fp4"), "fp4")])
    def test_is_read_by_aiter_and_multiplied_with_bf16(self, kinds, used):
        given = layer(**packed(*kinds))
        assert not declined(given, "aiter", BF16)
        for activation in (FP16, FP32):
            assert declined(given, "aiter", activation) == (
                f"packed-weights AITER's {used} product is one of bf16, not of {activation}"
            )
        assert declined(given, "triton", BF16) == f"packed-weights AITER {used}"

    @pytest.mark.parametrize("stored", ["float16", "float32"])
    def test_beside_a_cache_that_aiter_would_read_as_bf16(self, stored):
        given = layer(kv_cache_dtype=stored, **packed("fp8"))
        assert "kv-cache-dtype" in declined(given, "aiter", BF16)

    @pytest.mark.parametrize("provider", ["aiter", "triton", "reference"])
    @pytest.mark.parametrize(
        "kept", [None, SimpleNamespace(), SimpleNamespace(weight=torch.zeros(1, dtype=torch.uint8))]
    )
    def test_in_a_form_nobody_knows(self, provider, kept):
        assert declined(layer(W_UK_T=kept), provider, BF16) == (
            "packed-weights neither W_UK_T nor W_UK_T.weight is a plain tensor"
        )

    def test_plain_in_an_object_of_its_own(self):
        """As vllm#55741, which is open, describes it."""
        weight = torch.zeros(2, 3, 4)
        given = layer(W_UK_T=SimpleNamespace(weight=weight))
        assert not declined(given, "triton", BF16)
        assert vllm_compat.weights(given).w_uk is weight


class TestPortable:
    @pytest.fixture(autouse=True)
    def on_a_gpu(self, monkeypatch):
        """The portable decode of a GPU, which has none here."""
        attention.get_provider.cache_clear()
        monkeypatch.setattr(triton, "require", lambda: None)
        monkeypatch.setattr(attention, "portable_provider", lambda device: "triton")
        yield
        attention.get_provider.cache_clear()

    @pytest.mark.parametrize(
        "changes, activation, reason",
        [
            ({}, FP16, ""),
            ({"kv_cache_dtype": "fp8"}, BF16, ""),
            ({"kv_lora_rank": 456}, BF16, "kv_lora_rank that is a multiple of 16 up to 1024, not"),
            ({}, FP32, "got torch.float32 over torch.float32"),
            ({"kv_cache_dtype": "fp8"}, FP32, "got torch.float32 over torch.float8_e4m3fn"),
        ],
    )
    def test_what_the_kernel_takes(self, changes, activation, reason):
        found = declined(layer(**changes), "triton", activation, "portable")
        assert found.startswith("portable-attention triton: ") == bool(reason)
        assert reason in found and not declined(layer(**changes), "triton", activation)

    def test_an_fp8_query_where_the_backend_takes_one(self):
        impl = SimpleNamespace(supports_quant_query_input=True)
        given = layer(kv_cache_dtype="fp8", impl=impl)
        assert not declined(given, "triton", FP32, "portable")


# Changes of the layer, query tokens, architecture, why AITER has no persistent decode for it.
OF_AITER = [
    ({}, 1, "gfx942", ""),
    ({"num_heads": 20}, 4, "gfx950", ""),
    ({"impl": SimpleNamespace(supports_quant_query_input=True), "kv_cache_dtype": "fp8"},
     3, "gfx950", ""),
    ({"num_heads": 12}, 5, "gfx942",
     "12 heads, gfx942 has no persistent bf16 kernel for 16 heads and queries of 5 tokens"),
    ({"num_heads": 64, "kv_cache_dtype": "fp8"}, 1, "gfx950",
     "64 heads, gfx950 has no persistent bf16 over fp8 kernel for 64 heads"),
    ({"kv_lora_rank": 256}, 1, "gfx942", "latents of 512 and 64 rotated, got 256 and 64"),
    ({"qk_rope_head_dim": 32}, 1, "gfx942", "latents of 512 and 64 rotated, got 512 and 32"),
    ({"sliding_window": 128}, 1, "gfx942", "a sliding window"),
    ({"impl": SimpleNamespace(supports_quant_query_input=False, sinks=1)}, 1, "gfx942",
     "attention sinks"),
    ({"non_causal_multi_token_decode": True}, 1, "gfx942", "without causal mask"),
]  # fmt: skip


class TestAiter:
    """What AITER's persistent decode takes; tests/attention/test_selection.py has the shapes."""

    @pytest.mark.parametrize("changes, query_len, arch, reason", OF_AITER)
    def test_what_its_kernels_take(self, monkeypatch, changes, query_len, arch, reason):
        imitate(monkeypatch, arch)
        fp8 = torch.float8_e4m3fn if arch == "gfx950" else torch.float8_e4m3fnuz
        monkeypatch.setattr(vllm_compat, "fp8_dtype", lambda: fp8)
        found = declined(layer(**changes), "aiter", BF16, "aiter", query_len)
        assert found.startswith("aiter-attention ") == bool(reason)
        assert reason in found and not declined(layer(**changes), "aiter", BF16)

    def test_each_shorter_query_needs_a_kernel_too(self, monkeypatch):
        imitate(monkeypatch, "gfx942")
        key = ("gfx942", "bf16", 16)
        monkeypatch.setitem(selection._QUERY_LENS, key, ((2,), ()))
        assert not declined(layer(), "aiter", BF16, "aiter", 2)
        lens = selection.aiter_verdict

        def odd(heads, length, *rest, **more):
            return lens(heads, 9 if length == 1 else length, *rest, **more)

        monkeypatch.setattr(selection, "aiter_verdict", odd)
        assert "queries of 9 tokens" in declined(layer(), "aiter", BF16, "aiter", 2)
