"""The decode kernel for Hopper over byte caches, compiled (not run): spills, memory, order."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import sparse_fp8
from mla_fusion.attention.plan.layouts import FP8_DS_MLA
from mla_fusion.attention.triton import choice
from tests.attention.decodes import BF16, FN
from tests.attention.test_decode_compiled import DEEPSEEK, LDS, decode_inputs
from tests.kernels.compiled import compile_report, is_one_variant


def arguments(heads, **shape):
    """Launch arguments over one scope."""
    given = decode_inputs(
        heads, BF16, sparse=True, widths=DEEPSEEK, kv_dtype=FN, layout=FP8_DS_MLA, **shape
    )
    return sparse_fp8.arguments(given)[1:]


@functools.cache
def report(heads):
    """Warps and report, compiled once for all tests."""
    args, options = arguments(heads)
    return options["num_warps"], compile_report("sm_90", sparse_fp8.kernel, args, options)


@pytest.mark.parametrize("heads", [16, 32])
def test_resources(heads):
    warps, result = report(heads)
    assert result.hot_spills == 0, result
    assert result.matrix == ("HGMMA",), result
    assert result.narrow_loads == 0 and result.wide_loads > 0, result
    programs = 2 if heads == 16 else 1
    assert programs * (result.shared + 1024) <= LDS["sm_90"] + 1024, result
    assert programs * result.registers * 32 * warps <= 65536, result


def test_only_the_plan_is_read_before_the_kernel_in_front_has_ended():
    """As in test_decode_compiled.py; of a row of work_info_set, six numbers are read."""
    order = report(16)[1].order
    first = order.index("ACQBULK")
    second = order.index("ACQBULK", first + 1)
    assert sorted(order[:second]) == ["ACQBULK", *["LDG"] * 10]
    assert "PREEXIT" not in order[:second] and order.count("PREEXIT") == 2
    assert order[-2:] == ("ACQBULK", "PREEXIT")


def test_no_step_compiles_another_variant():
    """Not for the width of its table; blocks may be an odd number of vectors apart: copies are of
    16 bytes whatever the stride."""
    args, options = arguments(16)
    units = sparse_fp8.kernel.arg_names.index("block_units")
    odd = (*args[:units], args[units] + 1, *args[units + 1 :]), options
    launches = [odd, *(arguments(16, columns=columns) for columns in (1, 3, 64))]
    assert is_one_variant("sm_90", sparse_fp8.kernel, launches)


@dataclasses.dataclass
class Hopper:
    """Properties of a GPU."""

    multi_processor_count: int = 132


def test_where_it_runs_and_with_how_many_workers(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Hopper())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choice.kernels(gpu)[0] == "hopper.sparse_fp8"
    assert choice.kernels(torch.device("cpu")) == choice.KERNELS["other"]
    for heads, ctas in ((16, 264), (32, 132), (48, 66), (64, 66), (128, 66)):
        assert choice.sparse_ctas(heads, (2048,), FN, gpu) == ctas
    for given in ((16, (64, 2048), FN), (16, (2048,), BF16)):
        assert choice.sparse_ctas(*given, gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert choice.kernels(gpu) == choice.KERNELS["other"]
    assert choice.sparse_ctas(16, (2048,), FN, gpu) is None
