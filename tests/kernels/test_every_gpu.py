"""Every Triton kernel compiled (not run) for every GPU on which vLLM serves MLA: no error, no spill
in a loop over tiles, shared memory within that GPU's limit. By day once for each kernel and GPU.

Kernels for Hopper and for CDNA 3 and 4 alone have tests of their own.
"""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.aiter import entries_kernel
from mla_fusion.attention.plan import chunks_triton, planner_triton
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4
from mla_fusion.attention.triton import decode_kernel, quantize_kernel, reduce_kernel
from mla_fusion.kernels import dispatch, triton_kernels
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Widths
from tests.attention import without_memory
from tests.attention.decodes import BF16, FP32, plan_for
from tests.attention.without_memory import meta
from tests.gpus import imitated
from tests.kernels.compiled import AMD, FP8, LDS, NVIDIA, TARGETS, compile_report
from tests.kernels.test_compiled import arguments

LAYOUTS = {"V3.2": FP8_DS_MLA, "V4": FP8_DS_MLA_V4}


def region(target, dtype, tokens, heads=16, nope=128, rope=64, latent=512, also=""):
    """The fused region, by the plan of a GPU that was not measured."""
    widths = Widths(nope, rope, latent)
    plan = dispatch.default_plan(tokens, heads, latent)
    plan = dispatch.fit(plan, provider._pad(nope), provider._pad(rope), 2)
    options = {"neox": {"neox": True}, "factor": {"factor": FP32}}.get(also, {})
    given = arguments(target, plan, tokens, dtype, widths=widths, **options)
    return triton_kernels.mla_prep, (), given


def decode(target, dtype, heads, latent=512, rope=64, layout=None, **options):
    """The portable decode; over a byte cache with a bf16 query."""
    if layout is not None:
        layout = LAYOUTS[layout]
        latent, rope = layout.latent, layout.width - layout.latent
        options |= {"layout": layout, "kv_dtype": dtype, "sparse": True}
        dtype = BF16
    options["widths"] = latent, rope
    launch = without_memory.launch_of(target, decode_kernel, heads, dtype, **options)
    return launch.kernel, launch.positional, launch.options


def reduction(target, dtype, heads, tiles):
    """The reduction of so many tiles."""
    given = without_memory.inputs(heads, BF16)
    given.plan.step = Step(tiles // given.plan.layout.fold, tiles, 1)
    with imitated(target):
        launch = reduce_kernel.launch_of(given)
    return launch.kernel, launch.positional, launch.options


def quantized(target, dtype, quantization):
    """The quantization alone."""
    epilogue = without_memory.behind(target, 16, quantization=quantization).epilogue
    with imitated(target):
        launch = quantize_kernel.launch_of(meta(8, 2048), epilogue)
    return launch.kernel, launch.positional, launch.options


def planner(target, dtype, max_batch, ctas, heads, **options):
    """The planner on the device."""
    launched = []
    plan = plan_for(max_batch=max_batch, ctas=ctas, num_heads=heads, **options)
    module, name = planner_triton, "mla_plan"
    if plan.rules.chunk:
        module, name = chunks_triton, "mla_plan_chunks"
    kernel = getattr(module, name)
    recorder = dict.fromkeys(
        ((1,), (8,)), lambda *args, **options: launched.append((args, options))
    )
    with mock.patch.object(module, name, recorder):
        planner_triton.fill(plan, torch.arange(9).int(), torch.ones(8).int(), 1)
    return kernel, *launched[0]


def chunks(target, dtype, *sizes):
    """The batch-invariant planner."""
    return planner(target, dtype, *sizes, batch_invariant=True, max_kv_len=512, v_head_dim=16)


def entries(target, dtype, page):
    """The list of pages that AITER reads."""
    names = ("found", "kv_indptr", "block_table")
    arguments = {name: meta(9, dtype=torch.int32) for name in names}
    arguments |= {"table_stride": 2560, "capacity": 2**26, "PAGE": page, "num_warps": 4}
    constants = {"BLOCK": entries_kernel.BLOCK, "CTAS": entries_kernel.CTAS}
    return entries_kernel.mla_entries, (), arguments | constants


# What is launched, with which type of cache or result, and how.
DAILY = [
    (region, "bf16", 8), (decode, "bf16", 16), (reduction, "bf16", 16, 8),
    (planner, "bf16", 256, 264, 128), (quantized, "fp8", "tensor"),
]  # fmt: skip
# These by day on some GPUs too, where a mistake was found or is likely.
SOME = {
    (region, "fp8", 64): ("gfx942", "sm_90"),
    (region, "fp8", 512, 128): ("sm_89", "gfx950"),
    (region, "fp8", 512, 16, 128, 64, 512, "neox"): ("sm_90", "gfx942"),
    (region, "fp8", 64, 16, 128, 64, 512, "factor"): ("sm_90", "gfx942"),
    (region, "bf16", 512, 128): ("sm_86",),
    (region, "bf16", 512, 16, 64, 64, 256): ("sm_120", "gfx942"),
    (decode, "fp8", 16): ("sm_90", "gfx942"),
    (decode, "bf16", 64, 1024, 128): ("sm_86", "sm_120"),
    (decode, "fp8", 64): ("sm_89", "gfx950"),
    (decode, "fp8", 16, 512, 64, "V3.2"): ("gfx950",),
    (decode, "fp8", 16, 512, 64, "V4"): ("sm_90",),
    (quantized, "fp8", "group"): ("gfx942",),
    (reduction, "bf16", 128, 256): ("sm_90",),
    (planner, "bf16", 1024, 264, 128): ("sm_90",),
    (chunks, "bf16", 1024, 264, 128): ("sm_90", "gfx942"),
    (entries, "bf16", 1): ("gfx942",),
    (entries, "bf16", 24): ("gfx950",),
}  # fmt: skip
NIGHTLY = [
    *((region, kind, tokens, heads) for kind in ("bf16", "fp8") for tokens in (1, 8, 64, 512)
      for heads in (16, 128)),
    *((region, "bf16", tokens, 16, *widths) for tokens, *widths in (
        (1, 64, 64, 256), (64, 64, 32, 256), (64, 192, 64, 512), (512, 128, 64, 320),
        (512, 256, 128, 1024))),
    *((decode, kind, heads) for kind in ("bf16", "fp8") for heads in (16, 64)),
    *((decode, kind, *widths) for kind, *widths in (
        ("fp8", 16, 256, 64), ("bf16", 64, 256, 64), ("fp8", 16, 256, 32), ("bf16", 16, 320, 64),
        ("bf16", 64, 320, 64), ("fp8", 64, 512, 128), ("bf16", 16, 640, 96),
        ("bf16", 16, 1024, 128))),
    *((decode, "fp8", 64, 512, 64, layout) for layout in LAYOUTS),
    *((reduction, "bf16", heads, tiles) for heads in (16, 128) for tiles in (1, 8, 32, 256)),
    (quantized, "fp8", "group_ue8m0"),
    (planner, "bf16", 1024, 132, 16), (planner, "bf16", 1, 132, 16),
]  # fmt: skip
EVERY = dict.fromkeys([*DAILY, *SOME, *NIGHTLY])


def cases():
    """A parameter for each launch and GPU; those of fp8 only where Triton has it."""
    for launch in EVERY:
        what, kind, *how = launch
        for target in TARGETS:
            if kind == "fp8" and target not in FP8:
                continue
            by_day = launch in DAILY or target in SOME.get(launch, ())
            name = f"{target}-{what.__name__}-{kind}-{'-'.join(map(str, how))}"
            marks = () if by_day else pytest.mark.nightly
            yield pytest.param(target, launch, id=name, marks=marks)


@pytest.mark.parametrize(("target", "launch"), [*cases()])
def test_it_compiles_and_fits(target, launch):
    what, kind, *how = launch
    kernel, args, options = what(target, BF16 if kind == "bf16" else FP8[target], *how)
    result = compile_report(target, kernel, args, options)
    assert result.shared <= LDS[target], result
    assert result.registers <= (512 if target in AMD else 255), result
    # Scalar registers of AMD's go to lanes of a vector register.
    assert result.memory_spills == result.hot_spills == 0, result
    if what is not decode and target in NVIDIA:
        # A dozen accesses outside of a loop over tiles, but none where it was measured.
        assert result.spills <= (0 if target == "sm_90" else 12), result
    if what in (planner, chunks, entries):
        assert target in NVIDIA or result.spills == 0, result
    if what in (planner, chunks):
        # Only reductions: a few bytes for each warp. Lanes that change threads take 1 KiB and more.
        assert result.shared <= 512, result
    if what in (region, decode):
        assert result.wide_loads > 0, result
        assert bool(result.matrix) == (what is not region or how[0] > 1), result
    if what is region:
        # Packed conversions, which gfx90a has not, and the tallest matrix instructions.
        assert (result.fp8_converts > 0) == (kind == "fp8") or target == "gfx90a", result
        tall = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(target)
        assert not tall or how[0] < 64 or len(how) > 2 or tall in result.matrix, result
    if len(how) == 4 and target in NVIDIA:
        # Values of a byte cache are not loaded one by one; the scales of V4 are bytes.
        assert result.narrow_loads <= (2 if how[3] == "V4" else 0), result
