"""The quantization of a product with W_UV that `torch.bmm` has made, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mla_fusion import gpu
from mla_fusion.attention.plan.device_code import LEAST_SCALE, power_of_two
from mla_fusion.attention.plan.epilogue import GROUP, Epilogue, largest
from mla_fusion.kernels.launches import Launch
from mla_fusion.kernels.triton_rows import cast


# A stride of 1 is not specialized: the warm-up has scales in rows, a graph may have columns.
@triton.jit(do_not_specialize=["scale_ptr", "scale_stride_t", "scale_stride_g"])
def mla_quantize(
    y_ptr, out_ptr, scale_ptr, out_stride_t, scale_stride_t, scale_stride_g, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, QUANTIZATION: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Quantize GROUP columns, `program_id(1)`, of row `program_id(0)` of a product [T, WIDTH] by an
    `Epilogue.quantization`. LIMIT as `cast` has it."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = column < WIDTH
    y = tl.load(y_ptr + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if QUANTIZATION == "tensor":
        y *= tl.div_rn(1.0, tl.load(scale_ptr))
    else:
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(y), 0), LEAST_SCALE), LARGEST)
        if QUANTIZATION == "group_ue8m0":
            scale = power_of_two(scale)
        tl.store(scale_ptr + token * scale_stride_t + group * scale_stride_g, scale)
        y = tl.div_rn(y, scale)
    y = cast(y, 1.0, out_ptr.dtype.element_ty, LIMIT)
    tl.store(out_ptr + token * out_stride_t + column, y, mask=inside)


def launch_of(product: torch.Tensor, epilogue: Epilogue) -> Launch:
    """The launch for a dense product [T, H * V]."""
    out, (tokens, width) = epilogue.out, product.shape
    most = largest(out.dtype)
    stride_t, stride_g = epilogue.scale_strides
    arguments = {
        "y_ptr": product, "out_ptr": out, "scale_ptr": epilogue.scale,
        "out_stride_t": out.stride(0), "scale_stride_t": stride_t, "scale_stride_g": stride_g,
        "WIDTH": width, "GROUP": GROUP, "QUANTIZATION": epilogue.quantization, "LARGEST": most,
        # A negative LIMIT: the conversion clamps by itself.
        "LIMIT": -most if gpu.of(out.device).vendor == "NVIDIA" else most,
    }  # fmt: skip
    return Launch(mla_quantize, (tokens, -(-width // GROUP)), arguments, {"num_warps": 1})
