"""The specialized decode kernel for Hopper compiled (not run): products, spills, memory."""

import functools
import re

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import warp_specialized
from mla_fusion.attention.hopper.copy import cache_boxes
from mla_fusion.attention.hopper.warp_specialized_copy import columns_of, query_boxes
from mla_fusion.attention.plan.device import triton_version
from tests.attention.decodes import BF16, FN
from tests.attention.specialized import inputs
from tests.kernels.compiled import LDS, compile_kernel, compile_report, is_one_variant


@functools.cache
def ptx(dtype=BF16):
    """The kernel's PTX, compiled once for all tests."""
    _, args, options = warp_specialized.arguments(inputs(dtype=dtype))
    return compile_kernel("sm_90", warp_specialized.kernel, args, options).asm["ptx"]


def report(dtype, **case):
    """What the compiler says of the kernel for a type, and other inputs than the usual."""
    given = inputs(dtype=dtype, **case)
    _, args, options = warp_specialized.arguments(given)
    return compile_report("sm_90", warp_specialized.kernel, args, options)


@pytest.mark.parametrize(
    ("heads", "queries"), [(64, 1), pytest.param(8, 8, marks=pytest.mark.nightly)]
)
def test_products_and_resources(heads, queries):
    result = report(BF16, q=(8, heads, 576), max_query_len=queries)
    assert result.matrix == ("HGMMA",) and result.shared <= LDS["sm_90"], result
    # Query and tile: a half and two quarters in boxes of 64 columns each, and the rotated part.
    assert result.bulk_copies == 18, result
    # Addresses of stores may wait in memory; nothing in the loop over tiles does.
    assert result.hot_spills == 0, result
    # One for scores, one for the left half, two for the quarters of the right, and one for what is
    # started behind the last tile.
    assert result.product_waits == 5, result


def test_stores_fill_memory_sectors():
    """Of 512 columns and 64 rows, 256 threads store 128 each: 8 bytes of bf16, 16 of partial rows
    at once; the others are LSEs."""
    stores = re.findall(r"st\.global\.(\S+)", ptx())
    assert [stores.count(each) for each in ("v2.b32", "v4.b32")] == [2 * 32, 2 * 32]
    assert len(stores) - 4 * 32 <= 4


def test_fp8_products_and_resources():
    result = report(FN)
    assert result.matrix == ("HGMMA", "QGMMA") and result.shared <= LDS["sm_90"], result
    # Query and tile: four boxes of 128 columns each, and the rotated part.
    assert result.bulk_copies == 10, result
    # Triton 3.9 keeps addresses in memory in the loop over tiles; 3.6 to 3.8 spill nothing there.
    assert result.hot_spills <= (10 if triton_version() >= (3, 9) else 0), result
    # With fewer registers for those the assembler waits behind each product (C7512).
    assert result.product_waits == 8, result


def test_the_width_of_the_table_is_no_variant():
    """The warm-up runs with a table of one column; no request may compile another kernel."""
    launches = [warp_specialized.arguments(inputs(columns=n))[1:] for n in (1, 3, 64)]
    assert is_one_variant("sm_90", warp_specialized.kernel, launches)


def test_the_copy_engine_sees_rows():
    q = torch.empty(8, 130, 576, dtype=BF16)[:, :128]
    half, quarter, rotated = query_boxes(q, 512, 128)
    assert [box.block_shape[2] for box in (half, quarter, rotated)] == [256, 128, 64]
    assert half.shape == [8, 128, 576] and half.strides == [130 * 576, 576, 1]
    # 64 heads of a token, or all of an item's of several.
    blocks = {8: [8, 8], 16: [4, 16], 32: [2, 32], 48: [1, 64], 64: [1, 64], 128: [1, 64]}
    assert {n: query_boxes(q, 512, n)[0].block_shape[:2] for n in blocks} == blocks
    # Half of each block is another layer's: the last row is inside the memory all the same.
    cache = torch.empty(10, 256, 576, dtype=BF16)[:, :128]
    *boxes, step = cache_boxes(cache, columns_of(512, 64), 64)
    assert step == 256 and boxes[0].shape == [9 * 256 + 128, 576]
