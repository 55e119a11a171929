"""The specialized decode kernel for Hopper compiled (not run): products, spills, memory."""

import functools
import re

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention import hopper_specialized
from mla_fusion.attention import triton as provider
from mla_fusion.attention.hopper_specialized_parts import cache_boxes, query_boxes
from mla_fusion.attention.validate import Inputs
from tests.attention.decodes import BF16, plan_for
from tests.kernels.compiled import LDS, compile_kernel, compile_report

SPLIT = provider.Config(True, 64, 64, 4, specialized=True)
LATE = provider.Config(True, 64, 64, 4, specialized=True, late=True)
SCHEDULES = pytest.mark.parametrize("config", [SPLIT, LATE], ids=["split", "late"])


def arguments(config, page=64):
    """Launch arguments for 64 heads of DeepSeek."""

    def meta(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device="meta")

    given = Inputs(
        meta(8, 64, 576),
        meta(99, page, 576),
        plan_for(num_heads=64, q_dtype=BF16, kv_dtype=BF16),
        meta(8, 128, dtype=torch.int32),
        0.1,
        None,
        None,
        meta(8, 64, 512),
        meta(8, 64, dtype=torch.float32),
    )
    return provider.decode_arguments(config, given)


@functools.cache
def ptx(config):
    """The kernel's PTX, compiled once for all tests."""
    args, options = arguments(config)
    return compile_kernel("sm_90", hopper_specialized.decode_kernel, args, options).asm["ptx"]


@SCHEDULES
def test_products_and_resources(config):
    args, options = arguments(config)
    result = compile_report("sm_90", hopper_specialized.decode_kernel, args, options)
    assert result.matrix == ("HGMMA",) and result.shared <= LDS["sm_90"], result
    # Query and tile: a half and two quarters in boxes of 64 columns each, and the rotated part.
    assert result.bulk_copies == 18, result
    # Triton 3.9 keeps addresses of the query in memory; 3.6 to 3.8 spill nothing.
    assert result.hot_spills == 0, result


@SCHEDULES
def test_the_work_of_each_warpgroup(config):
    # Scores of the first tile and of the others: 576 / 16 products each. Weighted values: the last
    # tile's and the others' left half, and two quarters of all: 64 / 16 each.
    products = re.findall(r"wgmma.mma_async\S*m64n(\d+)k16", ptx(config))
    assert [products.count(n) for n in ("64", "128", "256")] == [2 * 36, 2 * 4, 2 * 4]
    # Registers move from the copying warp to the others.
    granted = re.findall(r"setmaxnreg.(inc|dec).sync.aligned.u32\s+(\d+);", ptx(config))
    assert {("dec", "40"), ("inc", "216"), ("dec", "248")} <= set(granted)


def test_stores_fill_memory_sectors():
    """Of 512 columns and 64 rows, 256 threads store 128 each: 8 bytes of bf16, 16 of partial rows
    at once; the others are LSEs."""
    stores = re.findall(r"st\.global\.(\S+)", ptx(SPLIT))
    assert [stores.count(each) for each in ("v2.b32", "v4.b32")] == [2 * 32, 2 * 32]
    assert len(stores) - 4 * 32 <= 4


@pytest.mark.parametrize(
    ("config", "order"),
    # The right half's warpgroup may start before the products of the left half, or when all four
    # products of the next scores have ended.
    [(SPLIT, "give mul wait mul mul 2 give wait mul wait mul 0 wait"),
     (LATE, "mul wait mul mul 2 give wait mul wait mul 0 give wait")],
    ids=["split", "late"],
)  # fmt: skip
def test_what_waits_for_what(config, order):
    """Products, waits for them, waits for other warps, and what is given to them, in order."""
    names = {"commit_group": "mul", "arrive": "give", "try_wait": "wait"}
    pattern = r"(commit_group)|wgmma.wait_group.sync.aligned (\d)|mbarrier.(arrive|try_wait)"
    found = [next(filter(None, each)) for each in re.findall(pattern, ptx(config))]
    text = " ".join(names.get(each, each) for each in found)
    assert f" {order} " in text, text
    # Behind the loop: the last weights and the query's rows are given, then the left half.
    assert " give give mul 0 give wait give " in text, text
    # The right half: each quarter is given when its products have ended.
    assert " mul mul 1 give 0 give " in text, text


@pytest.mark.parametrize("page", [1, 16, 96])
def test_pages_of_other_than_whole_tiles_are_refused(page):
    cache = torch.empty(4, page, 576, dtype=BF16)
    with pytest.raises(ValueError, match=f"pages of {page} tokens"):
        cache_boxes(cache, 512)


@pytest.mark.parametrize(
    ("heads", "queries", "taken"),
    [(128, 2, True), (16, 4, True), (40, 1, True), (40, 2, False), (8, 4, False)],
)
def test_queries_whose_rows_follow_each_other(heads, queries, taken):
    """Padded heads between two query rows are no rows in memory."""
    q = torch.empty(8, heads, 576, dtype=BF16)
    plan = plan_for(num_heads=heads, max_query_len=queries, q_dtype=BF16, kv_dtype=BF16)
    if taken:
        half, quarter, rotated = query_boxes(q, 512, plan)
        assert [box.block_shape for box in (half, quarter, rotated)] == [
            [64, 256], [64, 128], [64, 64]
        ]  # fmt: skip
        assert half.shape == [8 * heads, 576] and half.strides == [576, 1]
    else:
        with pytest.raises(ValueError, match="rows of the query at once"):
            query_boxes(q, 512, plan)


def test_a_query_with_gaps_between_tokens_is_refused():
    plan = plan_for(num_heads=64, q_dtype=BF16, kv_dtype=BF16)
    q = torch.empty(8, 65, 576, dtype=BF16)[:, :64]
    with pytest.raises(ValueError, match="rows of the query at once"):
        query_boxes(q, 512, plan)
    assert query_boxes(q[:1], 512, plan)[0].shape == [64, 576]
