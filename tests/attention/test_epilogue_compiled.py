"""The epilogue compiled (not run) for AMD and NVIDIA: spills, memory, order of its reads."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import epilogue_kernel
from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.epilogue import GROUP, Epilogue
from mla_fusion.attention.validate import Inputs
from tests.attention.decodes import BF16, FP32, plan_for, refresh
from tests.kernels.compiled import FP8, LDS, compile_report


def meta(*shape, dtype=BF16):
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(target, heads, *, values=128, latent=512, quantization="none", dense="latent"):
    """What follows a decode of 8 tokens, as `Inputs`."""
    w_uv = meta(heads, latent, values)
    if dense == "latent":
        w_uv = meta(heads, values, latent).transpose(1, 2)
    out, scale = meta(8, heads * values), None
    if quantization != "none":
        out = meta(8, heads * values, dtype=FP8[target])
        scale = meta(1, dtype=FP32)
    if quantization == "group":
        scale = meta(heads * values // GROUP, 8, dtype=FP32).T
    plan = plan_for(num_heads=heads, max_batch=8, v_head_dim=latent)
    refresh(plan, [1] * 8, [9] * 8)
    q, kv, latents = meta(8, heads, latent + 64), meta(9, 64, latent + 64), meta(8, heads, latent)
    unused = meta(8, 9, dtype=torch.int32)
    return Inputs(
        q, kv, plan, unused, 0.1, None, None, latents, None, Epilogue(w_uv, out, scale)
    )  # fmt: skip


@functools.cache
def report(target, heads, shape, *, pdl=False, **options):
    """Report of the epilogue, compiled and disassembled once for all tests."""
    hip = target.startswith("gfx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "7" if hip else None)
        args, constants = epilogues.arguments(inputs(target, heads, **options), shape)
    if not hip:
        constants["LIMIT"] = -constants["LARGEST"]
    if pdl:
        constants |= {"PDL": True, "launch_pdl": True}
    return compile_report(target, epilogue_kernel.epilogue_kernel, args, constants)


def shapes():
    """Every shape that `choose` has for one head dimension, and heads it has it for."""
    found = {}
    for values in (64, 128, 256):
        for quantization in ("none", "tensor", "group"):
            for heads in (8, 16, 32, 64, 128):
                for slots in (1, 2, 4, 8, 16):
                    shape = epilogues.choose(slots, heads, values, quantization)
                    if shape is not None:
                        found.setdefault((shape, quantization == "group"), (heads, values))
    return [(shape, group, *at) for (shape, group), at in found.items()]


@pytest.mark.parametrize("shape, group, heads, values", shapes(), ids=str)
@pytest.mark.parametrize("target", FP8)
def test_epilogue(target, shape, group, heads, values):
    for dense in ("latent", "values"):
        result = report(
            target, heads, shape, values=values, quantization="group" if group else "none",
            dense=dense,
        )  # fmt: skip
        assert result.spills == 0, (dense, result)
        assert result.shared <= LDS[target] and result.wide_loads > 0, result
        assert bool(result.matrix) == (shape.rows > 1), result
