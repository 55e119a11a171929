"""What each MLA backend of vLLM hands its kernel in a lifted step and in vLLM's own, byte by byte.

`forward_mqa` is vLLM's own, and so is the step of its layer; the kernels are a recorder.
ROCM_AITER_MLA, whose `forward_mqa` ROCM_AITER_TRITON_MLA has too, is in tests/rocm.
"""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.utils.torch_utils import _encode_layer_name

from mla_fusion import runtime
from mla_fusion.config import eligibility
from mla_fusion.kernels import reference
from mla_fusion.ops import Rope
from tests.on_cpu import OnCpu
from tests.step import forward_pass

BF16, FP8, NAME = torch.bfloat16, torch.float8_e4m3fn, "model.layers.0.self_attn.attn"
NOPE, ROPE, LATENT, VALUE, PAGE, BATCH = 128, 64, 512, 128, 64, 3
# Class, its kernels, and the types of cache that it takes. CUTLASS_MLA pads fewer than 128 heads.
BACKENDS = {
    "FLASHMLA": ("flashmla.FlashMLAImpl", 16, ("auto", "fp8"),
                 "flash_mla_with_kvcache", "flash_mla_with_kvcache_fp8"),
    "FLASH_ATTN_MLA": ("flashattn_mla.FlashAttnMLAImpl", 16, ("auto",), "flash_attn_varlen_func"),
    "FLASHINFER_MLA": ("flashinfer_mla.FlashInferMLAImpl", 16, ("auto", "fp8"),
                       "trtllm_batch_decode_with_kv_cache_mla"),
    "CUTLASS_MLA": ("cutlass_mla.CutlassMLAImpl", 128, ("auto", "fp8"),
                    "ops.sm100_cutlass_mla_decode"),
    "TOKENSPEED_MLA": ("tokenspeed_mla.TokenspeedMLAImpl", 16, ("fp8",),
                       "_kernels.tokenspeed_mla_decode"),
    "TRITON_MLA": ("triton_mla.TritonMLAImpl", 16, ("auto", "fp8"), "decode_attention_fwd"),
}  # fmt: skip
CASES = [
    (name, cache, queries, ranks)
    for name, (_, _, caches, *_) in BACKENDS.items()
    for cache in caches
    for queries, ranks in ((1, 1), (2, 1), (1, 2))
    # Its metadata has one query row of a sequence, and ranks that share a cache need its LSE.
    if not (name == "CUTLASS_MLA" and (queries > 1 or ranks > 1))
]
# What a kernel writes, by name or place; before that it is whatever memory holds.
WRITTEN = {"decode_attention_fwd": (3, 4, 7), "sm100_cutlass_mla_decode": (0, 1, 7)}


class Recorder:
    """A kernel: notes what it is given, and returns ones for attention and LSE."""

    def __init__(self, name):
        self.name, self.calls = name, []

    def __call__(self, *args, **given):
        given |= {at: x for at, x in enumerate(args) if at not in WRITTEN.get(self.name, ())}
        given.pop("workspace_buffer", None)
        self.calls.append({key: self.note(value) for key, value in given.items()})
        for at in WRITTEN.get(self.name, ())[:2]:
            args[at].fill_(1)
        query = given.get("query", given.get("q_v", given.get("q")))
        if query is None:
            return None
        out, lse = torch.ones(*query.shape[:-1], LATENT, dtype=BF16), torch.ones(query.shape[:-1])
        if "flash_mla" in self.name:
            return out, lse.transpose(1, 2)
        if not (given.get("return_lse") or given.get("return_softmax_lse")):
            return out
        return out, lse.T if lse.dim() == 2 else lse.flatten(0, 1)

    @staticmethod
    def note(value):
        """A tensor as its type, shape and bytes."""
        if not isinstance(value, torch.Tensor):
            return value
        held = value.flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return value.dtype, tuple(value.shape), held


@pytest.fixture
def backend(monkeypatch):
    """Makes a backend's class, without what its constructor asks of a GPU, and its recorders."""
    modules = set(sys.modules)
    for name in ("flashinfer", "flashinfer.decode", "flashinfer.utils", "tokenspeed_mla"):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        monkeypatch.setattr(fa_utils, name, None, raising=False)
    monkeypatch.setattr("vllm.utils.platform_utils.num_compute_units", lambda *_: 4)

    def make(name):
        path, heads, _, *kernels = BACKENDS[name]
        stem, cls = path.split(".")
        with OnCpu():
            module = importlib.import_module(f"vllm.v1.attention.backends.mla.{stem}")
        module._kernels = sys.modules["tokenspeed_mla"]
        recorders = []
        for kernel in kernels:
            *owner, called = kernel.split(".")
            recorders.append(Recorder(called))
            target = getattr(module, *owner) if owner else module
            monkeypatch.setattr(target, called, recorders[-1], raising=False)
        for of_gpu in ("workspace", "workspace_buffer", "multi_ctas_kv_counter_buffer"):
            monkeypatch.setattr(module, f"_get_{of_gpu}", lambda *_: None, raising=False)
        monkeypatch.setattr(module, "_compute_num_kv_splits", lambda *_: 4, raising=False)
        return getattr(module, cls), heads, recorders

    yield make
    for name in set(sys.modules) - modules:
        if name.startswith("vllm.v1.attention.backends.mla."):
            del sys.modules[name]


def layer_of(cls, heads, cache, ranks):
    """A layer of vLLM's as its constructor leaves it, of R1's widths, with an empty cache."""
    impl = object.__new__(cls)
    vars(impl).update(
        num_heads=heads, scale=0.1, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE, kv_cache_dtype=cache, is_sparse=False, dcp_world_size=ranks,
        pcp_world_size=1, dcp_rank=0, need_to_return_lse_for_decode=ranks > 1, softmax_scale=None,
        output_scale=None, bmm1_scale=None, bmm2_scale=None, _mla_counter_bytes=1, _sm_count=4,
        _min_split_kv=1, _max_decode_tokens=0, _workspace_buffer=None, _num_kv_splits=-1,
        _parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1), _workspace=mock.Mock(),
        do_kv_cache_update=write, supports_quant_query_input=cls.__name__ != "TritonMLAImpl",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(heads)

    def weights(*shape):
        return torch.randn(shape, generator=generator).to(BF16)

    layer = object.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    scale = 1.0 if cls.__name__ == "CutlassMLAImpl" else 0.25
    stored = torch.uint8 if cache == "fp8" else BF16
    fields = dict.fromkeys(
        ("hisparse_cache", "prefill_backend", "q_pad_num_heads", "use_sparse", "use_pcp",
         "pcp_shard_decode_requests", "is_aiter_triton_fp4_bmm_enabled", "is_amx_bmm_enabled",
         "is_aiter_triton_fp8_bmm_enabled", "calculate_kv_scales"))  # fmt: skip
    fields |= {
        "layer_name": NAME, "num_heads": heads, "kv_cache_dtype": cache, "impl": impl,
        "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE, "W_UK_T": weights(heads, NOPE, LATENT),
        "W_UV": weights(heads, LATENT, VALUE), "_k_scale": torch.tensor(scale),
        "_q_scale": torch.tensor(scale), "_k_scale_float": scale, "_q_scale_float": scale,
        "kv_cache": torch.zeros(2 * BATCH, PAGE, LATENT + ROPE, dtype=stored),
        "_decode_concat_quant_fp8_op": lambda nope, pe, scale: reference.cast(
            torch.cat((nope, pe), -1), FP8, scale),
        "dcp_manager": SimpleNamespace(
            query_gather=lambda q: torch.cat([q] * ranks, 1),
            combine=lambda out, lse, **_: out[:, :heads] * lse[:, :heads, None].to(out.dtype)),
    }  # fmt: skip
    for key, value in fields.items():
        object.__setattr__(layer, key, value)
    return layer


def write(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *_):
    """vLLM's cache write, which its build for CPUs has not."""
    cache = kv_cache.view(FP8) if kv_cache_dtype == "fp8" else kv_cache
    entries = reference.cast(torch.cat((kv_c, k_pe.flatten(1)), -1), cache.dtype, k_scale)
    cache[slot_mapping // PAGE, slot_mapping % PAGE] = entries


def metadata_of(queries):
    """A decode-only batch of `queries` rows a sequence."""
    starts = torch.arange(BATCH + 1, dtype=torch.int32) * queries
    lens = torch.tensor([5, 40, 64], dtype=torch.int32)
    rows = {"query_start_loc": starts, "max_query_len": queries, "max_seq_len": 64}
    decode = SimpleNamespace(
        block_table=torch.arange(2 * BATCH, dtype=torch.int32).view(BATCH, 2), seq_lens=lens,
        dcp_tot_seq_lens=lens, scheduler_metadata=mock.MagicMock(), max_num_splits=32, **rows,
    )  # fmt: skip
    tokens = BATCH * queries
    return SimpleNamespace(
        num_actual_tokens=tokens, num_decode_tokens=tokens, num_decodes=BATCH, num_prefills=0,
        num_reqs=BATCH, causal=True, prefill=None, decode=decode, **rows,
    )  # fmt: skip


def step(layer, metadata, lifted):
    """What a step leaves in the output and in the cache."""
    g = torch.Generator().manual_seed(1)
    tokens, heads = metadata.num_actual_tokens, layer.num_heads

    def random(*shape):
        return torch.randn(shape, generator=g).to(BF16)

    q = random(tokens, heads, NOPE + ROPE)
    kv_c, k_pe = random(tokens, LATENT), random(tokens, 1, ROPE)
    positions = torch.arange(tokens) + 3
    common = (positions, random(99, ROPE), None, layer._k_scale, _encode_layer_name(NAME),
              layer.kv_cache_dtype, Rope.NATIVE, False)  # fmt: skip
    output = torch.zeros(tokens, heads * VALUE, dtype=BF16)
    slots = positions % 3 * PAGE + positions
    with forward_pass({NAME: layer}, metadata, slots):
        runtime.rope_and_cache_update(q, kv_c, k_pe, *common)
        if lifted:
            facts = eligibility.facts(layer, "reference", BF16, "vllm", 1)
            assert facts.decline is None
            dtype = facts.query
            prepared = runtime.decode_q_prep(q, common[4], LATENT, ROPE, dtype)
            runtime._attention(q, prepared, kv_c, k_pe, output, common[4])
        else:
            layer.forward_impl(q, kv_c, k_pe, layer.kv_cache, metadata, output=output)
    return output, layer.kv_cache


@pytest.mark.parametrize(("name", "cache", "queries", "ranks"), CASES)
def test_the_kernel_gets_what_it_would_get(backend, name, cache, queries, ranks):
    cls, heads, recorders = backend(name)
    left = [
        step(layer_of(cls, heads, cache, ranks), metadata_of(queries), lifted)
        for lifted in (True, False)
    ]
    [recorder] = [each for each in recorders if each.calls]
    ours, theirs = recorder.calls
    differ = [key for key in ours.keys() | theirs.keys() if ours[key] != theirs[key]]
    assert not [key for key in differ if not isinstance(ours[key], mock.MagicMock)], differ
    for a, b in zip(*left, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.any()


def test_aiters_triton_backend_has_the_decode_of_aiters():
    base = importlib.import_module("vllm.v1.attention.backends.mla.rocm_aiter_mla").AiterMLAImpl
    triton = importlib.import_module("vllm.v1.attention.backends.mla.aiter_triton_mla")
    assert triton.AiterTritonMLAImpl.forward_mqa is base.forward_mqa
