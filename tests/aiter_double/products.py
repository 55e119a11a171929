"""The batched products of AITER's Triton package that vLLM keeps W_UK and W_UV for."""

import torch

from tests.aiter_double import numbers
from tests.aiter_double.faults import assume


def fp4(at, a):
    """x [B, M, K] times mxfp4 weights [B, N, K / 2] with scales [B, N, K / 32].

    What y_scale does is not documented. Here it divides the result, so that a test sees whether it
    was passed.
    """
    x, w, scales = a["x"], a["w"], a["w_scales"]
    assert at.arch.name == "gfx950", "fp4 needs gfx950"
    assume(w.dtype == torch.uint8 == scales.dtype, "weights are packed bytes, scales e8m0 bytes")
    batch, _, inner = x.shape
    assume(w.shape[0] == batch and w.shape[2] * 2 == inner, "w is [B, N, K / 2]")
    assume(scales.shape == (*w.shape[:2], inner // numbers.GROUP_FP4), "scales are [B, N, K / 32]")
    assume(a["prequant"] is True, "the kernel without prequant was never documented")
    wide = numbers.from_mxfp4(*numbers.to_mxfp4(x))
    out = torch.bmm(wide, numbers.from_mxfp4(w, scales).transpose(1, 2))
    if a["y_scale"] is not None:
        out = out / a["y_scale"]
    return _returned(out, a["dtype"], a["y"], a["transpose_bm"])


def quantize(at, a):
    """`dynamic_mxfp4_quant` of x [M, K]: packed values [M, K / 2] and scales [M, K / 32]."""
    assume(a["x"].dim() == 2, "the values are a matrix")
    return numbers.to_mxfp4(a["x"])


def fp8(at, a):
    """X [B, M, K], quantized for each token and group, times fp8 weights [B, N, K], one scale."""
    x, w, scale = a["X"], a["WQ"], a["w_scale"]
    assume(w.dtype == at.arch.fp8, f"weights are read as {at.arch.fp8}")
    assume(scale.numel() == 1 and scale.dtype == torch.float32, "one fp32 scale for all weights")
    assume(x.shape[0] == w.shape[0] and x.shape[2] == w.shape[2], "WQ is [B, N, K]")
    assume(x.shape[2] % a["group_size"] == 0, "K is made of whole groups")
    wide = numbers.grouped_fp8(x, at.arch.fp8, a["group_size"])
    out = torch.bmm(wide, w.float().transpose(1, 2)) * scale
    return _returned(out, a["dtype"], a["YQ"], a["transpose_bm"])


def _returned(out, dtype, into, transposed):
    """[B, M, N], or a view [M, B, N] that is not dense; written into a buffer if one is given."""
    out = out.to(dtype or torch.bfloat16)
    out = out.transpose(0, 1) if transposed else out
    if into is None:
        return out
    into.copy_(out)
    return into
