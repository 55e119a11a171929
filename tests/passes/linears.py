"""The linear layer behind an attention, with the input quantizations of vLLM's own code.

A CPU build has neither vLLM's fp8 kernels nor its fp8 products: the kernels' formulas are written
here in plain torch, and one product of dequantized values stands in for all of vLLM's.
"""

from types import SimpleNamespace
from unittest import mock

import torch
import vllm.model_executor.kernels.linear  # noqa: F401  registers the ops of linear layers
from torch.nn.functional import linear
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils import fp8_utils
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from tests.passes import declare

FP8 = torch.float8_e4m3fn
GROUP = 128
LIMIT = torch.tensor(448.0)

# A GPU, in the eyes of vLLM's code.
_GPU = SimpleNamespace(
    is_cuda_alike=lambda: True, is_xpu=lambda: False, fp8_dtype=lambda: FP8, is_rocm=lambda: False
)
_NATIVE = SimpleNamespace(
    is_group_quant=False, static=True, group_shape=GroupShape.PER_TENSOR, group_size=GROUP,
    num_token_padding=None, use_ue8m0=False, column_major_scales=False,
)  # fmt: skip


def _group(size=GROUP, powers_of_two=False, **layout):
    def quantize(x, scale):
        quant = fp8_utils.per_token_group_quant_fp8
        return quant(x, size, use_ue8m0=powers_of_two, **layout)

    return quantize


def _static_op(x, scale):
    out = torch.empty(x.shape, dtype=FP8)
    torch.ops._C.static_scaled_fp8_quant(out, x, scale, (-1, -1))
    return out, scale


def _packed(x, scale):
    return fp8_utils.per_token_group_quant_fp8_packed_for_deepgemm(x, GROUP, use_ue8m0=True)


def _per_token_op(x, scale):
    out, scales = torch.empty(x.shape, dtype=FP8), torch.empty((x.shape[0], 1))
    torch.ops.mla_fusion_tests.per_token_quant(out, x, scales)
    return out, scales


# name -> what makes fp8 values and scales of the attention's output [T, H * V]. The first are those
# that fuse: vLLM's `QuantFP8` as a custom op and in aten ops.
FUSED = {
    "group": _group(),
    "group_columns": _group(column_major_scales=True),
    "group_tma": _group(column_major_scales=True, tma_aligned_scales=True),
    "group_ue8m0": _group(powers_of_two=True, column_major_scales=True, tma_aligned_scales=True),
    "tensor": _static_op,
    "tensor_native": lambda x, scale: QuantFP8.forward_native(_NATIVE, x, scale),
}
OTHERS = {
    "group_packed": _packed,
    "group_of_64": _group(64),
    "group_native": lambda x, scale: QuantFP8._quantize_group_native(_NATIVE, x),
    "per_token": _per_token_op,
}
QUANTIZATIONS = {**FUSED, **OTHERS}


def kind(quantized):
    """Of one of `FUSED`, as `Epilogue.quantization`."""
    return quantized if quantized == "group_ue8m0" else quantized.partition("_")[0]


def project(quantized, x, scale, weight):
    """x [T, H * V] times the transpose of `weight` [n, H * V]: "" unquantized, "opaque" quantized
    inside an op of vLLM, or one of `QUANTIZATIONS`."""
    if not quantized:
        return linear(x, weight)
    if quantized == "opaque":
        gemm = torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm
        return gemm(x, weight.to(FP8), scale, GROUP, False)
    values, scales = QUANTIZATIONS[quantized](x, scale)
    return torch.ops.mla_fusion_tests.fp8_linear(values, scales, weight.t())


def on_a_gpu():
    """vLLM's code takes the branches of a GPU meanwhile."""
    return mock.patch.object(fp8_utils, "current_platform", _GPU)


def group_quantize(
    x, values, scales, group_size, eps, fp8_min, fp8_max, scale_ue8m0, transposed, tma_aligned
):
    """As csrc/libtorch_stable/quantization/w8a8/fp8/per_token_group_quant.cu in vLLM computes."""
    groups = x.float().unflatten(1, (-1, group_size))
    scale = groups.abs().amax(-1).clamp(min=eps) / torch.tensor(fp8_max)
    if scale_ue8m0:
        scale = scale.clamp(min=1e-10).log2().ceil().exp2()
    scales.copy_(scale)
    values.copy_((groups / scale[..., None]).clamp(fp8_min, fp8_max).flatten(1).to(values.dtype))


def static_quantize(values, x, scale, group_shape=None):
    """As csrc/libtorch_stable/quantization/w8a8/fp8/common.cu in vLLM, one scale."""
    assert scale.numel() == 1
    values.copy_((x.float() * (1.0 / scale.view(1))).clamp(-LIMIT, LIMIT).to(values.dtype))


def _per_token_quant(values, x, scales):
    scales.copy_(x.float().abs().amax(1, keepdim=True) / LIMIT)
    values.copy_((x.float() / scales).to(values.dtype))


def _fp8_linear(x, scales, weight):
    wide = x.float()
    if scales.numel() > 1 or scales.dim() == 2:
        wide = wide * scales.repeat_interleave(x.shape[1] // scales.shape[1], 1)
    else:
        wide = wide * scales
    return (wide @ weight.float()).to(weight.dtype)


# CUDA ops with bodies for a CPU, but for packed scales, which nothing here unpacks. One gets an
# overload: the CPU build declares it without arguments.
_GROUPED = "Tensor input, Tensor(a!) output_q, Tensor(b!) output_s, int group_size, float eps, "
_GROUPED += "float fp8_min, float fp8_max"
_SCALED = "bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned"
_ONE = "Tensor(a!) result, Tensor input, Tensor scale, int[]? group_shape=None"
_PER_TOKEN = "Tensor(a!) result, Tensor input, Tensor(b!) scale"
declare.op("_C", f"per_token_group_fp8_quant({_GROUPED}, {_SCALED}) -> ()", group_quantize)
declare.op("_C", f"static_scaled_fp8_quant.cpu({_ONE}) -> ()", static_quantize)
declare.op("_C", f"per_token_group_fp8_quant_packed({_GROUPED}) -> ()")
declare.op("mla_fusion_tests", f"per_token_quant({_PER_TOKEN}) -> ()", _per_token_quant)
declare.op(
    "mla_fusion_tests", "fp8_linear(Tensor x, Tensor scales, Tensor weight) -> Tensor", _fp8_linear,
    fake=lambda x, scales, weight: weight.new_empty((x.shape[0], weight.shape[1])),
)  # fmt: skip
_STATIC = torch.ops._C.static_scaled_fp8_quant
STATIC_QUANTIZE = getattr(_STATIC, "cpu", _STATIC.default)  # the one with arguments
