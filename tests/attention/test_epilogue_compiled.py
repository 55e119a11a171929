"""The epilogue compiled (not run) for AMD and NVIDIA: spills, memory, order of its reads."""

import functools
import itertools

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
    """Every shape that `choose` has, quantization by group or not, with heads and columns of a
    head that it has it for: (shape, quantization, heads, values)."""
    every = itertools.product(
        (64, 128, 256), ("none", "group"), (8, 16, 32, 64, 128), (1, 2, 4, 8, 16)
    )
    found = {}
    for values, quantization, heads, slots in every:
        shape = epilogues.choose(slots, heads, values, quantization)
        if shape is not None:
            found.setdefault((shape, quantization), (heads, values))
    return [(*kind, *layer) for kind, layer in found.items()]


def cases():
    """All shapes for all targets; the suite of every commit has the first of one row, and of more
    with matrix instructions."""
    first = {case[0].rows > 1: case for case in reversed(shapes())}
    for target, case in itertools.product(FP8, shapes()):
        kept = case in (first.values() if target == "sm_90" else [first.get(target == "gfx942")])
        marks = () if kept else pytest.mark.nightly
        yield pytest.param(target, *case, marks=marks, id=f"{target}-{case[0]}-{case[1]}")


@pytest.mark.parametrize("target, shape, quantization, heads, values", list(cases()))
def test_epilogue(target, shape, quantization, heads, values):
    for dense in ("latent", "values"):
        result = report(target, heads, shape, values=values, quantization=quantization, dense=dense)
        # Scalar registers of AMD's go to lanes of a vector register.
        amd = target.startswith("gfx")
        assert (result.memory_spills if amd else result.spills) == 0, (dense, result)
        assert result.shared <= LDS[target] and result.wide_loads > 0, result
        assert bool(result.matrix) == (shape.rows > 1), result


@pytest.mark.parametrize("slots, quantization", [(1, "none"), (1, "group"), (8, "none")])
def test_only_w_uv_and_the_plan_are_read_before_the_decode_has_ended(slots, quantization):
    shape = epilogues.choose(slots, 16, 128, quantization)
    assert shape is not None
    order = report("sm_90", 16, shape, quantization=quantization, pdl=True).order
    assert order[0] == "PREEXIT", "the next kernel may be launched early too"
    before = order[: order.index("ACQBULK")]
    # W_UV: 16 bytes a thread and load. The plan: one number each.
    wide = 2 * shape.columns * 512 // (32 * shape.warps * 16)
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
