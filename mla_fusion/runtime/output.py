"""The quantized output of an attention op: by the decode's epilogue, or as vLLM quantizes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_fusion.attention import Epilogue
from mla_fusion.attention.plan.epilogue import EPSILON, GROUP, in_groups, largest
from mla_fusion.ops import Quantization


@dataclass(frozen=True)
class QuantizedOutput:
    """The buffers of an attention op that quantizes, and the quantization of the unfused graph.

    values: fp8 [T, H * V]. scale: fp32, [T, H * V / 128], written; or one element, given.
    """

    values: torch.Tensor
    scale: torch.Tensor
    spelling: Quantization

    @classmethod
    def for_warm_up(
        cls, output: torch.Tensor, kind: str, dtype: torch.dtype
    ) -> QuantizedOutput | None:
        """New buffers for `output`, by `Epilogue.quantization`; None for "none"."""
        if kind == "none":
            return None
        values = torch.empty_like(output, dtype=dtype)
        spelling = next(each for each in Quantization if each.kind == kind)
        groups = (output.shape[0], output.shape[1] // GROUP)
        scale = torch.ones(groups if in_groups(kind) else 1, device=output.device)
        return cls(values, scale, spelling)

    def epilogue(self, w_uv: torch.Tensor, rows: int) -> Epilogue:
        """The epilogue that writes the first `rows` rows."""
        scale = self.scale[:rows] if in_groups(self.spelling.kind) else self.scale.view(1)
        return Epilogue(w_uv, self.values[:rows], scale, self.spelling == Quantization.GROUP_UE8M0)

    def clear_padding(self, rows: int) -> None:
        """Zero what an epilogue of `rows` rows does not write."""
        if rows < len(self.values):
            self.values[rows:].view(torch.uint8).zero_()
            if in_groups(self.spelling.kind):
                self.scale[rows:].zero_()

    def quantize(self, output: torch.Tensor) -> None:
        """Quantize all rows of `output` [T, H * V] by what the unfused graph called, a native one
        with a correctly rounded reciprocal of the scale, as Inductor's C++; its Triton code may be
        one step off."""
        values, scale, most = self.values, self.scale, largest(self.values.dtype)
        if in_groups(self.spelling.kind):
            columns = scale.stride(0) < scale.stride(1)
            ue8m0 = self.spelling == Quantization.GROUP_UE8M0
            torch.ops._C.per_token_group_fp8_quant(
                output, values, scale, GROUP, EPSILON, -most, most, ue8m0, columns, False
            )
        elif self.spelling == Quantization.TENSOR:
            torch.ops._C.static_scaled_fp8_quant(values, output, scale, None)
        else:
            wide = output.float() * scale.reciprocal()
            values.copy_(wide.clamp(-most, most).to(values.dtype))
