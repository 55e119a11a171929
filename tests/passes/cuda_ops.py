"""Kernels that vLLM's graphs and passes name and a CPU build lacks, or has wrong."""

import functools
import sys
import types

import torch

from tests.passes import declare, stand_ins
from tests.passes.fake_engine import Impl
from tests.passes.graphs import ROPE


def plain_kernels(monkeypatch):
    """Plain torch bodies for the RoPE kernels, while the generator is suspended.

    FlashInfer is not installed on a CPU, the fused RoPE and cache write has no CPU kernel, and
    `_C.rotary_embedding` on a CPU rotates a query [T, H, R] as if it had one head.
    """
    rope = types.ModuleType("flashinfer.rope")

    def concat_and_cache_mla_rope_fused(positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, *rest):
        slot_mapping, kv_cache, kv_cache_dtype, scale = rest
        stand_ins.rotate_in_place(positions, q_pe, k_pe, ROPE, cos_sin_cache, is_neox)
        Impl(False).do_kv_cache_update(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)

    rope.apply_rope_with_cos_sin_cache_inplace = stand_ins.rotate_in_place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.rope", rope)
    monkeypatch.setattr(
        "vllm._custom_ops.concat_and_cache_mla_rope_fused", concat_and_cache_mla_rope_fused
    )
    library = torch.library.Library("_C", "IMPL")
    library.impl("rotary_embedding", _rotary_embedding, "CPU", allow_override=True)
    yield
    library._destroy()


def _rotary_embedding(*args, rope_dim_offset=0, inverse=False):
    assert rope_dim_offset == 0 and not inverse
    stand_ins.rotate_in_place(*args[:6])


@functools.cache
def define_cuda_ops():
    """Define the CUDA ops that vLLM's last step names and a CPU build lacks; nothing calls them."""
    for name in (
        "fused_add_rms_norm_static_fp8_quant", "rms_norm_dynamic_per_token_quant",
        "rms_norm_static_fp8_quant", "silu_and_mul_quant", "fused_qk_norm_rope",
    ):  # fmt: skip
        if not hasattr(torch.ops._C, name):
            declare.op("_C", f"{name}(Tensor x) -> ()")
