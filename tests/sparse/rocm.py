"""Layers of vLLM's ROCM_AITER_MLA_SPARSE on a CPU, by the backend CUSTOM, over the double of AITER.

`imitate` is for one test and adds to that of `layers.py`: the backend is made anew, over vLLM's
class for ROCm with kernels in plain torch and the double as AITER, whose GPU vLLM sees.
"""

import importlib
import sys
import types

import torch

from mla_fusion.config import vllm_compat
from mla_fusion.kernels.arithmetic import next_power_of_two
from tests import gpus
from tests.sparse import layers

MODULE = "mla_fusion.runtime.sparse_backend"


def imitate(monkeypatch, double):
    """Let layers of ROCm be made and run in this test."""
    import vllm._aiter_ops as aiter_ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as module

    layers.imitate(monkeypatch)
    importlib.import_module(MODULE)
    monkeypatch.setattr(vllm_compat, "is_rocm", lambda: True)
    monkeypatch.setattr(vllm_compat, "gpu_arch", lambda: "")
    monkeypatch.delitem(sys.modules, MODULE)
    gpus.imitate(monkeypatch, double.arch.name, sms=4)
    platform = type(current_platform)
    for name, value in (("fp8_dtype", double.arch.fp8), ("num_compute_units", 304)):
        monkeypatch.setattr(platform, name, classmethod(lambda *_, value=value: value))
    monkeypatch.setattr(module, "triton_convert_req_index_to_global_index", to_slots)
    monkeypatch.setattr(module, "generate_sparse_seqlen_triton", lengths)
    is_942 = double.arch.name == "gfx942"
    named = {"on_gfx942": is_942, "on_gfx950": not is_942, "on_mi3xx": True}
    asked = types.SimpleNamespace(**{name: lambda v=value: v for name, value in named.items()})
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", asked)
    # vLLM's stand-in for Triton on a CPU has none.
    monkeypatch.setattr(module.triton, "next_power_of_2", next_power_of_two, raising=False)
    monkeypatch.setattr(aiter_ops.rocm_aiter_ops, "mla_decode_fwd", staticmethod(decode))
    stream = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)


def to_slots(
    req_id, block_table, token_indices, cu_seqlens, paged_kv_indices,
    BLOCK_STRIDE_ROWS=None, BLOCK_SIZE=64, NUM_TOPK_TOKENS=2048,
):  # fmt: skip
    """vLLM's kernel: a position of -1, or outside of the table, becomes slot 0."""
    slots = layers.to_slots(
        req_id, block_table, token_indices, BLOCK_SIZE, NUM_TOPK_TOKENS, BLOCK_STRIDE_ROWS
    ).clamp(min=0)
    for row, (start, end) in zip(slots, cu_seqlens.unfold(0, 2, 1).tolist(), strict=True):
        paged_kv_indices[start:end] = row[: end - start]


def lengths(*given):
    """vLLM's kernel: for each token the keys up to it, at most `topk_token`; from 0.33 on it has no
    query_lens."""
    *_, seq_lens, starts, topk_token, num_tokens, _ = given
    out = torch.zeros(num_tokens, dtype=torch.int32)
    for owner, (start, end) in enumerate(starts.unfold(0, 2, 1).tolist()):
        if seq_lens[owner]:
            seen = torch.arange(end - start) + seq_lens[owner] - (end - start) + 1
            out[start:end] = seen.clamp(max=topk_token).int()
    return out


def decode(
    q, kv_buffer, o, sm_scale, qo_indptr, max_seqlen_qo, kv_indptr, kv_indices, last, **rest
):
    """vLLM's op, by its body."""
    from vllm import _aiter_ops

    _aiter_ops._rocm_aiter_mla_decode_fwd_impl(
        q, kv_buffer.view(-1, 1, 1, q.shape[-1]), o, qo_indptr, max_seqlen_qo, kv_indptr,
        kv_indices, last, sm_scale=sm_scale, **rest,
    )  # fmt: skip


def scales():
    """A layer of vLLM, of which the decode reads the scales, and how it quantizes a query."""

    def quantize(latent, rotated, scale):
        whole = torch.cat((latent, rotated), -1)
        fp8 = layers.fp8_type()
        limit = torch.finfo(fp8).max
        return (whole.float() / scale).clamp(-limit, limit).to(fp8)

    return types.SimpleNamespace(
        _q_scale=torch.tensor(layers.Q_SCALE),
        _k_scale=torch.tensor(layers.K_SCALE),
        _decode_concat_quant_fp8_op=quantize,
    )


def gap():
    """Rows that vLLM's class for ROCm may have between two blocks: from 0.32 on any."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla_sparse as module

    return 16 if hasattr(module, "flat_kv_row_view") else 0
