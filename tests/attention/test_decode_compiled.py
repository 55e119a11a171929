"""The decode kernels compiled (not run) for AMD and NVIDIA: spills, memory, instructions."""

import functools
import itertools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import decode as hopper_decode
from mla_fusion.attention.hopper import fits
from mla_fusion.attention.plan.buffers import Step
from mla_fusion.attention.plan.inputs import Inputs, Scope, Sparse
from mla_fusion.attention.triton import decode_kernel as portable
from mla_fusion.attention.triton import reduce_kernel
from tests.attention.decodes import BF16, FN, plan_for
from tests.kernels.compiled import LDS, as_on, compile_report, is_one_variant
from tests.nightly import daily


def meta(*shape, dtype):
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


DEEPSEEK = (512, 64)
MISTRAL_SMALL = (256, 64)


def decode_inputs(
    heads, dtype, *, page=64, columns=128, sparse=False, widths=DEEPSEEK, kv_dtype=None,
    layout=None, half_below=0,
):  # fmt: skip
    """What a decode is given, for a latent and a rotated part and a table of `columns` columns."""
    i32, f32 = torch.int32, torch.float32
    latent, width, kv_dtype = widths[0], sum(widths), kv_dtype or dtype
    stored, byte = (width, kv_dtype) if layout is None else (layout.bytes, torch.uint8)
    scope = Scope(meta(99, page, stored, dtype=byte), meta(8, columns, dtype=i32), layout)
    return Inputs(
        meta(8, heads, width, dtype=dtype),
        scope.kv_cache,
        plan_for(
            num_heads=heads,
            q_dtype=dtype,
            kv_dtype=kv_dtype,
            v_head_dim=latent,
            half_below=half_below,
        ),
        scope.table,
        0.1,
        meta(1, dtype=f32),
        meta(1, dtype=f32),
        meta(8, heads, latent, dtype=BF16),
        meta(8, heads, dtype=f32),
        layout=layout,
        sparse=Sparse(scope, 128, meta(8, dtype=i32), meta(heads, dtype=f32)) if sparse else None,
    )


def decode_arguments(target, module, heads, dtype, **shape):
    """Launch arguments of the decode kernel of a module."""
    with as_on(target):
        _, args, options = module.arguments(decode_inputs(heads, dtype, **shape))
    return args, options


@functools.cache
def decode_report(target, module, heads, dtype, *, maxnreg=None, **shape):
    """Report of one decode kernel, compiled and disassembled once for all tests."""
    args, options = decode_arguments(target, module, heads, dtype, **shape)
    if maxnreg is not None:
        options["maxnreg"] = maxnreg
    return compile_report(target, module.kernel, args, options)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("module", [portable, hopper_decode], ids=["portable", "hopper"])
def test_the_width_of_the_table_is_no_variant(module, sparse):
    """The warm-up runs with a table of one column; no request may compile another kernel."""
    launches = [
        decode_arguments("sm_90", module, 16, BF16, columns=n, sparse=sparse) for n in (1, 3, 64)
    ]
    assert is_one_variant("sm_90", module.kernel, launches)


HOPPER_WIDTHS = [
    (MISTRAL_SMALL, 16), (MISTRAL_SMALL, 32), (MISTRAL_SMALL, 64), ((256, 32), 16), ((256, 32), 64)
]  # fmt: skip


@pytest.mark.parametrize(
    "case", daily(itertools.product(HOPPER_WIDTHS, (BF16, FN)), (HOPPER_WIDTHS[0], FN))
)
def test_hopper_kernel_of_other_widths(case):
    (widths, heads), dtype = case
    assert widths in fits.WIDTHS
    result = decode_report("sm_90", hopper_decode, heads, dtype, widths=widths)
    assert result.hot_spills == 0 and "HGMMA" in result.matrix and result.bulk_copies > 0, result
    assert ("QGMMA" in result.matrix) == (dtype == FN), result
    # Two programs fit a SM, as `plan_settings` has it.
    programs = 2 if heads == 16 else 1
    assert programs * (result.shared + 1024) <= fits.SHARED_MEMORY + 1024, result
    assert programs * result.registers * 32 * (4 if heads == 16 else 8) <= 65536, result


@pytest.mark.parametrize("dtype", [BF16, FN], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "case",
    daily(itertools.product((16, 32, 64), ("dense", "page of one", "sparse")),
          (16, "dense"), (16, "page of one"), (16, "sparse"), (64, "dense")),
)  # fmt: skip
def test_hopper_kernel(case, dtype):
    heads, kind = case
    options = {"page of one": {"page": 1}, "sparse": {"sparse": True}}.get(kind, {})
    result = decode_report("sm_90", hopper_decode, heads, dtype, **options)
    assert result.hot_spills == 0, result
    assert result.shared <= LDS["sm_90"], result
    assert "HGMMA" in result.matrix and "HMMA" not in result.matrix, result
    # Whole tiles in one page go through the copy engine, one thread's work.
    assert (result.bulk_copies > 0) == (kind == "dense"), result
    # fp8 scores are an fp8 product, not one of widened keys.
    assert ("QGMMA" in result.matrix) == (dtype == FN), result
    if dtype == FN and heads == 16:
        # Two CTAs of four warps fit an SM, as `plan_settings` has it.
        assert 2 * result.shared <= LDS["sm_90"] and result.registers * 128 * 2 <= 65536, result


@pytest.mark.parametrize("heads", [16, 20])
def test_tiles_of_two_boxes(heads):
    given = decode_inputs(heads, FN, half_below=9)
    given.plan.step = Step(8, 8, 1)
    _, args, options = hopper_decode.arguments(given)
    result = compile_report("sm_90", hopper_decode.kernel, args, options)
    assert options["num_warps"] == 8 and result.hot_spills == 0, result
    assert result.shared <= LDS["sm_90"], result


@pytest.mark.parametrize("dtype", [BF16, FN], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "case", daily(itertools.product((16, 64), (False, True)), (16, False), (64, False))
)
def test_only_the_plan_is_read_before_the_kernel_in_front_has_ended(case, dtype):
    """Queries, keys, tables and scales may be what the kernel in front writes."""
    heads, sparse = case
    options = {"sparse": True} if sparse else {}
    order = decode_report("sm_90", hopper_decode, heads, dtype, **options).order
    # At once if the plan is fresh; then, for each work item, after the reads of the plan: two
    # numbers of work_indptr, seven of work_info_set, qo_indptr and kv_indptr.
    first = order.index("ACQBULK")
    second = order.index("ACQBULK", first + 1)
    assert sorted(order[:second]) == ["ACQBULK", *["LDG"] * 11]
    # No successor is let in before, and programs without work wait too.
    assert "PREEXIT" not in order[:second]
    assert order.count("PREEXIT") == (2 if heads == 16 else 1)
    assert order[-2:] == ("ACQBULK", "PREEXIT")


def test_pieces_are_read_when_the_decode_has_ended():
    given = decode_inputs(16, BF16)
    given.plan.step = Step(8, 8, 1)
    with as_on("sm_90"):
        _, args, options = reduce_kernel.arguments(given)
    order = compile_report("sm_90", reduce_kernel.kernel, args, options).order
    # Two waits: one in programs with nothing to merge, before or after all this.
    assert order[0] == "PREEXIT" and order.count("ACQBULK") == 2
    splits = [i for i, name in enumerate(order) if name in ("LDG.128", "STG")]
    assert order.index("ACQBULK") < splits[0] and order[splits[0]] == "LDG.128", order
    assert "ACQBULK" not in order[splits[0] : splits[-1]], order


@pytest.mark.nightly
def test_hot_spills_are_seen():
    """The reader bites: with 64 registers the loop over tiles has to spill."""
    result = decode_report("sm_90", portable, 16, BF16, maxnreg=64)
    assert result.hot_spills > 0, result
