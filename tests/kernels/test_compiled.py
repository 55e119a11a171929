"""The Triton kernel compiled (not run) for AMD and NVIDIA: registers, spills, instructions."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.kernels import dispatch, triton_kernels
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.kernels.inputs import Inputs
from tests.attention.without_memory import meta
from tests.gpus import imitated
from tests.kernels.compiled import FP8, TARGETS, compile_report, read_amd, specialize
from tests.nightly import daily

DEFAULTS = {tokens: dispatch.default_plan(tokens, 16, 512) for tokens in (1, 8, 64, 512)}
DEEPSEEK = Widths(128, 64, 512)


def arguments(target, plan, tokens, fp8, neox=False, widths=DEEPSEEK, factor=None):
    """Arguments and options of a launch for a layer of 16 heads on a GPU, on the meta device."""
    nope, rope, latent = widths
    slots, scale = meta(tokens, dtype=torch.int64), meta(1, dtype=torch.float32)
    inputs = Inputs(
        meta(tokens, 16, nope + rope), meta(16, nope, latent), meta(tokens, latent),
        meta(tokens, 2112)[:, -rope:], meta(64, 64, latent + rope, dtype=fp8), slots, slots,
        meta(4096, rope, dtype=torch.float32), scale, scale, neox,
        meta(tokens, 16, latent + rope, dtype=fp8), factor and meta(tokens, dtype=factor),
    )  # fmt: skip
    with imitated(target):
        return provider.launch_arguments(plan, inputs)


def report(target, given):
    return compile_report(target, triton_kernels.mla_prep, (), given)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_what_a_launch_knows_of_its_arguments(target):
    """On AMD that a tensor lies within 2 GiB, which gives it buffer instructions; everywhere
    alignments, and integers of 1."""
    given = arguments(target, DEFAULTS[64], 64, FP8[target])
    names = triton_kernels.mla_prep.arg_names
    given["cache_ptr"] = meta(2**16, 64, 576, dtype=FP8[target])
    source, _ = specialize(target, triton_kernels.mla_prep, (), given)
    near = ["tt.pointer_range", 32]
    for index, name in enumerate(names):
        value, known = given[name], source.attrs.get((index,), [])
        if isinstance(value, torch.Tensor):
            assert ["tt.divisibility", 16] in known
            assert (near in known) == (target != "sm_90" and name != "cache_ptr"), name
        else:
            assert near not in known
    assert source.constants[names.index("w_col"),] == 1
    assert source.signature["tokens"] == "i32" and not source.attrs.get((names.index("tokens"),))


def test_a_launch_may_begin_early_where_the_gpu_can():
    for target in TARGETS:
        options = arguments(target, DEFAULTS[64], 64, torch.bfloat16)
        early = target in ("sm_90", "sm_100", "sm_103", "sm_120")
        assert (options["PDL"], options.get("launch_pdl", False)) == (early, early)


@pytest.mark.nightly
def test_measured_plans_compile_without_spills():
    """Every plan that was measured on sm_90 with an fp8 query."""
    measured = (row for row in dispatch.measured() if row.arch == "sm_90" and row.fp8)
    plans = {(row.widths, row.plan) for row in measured}
    wide = Plan(block_m=64, block_n=256, m_tiles=8, rope_rows=256, cache_tokens=16)
    for nope in (64, 256):  # the largest tiles, where these widths are the nearest
        plans.add((Widths(nope, 128, 1024), dispatch.fit(wide, nope, 128, 2)))
    for widths, plan in plans:
        tokens = 1 if plan.block_m == 1 else 512
        result = report("sm_90", arguments("sm_90", plan, tokens, FP8["sm_90"], widths=widths))
        assert result.spills == 0, (widths, plan, result)


@pytest.mark.parametrize("tile", daily([(128, 4), (128, 8), (256, 8)], (256, 8)))
def test_large_tiles_are_stored_from_registers(tile):
    """The loop over token tiles has barriers for the query's tile only, not for the output."""
    block_n, num_warps = tile
    plan = Plan(block_m=64, block_n=block_n, m_tiles=8, rope_rows=32, num_warps=num_warps)
    given = arguments("sm_90", plan, 512, FP8["sm_90"])
    assert given["FORM"].DIRECT
    direct = report("sm_90", given)
    assert direct.spills == direct.hot_reads == 0 and direct.hot_barriers <= 2, direct
    # A planted error: without DIRECT the output goes through shared memory.
    given["FORM"] = dataclasses.replace(given["FORM"], DIRECT=False)
    exchanged = report("sm_90", given)
    assert exchanged.hot_reads > 0 and exchanged.hot_barriers > 2, exchanged


def test_aligned_strides_give_wide_query_loads():
    """An unaligned row stride gets a variant of its own; the aligned one keeps wide loads."""
    given = arguments("sm_90", DEFAULTS[64], 64, torch.float8_e4m3fn)
    wide = report("sm_90", given)
    given["FORM"] = dataclasses.replace(given["FORM"], ALIGN=1)
    narrow = report("sm_90", given)
    assert wide.narrow_loads < narrow.narrow_loads, (wide, narrow)


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_rotation_is_not_contracted(target):
    """No fused multiply-add: it would round x * cos - y * sin unlike the reference.

    With a bf16 query and cache no division by a scale is left, which consists of them.
    """
    given = arguments(target, DEFAULTS[64], 64, torch.bfloat16)
    for fusion, seen in ((False, False), (True, True)):
        assert fusion or given["enable_fp_fusion"] is False
        result = report(target, {**given, "enable_fp_fusion": fusion})
        assert (result.contractions > 0) is seen


def test_spills_are_seen():
    """A planted error: with 40 registers a large tile has to spill."""
    plan = Plan(block_m=32, block_n=256, num_warps=4)
    given = arguments("sm_90", plan, 64, torch.float8_e4m3fn)
    given["maxnreg"] = 40
    result = report("sm_90", given)
    assert result.spills > 0, result
    spilled = ".vgpr_count: 64\n.vgpr_spill_count: 3\n.sgpr_spill_count: 0\n"
    assert read_amd(f"{spilled}.private_segment_fixed_size: 12\n", 0).spills == 15
