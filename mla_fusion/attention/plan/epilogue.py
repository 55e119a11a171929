"""The epilogue of an attention call: the product with W_UV and an fp8 quantization.

The quantizations are vLLM's, so that its linear layers take the result: `per_token_group_quant_fp8`
with groups of 128 and fp32 scales, which DeepGEMM wants rounded to powers of two (ue8m0), and
`static_scaled_fp8_quant` with one scale (csrc/quantization/w8a8/fp8 of vLLM 0.26 to 0.33).
"""

import dataclasses

import torch

from mla_fusion.kernels.arithmetic import FP8_DTYPES
from mla_fusion.kernels.inputs import check

GROUP = 128  # columns that share a scale
EPSILON = 1e-10  # vLLM's: a group's amax is at least this, and a scale that is rounded


def largest(dtype: torch.dtype) -> float:
    """Most that vLLM stores in a group of this fp8 type: 224, not 240, for e4m3fnuz."""
    return 224.0 if dtype == torch.float8_e4m3fnuz else torch.finfo(dtype).max


def in_groups(quantization: str) -> bool:
    """True if an `Epilogue.quantization` writes a scale for each group."""
    return quantization.startswith("group")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """Product and quantization behind the attention of a layer; A is the type of w_uv:

        latent[t, h]  = attention, merged in fp32, rounded to A
        y[t, h]       = latent[t, h] @ w_uv[h], summed in fp32, rounded to A
        out           = y; or, with scale [1], fp8(y * (1 / scale)); or, in groups of 128 columns,
                        scale = max(amax |y|, 1e-10) / largest, and fp8(y / scale)

    With ue8m0 such a scale is the least power of two that is not below it, nor below 1e-10.

    Attributes:
        w_uv: [H, L, V], bf16 or fp16, dense in L or in V.
        out: [T, H * V], dense in its last dimension; w_uv's type, or fp8 (e4m3) with a scale.
        scale: fp32. None: not quantized. [1]: given, per tensor. [T, H * V / 128], any strides:
            written, one for a token and group.
        ue8m0: whether the scales of groups are rounded.
    """

    w_uv: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor | None = None
    ue8m0: bool = False

    def __post_init__(self) -> None:
        for name in ("w_uv", "out", "scale"):
            value = getattr(self, name)
            ok = isinstance(value, torch.Tensor) or (value is None and name == "scale")
            check(f"epilogue.{name}", ok, "a tensor", value)
        check("epilogue.ue8m0", isinstance(self.ue8m0, bool), "True or False", self.ue8m0)

    @property
    def quantization(self) -> str:
        """ "none", "tensor", "group" or "group_ue8m0"."""
        if self.scale is None or self.scale.dim() == 1:
            return "none" if self.scale is None else "tensor"
        return "group_ue8m0" if self.ue8m0 else "group"

    @property
    def scale_strides(self) -> tuple[int, ...]:
        """Strides of a token and of a group of scales, in elements; 0 without scales of groups."""
        return (0, 0) if self.scale is None or self.scale.dim() == 1 else self.scale.stride()

    def validate(self, tokens: int, heads: int, latent: int) -> dict[str, torch.Tensor]:
        """Raise ValueError unless it is as above; else the tensors by name."""
        w, out, scale = self.w_uv, self.out, self.scale
        check("w_uv", w.dim() == 3 and w.shape[:2] == (heads, latent), f"[{heads}, {latent}, V]", w)
        check("w_uv", w.dtype in (torch.bfloat16, torch.float16), "bf16 or fp16", w.dtype)
        check("w_uv", 1 in w.stride()[1:], "dense in L or in V", w.stride())
        width = heads * w.shape[2]
        check("epilogue.out", out.shape == (tokens, width), f"[{tokens}, {width}]", out)
        check("epilogue.out", out.stride(1) == 1, "dense in its last dimension", out.stride())
        rounded = not self.ue8m0 or (scale is not None and scale.dim() == 2)
        check("epilogue.ue8m0", rounded, "False without scales of groups", self.ue8m0)
        tensors = {"w_uv": w, "epilogue.out": out}
        if scale is None:
            check("epilogue.out", out.dtype == w.dtype, f"{w.dtype} without a scale", out.dtype)
            return tensors
        check("epilogue.out", out.dtype in FP8_DTYPES, "fp8 (e4m3) with a scale", out.dtype)
        check("epilogue.scale", scale.dtype == torch.float32, "fp32", scale.dtype)
        ok = scale.shape == (1,) or (width % GROUP == 0 and scale.shape == (tokens, width // GROUP))
        check("epilogue.scale", ok, f"[1], or [{tokens}, {width} / {GROUP}]", scale)
        return tensors | {"epilogue.scale": scale}
