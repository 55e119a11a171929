"""The decode kernels for Hopper over byte caches, compiled (not run): spills, memory, order."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.hopper import sparse_fp8, sparse_specialized
from mla_fusion.attention.plan.layouts import FP8_DS_MLA, FP8_DS_MLA_V4
from mla_fusion.attention.triton import choice
from tests.attention.decodes import BF16, FN
from tests.attention.test_decode_compiled import LDS, decode_inputs
from tests.kernels.compiled import compile_report, is_one_variant


def inputs(heads, layout=FP8_DS_MLA, **shape):
    """A decode over one scope."""
    return decode_inputs(
        heads, BF16, sparse=True, widths=(512, layout.width - 512), kv_dtype=FN, layout=layout,
        **shape,
    )  # fmt: skip


def arguments(heads, **shape):
    """Launch arguments of the kernel for few heads."""
    return sparse_fp8.arguments(inputs(heads, **shape))[1:]


@functools.cache
def report(heads):
    """Warps and report, compiled once for all tests."""
    args, options = arguments(heads)
    return options["num_warps"], compile_report("sm_90", sparse_fp8.kernel, args, options)


def test_resources():
    warps, result = report(16)
    assert result.hot_spills == 0, result
    assert result.matrix == ("HGMMA",), result
    assert result.narrow_loads == 0 and result.wide_loads > 0, result
    assert 2 * (result.shared + 1024) <= LDS["sm_90"] + 1024, result
    assert 2 * result.registers * 32 * warps <= 65536, result


@pytest.mark.parametrize(
    "layout", [FP8_DS_MLA_V4, pytest.param(FP8_DS_MLA, marks=pytest.mark.nightly)]
)
def test_resources_with_gathering_warps(layout):
    given = inputs(64, layout)
    args, options = sparse_specialized.arguments(given)[1:]
    result = compile_report("sm_90", sparse_specialized.kernel, args, options)
    assert result.matrix == ("HGMMA",) and result.shared <= LDS["sm_90"], result
    assert result.hot_spills == 0 and result.narrow_loads == 0, result
    # Behind scores, and behind the products of each half: none is made serial.
    assert result.product_waits == 3, result
    # Six units are loaded, 16 bytes at a time. Triton 3.9 spills some of an item, outside of tiles.
    assert result.wide_loads >= 4 * 6 and result.spills < 200, result


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
    for heads, scopes, layout, ctas in (
        (16, 1, FP8_DS_MLA, 264), (16, 2, FP8_DS_MLA, 132), (16, 1, FP8_DS_MLA_V4, 132),
        (32, 1, FP8_DS_MLA, 132), (64, 1, FP8_DS_MLA, 132), (128, 1, FP8_DS_MLA, 66),
    ):  # fmt: skip
        settings = choice.sparse_settings(heads, scopes, layout, gpu)
        assert settings["ctas"] == ctas
        assert settings.get("heads_per_work") == (128 if heads == 128 else None)
    assert "ctas" not in choice.sparse_settings(16, 1, None, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert choice.kernels(gpu) == choice.KERNELS["other"]
    assert "ctas" not in choice.sparse_settings(16, 1, FP8_DS_MLA, gpu)
