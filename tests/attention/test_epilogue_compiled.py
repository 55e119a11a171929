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


CHOSEN = epilogues.choose(1, 16, 128)
# By matrix instructions; benchmarks/epilogue.py times them.
SOME, GROUPED = epilogues.Shape(4, 64, 4, 8), epilogues.Shape(4, 128, 4, 8)


@pytest.mark.parametrize("dense", ["latent", "values"])
@pytest.mark.parametrize(
    "target, shape, quantization",
    [*((target, CHOSEN, "none") for target in FP8), ("sm_90", CHOSEN, "tensor"),
     ("sm_90", SOME, "none"), ("sm_90", GROUPED, "group")],
)  # fmt: skip
def test_epilogue(target, shape, quantization, dense):
    pdl = target == "sm_90"
    result = report(target, 16, shape, pdl=pdl, quantization=quantization, dense=dense)
    # Scalar registers of AMD's go to lanes of a vector register.
    amd = target.startswith("gfx")
    assert (result.memory_spills if amd else result.spills) == 0, result
    assert result.shared <= LDS[target] and result.wide_loads > 0, result
    assert bool(result.matrix) == (shape.rows > 1), result


def test_only_w_uv_and_the_plan_are_read_before_the_decode_has_ended():
    order = report("sm_90", 16, CHOSEN, pdl=True).order
    assert order[0] == "PREEXIT", "the next kernel may be launched early too"
    before = order[: order.index("ACQBULK")]
    # W_UV: 16 bytes a thread and load. The plan: one number each.
    wide = 2 * CHOSEN.columns * 512 // (32 * CHOSEN.warps * 16)
    assert before.count("LDG.128") == wide, order
    assert "STG" not in before
    pieces = [i for i, name in enumerate(order) if name == "LDG.128"][wide:]
    assert all("ACQBULK" in order[:i] for i in pieces), order


def test_the_quantization():
    for target, quantization in (("sm_90", "group"), ("gfx942", "tensor")):
        epilogue = inputs(target, 16, quantization=quantization).epilogue
        args, options = epilogues.quantize_arguments(meta(8, 2048), epilogue)
        result = compile_report(target, epilogue_kernel.quantize_kernel, args, options)
        assert result.spills == 0, result
