"""What the CPU double of kernels with specialized warps refuses, in a kernel of two partitions.

One copies tiles into a single buffer, the other adds them up and gives the buffer back.
"""

import types

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc

from mla_fusion.attention.hopper.copy import barrier, tma_load
from tests.attention.decodes import BF16, FP32
from tests.attention.gluon_warps import Machine

TILES, SIZE = 5, 64


@gluon.jit
def copy(box, tile, full, free, COUNT: gl.constexpr):
    """The copying partition."""
    for i in range(COUNT):
        mbarrier.wait(free, (i % 2) ^ 1)
        mbarrier.expect(full, tile.shape[0] * tile.shape[1] * 2)
        tma_load(box, [i * tile.shape[0], 0], full, tile)


@gluon.jit
def add(tile, full, free, out_ptr, COUNT: gl.constexpr, HOW: gl.constexpr):
    """The other one; HOW it gives the buffer back."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    col = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    total = gl.zeros(tile.shape, gl.float32, layout)
    for i in range(COUNT):
        mbarrier.wait(full, i % 2)
        values = tile.load(layout)
        if HOW == "used":
            total = total + values.to(gl.float32)
        if HOW == "stored":
            tile.store(values)
        if HOW == "fenced":
            fence_async_shared()
        if HOW != "one thread":
            barrier()
        mbarrier.arrive(free, count=1)
        if HOW != "used":
            total = total + values.to(gl.float32)
    gl.store(out_ptr + row[:, None] * tile.shape[1] + col[None, :], total)


@gluon.jit
def kernel(out_ptr, box, COUNT: gl.constexpr, HOW: gl.constexpr):
    """Both partitions."""
    shape: gl.constexpr = box.block_type.shape
    tile = gl.allocate_shared_memory(gl.bfloat16, shape, box.layout)
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(made.index(0), count=1)
    mbarrier.init(made.index(1), count=1)
    fence_async_shared()
    barrier()
    full, free = made.index(0), made.index(1)
    gl.warp_specialize(
        [(add, (tile, full, free, out_ptr, COUNT, HOW)), (copy, (box, tile, full, free, COUNT))],
        [1],
        [24],
    )


def run(how, seed):
    """What the kernel writes, and what it should."""
    data = torch.randn(TILES * SIZE, SIZE, dtype=BF16)
    box = types.SimpleNamespace(
        base=data, shape=data.shape, strides=data.stride(), block_shape=[SIZE, SIZE], layout=None
    )
    out = torch.full((SIZE, SIZE), torch.nan)
    Machine(seed).launch(kernel, (1,), (out, box), {"COUNT": TILES, "HOW": how})
    return out, data.to(FP32).view(TILES, SIZE, SIZE).sum(0)


@pytest.mark.parametrize("how", ["used", "fenced"])
def test_a_buffer_is_free_behind_the_use_of_what_was_read_or_a_fence(how):
    for seed in range(8):
        out, want = run(how, seed)
        torch.testing.assert_close(out, want)


def test_no_barrier_ends_a_load():
    """A warp passes it with loads under way, and the copy engine keeps no order with them."""
    with pytest.raises(AssertionError, match="threads still load"):
        for seed in range(8):
            run("barrier", seed)


def test_stores_before_a_copy_are_fenced():
    with pytest.raises(AssertionError, match="stored without a fence"):
        run("stored", 0)


def test_one_thread_arrives_for_all_behind_a_barrier():
    with pytest.raises(AssertionError, match="before the others"):
        run("one thread", 0)


@gluon.jit
def widen_early(out_ptr, KEPT: gl.constexpr):
    """A product of values in registers, which its wait keeps, or not."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    right = gl.allocate_shared_memory(gl.float16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    gl.warp_specialize([(multiply, (right, layout, KEPT))], [], [])


@gluon.jit
def multiply(right, layout: gl.constexpr, KEPT: gl.constexpr):
    """The only partition."""
    left = gl.full([64, 64], 1.0, gl.float16, gl.DotOperandLayout(0, layout, 2))
    sums = gl.zeros([64, 64], gl.float32, layout)
    sums = warpgroup_mma(left, right, sums, is_async=True)
    if KEPT:
        sums, left = warpgroup_mma_wait(0, [sums, left])
    else:
        sums = warpgroup_mma_wait(0, [sums])


def test_a_wait_keeps_the_registers_that_a_product_reads():
    out = torch.zeros(1)
    Machine(0).launch(widen_early, (1,), (out,), {"KEPT": True})
    with pytest.raises(AssertionError, match="does not keep"):
        Machine(0).launch(widen_early, (1,), (out,), {"KEPT": False})


@gluon.jit
def wait_late(out_ptr, work_indptr_ptr, PDL: gl.constexpr, EARLY: gl.constexpr):
    """A partition reads the plan, and then does something in front of its wait, or nothing."""
    gl.warp_specialize([(work_early, (out_ptr, work_indptr_ptr, EARLY))], [], [])
    if PDL:
        gdc.gdc_wait()


@gluon.jit
def work_early(out_ptr, plan_ptr, EARLY: gl.constexpr):
    """The only partition."""
    number = gl.load(plan_ptr)
    if EARLY == "read":
        number = gl.load(out_ptr)
    if EARLY == "written":
        gl.store(out_ptr, number)
    if EARLY == "launched":
        gdc.gdc_launch_dependents()
    gdc.gdc_wait()
    gl.store(out_ptr, gl.load(out_ptr) + number)
    gdc.gdc_launch_dependents()


def test_only_the_plan_is_read_before_the_kernel_in_front_has_ended():
    for early in ("", "read", "written", "launched"):
        for pdl in (True, False):
            out, plan = torch.ones(1).int(), torch.ones(1).int()
            options = {"PDL": pdl, "EARLY": early}
            if pdl and early:
                with pytest.raises(AssertionError, match=f"{early} before the kernel in front"):
                    Machine(0).launch(wait_late, (1,), (out, plan), options)
            else:
                Machine(0).launch(wait_late, (1,), (out, plan), options)
                assert out == 2
