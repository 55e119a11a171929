"""The decode kernels compiled (not run) for Hopper: spills, memory, instructions, variants."""

import dataclasses
import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import (
    cards,
    decode,
    few_rows,
    sparse_fp8,
    sparse_specialized,
    warp_specialized,
)
from mla_fusion.attention.hopper.warp_specialized_common import query_boxes
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.epilogue import Epilogue
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4
from mla_fusion.attention.triton import decode_kernel as portable
from mla_fusion.attention.triton import reduce_kernel
from mla_fusion.cli.bench.read_kernel import WORDS, read_words
from mla_fusion.gpu import triton_version
from tests.attention.decodes import BF16, FN
from tests.attention.without_memory import inputs, launch_of, meta, report
from tests.gpus import imitated
from tests.kernels.compiled import LDS, compile_kernel, compile_report, is_one_variant
from tests.nightly import daily

TYPES = pytest.mark.parametrize("dtype", [BF16, FN], ids=["bf16", "fp8"])
BYTES = {"sparse": True, "kv_dtype": FN, "layout": FP8_DS_MLA}
BYTES_V4 = {**BYTES, "layout": FP8_DS_MLA_V4, "widths": (512, 0)}


def fit(result, ctas=1, warps=4):
    """Whether so many CTAs fit an SM: their shared memory and registers."""
    return (
        ctas * (result.shared + 1024) <= LDS["sm_90"] + 1024
        and ctas * result.registers * 32 * warps <= 65536
    )


@pytest.mark.parametrize(
    "module, heads, options",
    [(portable, 16, {}), (portable, 16, {"sparse": True}), (decode, 16, {}),
     (decode, 16, {"sparse": True}), (warp_specialized, 64, {}), (sparse_fp8, 16, BYTES)],
)  # fmt: skip
def test_the_width_of_the_table_is_no_variant(module, heads, options):
    """The warm-up runs with a table of one column; no request may compile another kernel."""
    launches = [launch_of("sm_90", module, heads, BF16, columns=n, **options) for n in (1, 3, 64)]
    if module is sparse_fp8:
        # Blocks may be an odd number of vectors apart: copies are of 16 bytes all the same.
        odd = {"block_units": launches[0].arguments["block_units"] + 1}
        launches.append(launches[0]._replace(arguments=launches[0].arguments | odd))
    given = [(each.positional, each.options) for each in launches]
    assert is_one_variant("sm_90", launches[0].kernel, given)


MISTRAL_SMALL = (256, 64)
WIDTHS = [(MISTRAL_SMALL, 16), (MISTRAL_SMALL, 32), (MISTRAL_SMALL, 64), ((256, 32), 16),
          ((256, 32), 64)]  # fmt: skip


@pytest.mark.parametrize("case", daily(itertools.product(WIDTHS, (BF16, FN)), (WIDTHS[0], FN)))
def test_other_widths(case):
    (widths, heads), dtype = case
    assert widths in cards.WIDTHS
    result = report("sm_90", decode, heads, dtype, widths=widths)
    assert result.hot_spills == 0 and "HGMMA" in result.matrix and result.bulk_copies > 0, result
    assert ("QGMMA" in result.matrix) == (dtype == FN), result
    # As `plan_settings` has it.
    assert fit(result, *((2, 4) if heads == 16 else (1, 8))), result


@TYPES
@pytest.mark.parametrize(
    "case",
    daily(itertools.product((16, 32, 64), ("dense", "page of one", "sparse", "chunks")),
          (16, "dense"), (16, "page of one"), (16, "sparse"), (64, "dense"), (16, "chunks")),
)  # fmt: skip
def test_decode(case, dtype):
    heads, kind = case
    chunks = {"batch_invariant": True, "max_kv_len": 9}
    kinds = {"page of one": {"page": 1}, "sparse": {"sparse": True}, "chunks": chunks}
    options = kinds.get(kind, {})
    result = report("sm_90", decode, heads, dtype, **options)
    assert result.hot_spills == 0 and result.shared <= LDS["sm_90"], result
    assert "HGMMA" in result.matrix and "HMMA" not in result.matrix, result
    # Whole tiles in one page go through the copy engine, one thread's work.
    assert (result.bulk_copies > 0) == (kind in ("dense", "chunks")), result
    # fp8 scores are an fp8 product, not one of widened keys.
    assert ("QGMMA" in result.matrix) == (dtype == FN), result
    # As `plan_settings` has it.
    assert dtype != FN or heads != 16 or fit(result, 2), result


@pytest.mark.parametrize(("heads", "dtype"), [(16, FN), (20, FN), (20, BF16)])
def test_tiles_of_two_boxes(heads, dtype):
    launch = few_rows.launch_of(inputs(heads, dtype))
    result = compile_report("sm_90", launch.kernel, launch.positional, launch.options)
    assert launch.options["num_warps"] == 8 and result.hot_spills == 0, result
    assert result.shared <= LDS["sm_90"], result


@pytest.mark.parametrize("module", [decode, few_rows, warp_specialized])
def test_plan_and_block_table_stay_in_l2(module):
    launch = launch_of("sm_90", module, 64 if module is warp_specialized else 16, FN)
    code = compile_kernel("sm_90", launch.kernel, launch.positional, launch.options).asm["ptx"]
    # 32-bit integers alone are read one by one; two scales too.
    plain, kept = (len(re.findall(rf"ld\.global{hint}\.b32", code))
                   for hint in ("", r"\S*L2::cache_hint"))  # fmt: skip
    assert kept >= 10 and plain <= 3, (plain, kept)


CASES = [(decode, heads, dtype, sparse) for heads in (16, 64) for dtype in (BF16, FN)
         for sparse in (False, True)]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    daily([*CASES, (sparse_fp8, 16, BF16, True)], *CASES[::2], (sparse_fp8, 16, BF16, True)),
)
def test_only_the_plan_is_read_before_the_kernel_in_front_has_ended(case):
    """Queries, keys, tables and scales may be what the kernel in front writes."""
    module, heads, dtype, sparse = case
    options = BYTES if module is sparse_fp8 else {"sparse": True} if sparse else {}
    order = report("sm_90", module, heads, dtype, **options).order
    # At once if the plan is fresh; then, for each work item, after the reads of the plan: two
    # numbers of work_indptr, and eight (or seven) of work_info_set.
    first = order.index("ACQBULK")
    second = order.index("ACQBULK", first + 1)
    reads = 9 if module is sparse_fp8 else 10
    assert sorted(order[:second]) == ["ACQBULK", *["LDG"] * reads]
    # No successor is let in before, and programs without work wait too.
    assert "PREEXIT" not in order[:second]
    # At the end, in front of a store of few rows, with the last tile if the product merges.
    assert order.count("PREEXIT") == 1 + (heads == 16) + (module is decode)
    assert order[-2:] == ("ACQBULK", "PREEXIT")


@pytest.mark.parametrize("epilogue", [None, Epilogue(meta(16, 512, 128), meta(8, 2048))])
def test_pieces_are_read_when_the_decode_has_ended(epilogue):
    """And only a product may be launched before the end of the reduction."""
    given = dataclasses.replace(inputs(16), epilogue=epilogue)
    given.plan.step = Step(8, 8, 1)
    with imitated("sm_90"):
        launch = reduce_kernel.launch_of(given)
    order = compile_report("sm_90", launch.kernel, launch.positional, launch.options).order
    assert order.count("PREEXIT") == (order[0] == "PREEXIT") == (epilogue is not None)
    # Two waits: one in programs with nothing to merge, before or after all this.
    assert order.count("ACQBULK") == 2
    splits = [i for i, name in enumerate(order) if name in ("LDG.128", "STG")]
    assert order.index("ACQBULK") < splits[0] and order[splits[0]] == "LDG.128", order
    assert "ACQBULK" not in order[splits[0] : splits[-1]], order


def test_the_read_of_the_benchmark_has_16_bytes_a_load():
    count = 2048 * 9216
    words, sums = (meta(n, dtype=torch.int32) for n in (count, 2304))
    result = compile_report("sm_90", read_words, [words, sums, count, WORDS], {"num_warps": 8})
    assert result.wide_loads == WORDS // (4 * 32 * 8) and result.narrow_loads == 0, result


@pytest.mark.nightly
def test_hot_spills_are_seen():
    """The reader bites: with 64 registers the loop over tiles has to spill."""
    result = report("sm_90", portable, 16, BF16, maxnreg=64)
    assert result.hot_spills > 0, result


@pytest.mark.parametrize(
    ("heads", "queries"), [(64, 1), pytest.param(8, 8, marks=pytest.mark.nightly)]
)
def test_warp_specialized_of_bf16(heads, queries):
    result = report("sm_90", warp_specialized, heads, BF16, max_query_len=queries)
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
    launch = launch_of("sm_90", warp_specialized)
    code = compile_kernel("sm_90", launch.kernel, launch.positional, launch.options).asm["ptx"]
    stores = re.findall(r"st\.global\.(\S+)", code)
    assert [stores.count(each) for each in ("v2.b32", "v4.b32")] == [2 * 32, 2 * 32]
    assert len(stores) - 4 * 32 <= 4


def test_warp_specialized_of_fp8():
    result = report("sm_90", warp_specialized, 64, FN)
    assert result.matrix == ("HGMMA", "QGMMA") and result.shared <= LDS["sm_90"], result
    # Query and tile: four boxes of 128 columns each, and the rotated part.
    assert result.bulk_copies == 10, result
    # Triton 3.9 keeps addresses in memory in the loop over tiles; 3.6 to 3.8 spill nothing there.
    assert result.hot_spills <= (10 if triton_version() >= (3, 9) else 0), result
    # With fewer registers for those the assembler waits behind each product (C7512).
    assert result.product_waits == 8, result


def test_the_copy_engine_sees_rows():
    q = torch.empty(8, 130, 576, dtype=BF16)[:, :128]
    boxes = query_boxes(q, 512, 128)
    assert [box.block_shape[2] for box in boxes.values()] == [256, 128, 64]
    half = boxes["q_halves"]
    assert half.shape == [8, 128, 576] and half.strides == [130 * 576, 576, 1]
    # 64 heads of a token, or all of an item's of several.
    blocks = {8: [8, 8], 16: [4, 16], 32: [2, 32], 48: [1, 64], 64: [1, 64], 128: [1, 64]}
    assert {n: query_boxes(q, 512, n)["q_halves"].block_shape[:2] for n in blocks} == blocks


def test_sparse_fp8():
    result = report("sm_90", sparse_fp8, 16, BF16, **BYTES)
    assert result.hot_spills == 0 and result.matrix == ("HGMMA",) and fit(result, 2), result
    assert result.narrow_loads == 0 and result.wide_loads > 0, result


@pytest.mark.parametrize(
    "options, copies",
    [(BYTES_V4, 4 + 1), pytest.param(BYTES, 4 + 1 + 1, marks=pytest.mark.nightly)],
)
def test_sparse_specialized(options, copies):
    result = report("sm_90", sparse_specialized, 64, BF16, **options)
    assert result.matrix == ("HGMMA",) and result.shared <= LDS["sm_90"], result
    assert result.hot_spills == 0 and result.narrow_loads == 0, result
    # Behind scores, and behind the products of each half: none is made serial.
    assert result.product_waits == 3, result
    # Triton 3.9 spills some of an item, outside of tiles.
    assert result.spills <= (170 if triton_version() >= (3, 9) else 0), result
    # The 64 entries of a tile are copied by 128 threads, 16 bytes at a time.
    assert result.wide_loads == 4 * copies, result
