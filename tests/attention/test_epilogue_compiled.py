"""The epilogue compiled (not run) for AMD and NVIDIA: spills, memory, order of its reads."""

import dataclasses
import functools

import pytest

pytest.importorskip("triton")

from mla_fusion.attention.plan.epilogue import GROUP, Epilogue, in_groups
from mla_fusion.attention.triton import epilogue as epilogues
from mla_fusion.attention.triton import epilogue_kernel
from tests.attention import without_memory
from tests.attention.decodes import FP32, refresh
from tests.attention.without_memory import meta
from tests.kernels.compiled import FP8, as_on, compile_report
from tests.nightly import daily


def inputs(target, heads, *, values=128, latent=512, quantization="none", dense="latent"):
    """What follows a decode of 8 tokens, as `Inputs`."""
    w_uv = meta(heads, latent, values)
    if dense == "latent":
        w_uv = meta(heads, values, latent).transpose(1, 2)
    out, scale = meta(8, heads * values), None
    if quantization != "none":
        out = meta(8, heads * values, dtype=FP8[target])
        scale = meta(1, dtype=FP32)
    if in_groups(quantization):
        scale = meta(heads * values // GROUP, 8, dtype=FP32).T
    given = without_memory.inputs(heads, widths=(latent, 64), max_batch=8)
    refresh(given.plan, [1] * 8, [9] * 8)
    epilogue = Epilogue(w_uv, out, scale, quantization == "group_ue8m0")
    return dataclasses.replace(given, lse=None, epilogue=epilogue)


def arguments(target, heads, shape, **options):
    with as_on(target):
        return epilogues.arguments(inputs(target, heads, **options), shape)


@functools.cache
def report(target, heads, shape, **options):
    """Report of the epilogue, compiled and disassembled once for all tests."""
    args, constants = arguments(target, heads, shape, **options)
    return compile_report(target, epilogue_kernel.epilogue_kernel, args, constants)


# Whole rows of few splits, and slices.
CHOSEN, CHOSEN_OF_32 = (epilogues.choose(1, heads, 512, 128) for heads in (16, 32))
# Rows in slices; benchmarks/epilogue.py times them.
ONE_ROW, ROWS = epilogues.Shape(1, 128, 4, 16, 4), epilogues.Shape(8, 128, 4, 4, 8)
# No slices.
WHOLE = epilogues.Shape(1, 32, 1, 16, 4)


@pytest.mark.parametrize(
    "shape", daily([CHOSEN, CHOSEN_OF_32, ONE_ROW, ROWS, WHOLE], CHOSEN, ONE_ROW)
)
def test_only_w_uv_and_the_plan_are_read_before_the_decode_has_ended(shape):
    order = report("sm_90", 16, shape).order
    assert "PREEXIT" not in order, "the next kernel would begin early only in a benchmark"
    first, *others = " ".join(order).split("ACQBULK")
    assert "STG" not in first, order
    assert len(others) == 1 + (shape.whole > 0), "each division waits once"
    if shape.whole:  # which store once, and then come the slices
        assert others[0].count("STG") == 1, order
    # W_UV: 16 bytes a thread and load. The plan: one number each.
    wide = 2 * shape.columns * 512 // shape.slices // (32 * shape.warps * 16)
    for before in (first, *(part.rpartition("STG")[2] for part in others[:-1])):
        assert before.count("LDG.128") == wide, order


def test_a_slice_is_counted_after_its_sums_are_stored():
    """On sm_90 one thread fences for all, behind a barrier. On gfx942 a fence is of one wave, so
    each wave waits for its stores."""
    sync = report("sm_90", 16, ONE_ROW).sync
    count = sync.index("ATOMG")
    assert sync[count - 1 : count + 2] == ("MEMBAR.ALL.GPU", "ATOMG", "CCTL.IVALL"), sync
    assert "BAR" in sync[sync.index("STG") : count], sync
    sync = report("gfx942", 16, ONE_ROW).sync
    count = sync.index("atomic")
    last = max(i for i, name in enumerate(sync[:count]) if name == "store")
    assert sync[last + 1 : last + 3] == ("vmcnt(0)", "barrier"), sync
    assert sync[count - 2 : count + 3] == ("wbl2", "vmcnt(0)", "atomic", "vmcnt(0)", "inv"), sync
