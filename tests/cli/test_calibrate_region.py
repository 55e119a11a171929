"""The launch plans that `mla-fusion calibrate` measures, and what `dispatch.choose` makes of its
file; the measurement itself is a double."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import KernelInterface, driver

from mla_fusion.cli.calibrate import region
from mla_fusion.cli.selftest.kernels import Row
from mla_fusion.config import vllm_compat
from mla_fusion.config.identity import tables_folder
from mla_fusion.kernels import ahead, dispatch
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.measure import region_cases, timing
from mla_fusion.measure.region_cases import DEEPSEEK
from mla_fusion.runtime.measured_here import REGION, load
from tests.gpus import described, imitate

GPU, NARROW = "NVIDIA H20", Widths(64, 64, 256)
RIGHT = 1.0, 0


@pytest.fixture
def calibrate(monkeypatch, tmp_path):
    """calibrate(shapes, warps, agreement, verdict): the status where plans with that many warps and
    `rest_last` take least, agree so with the reference, and selftest has such a result."""
    monkeypatch.setattr(vllm_compat, "cache_root", lambda: tmp_path)
    imitate(monkeypatch, "sm_90", name=GPU)
    monkeypatch.setattr(region_cases, "make_weights", lambda *_: [])
    monkeypatch.setattr(region_cases, "make_region", lambda case, _: SimpleNamespace(case=case))
    monkeypatch.setattr(region, "works_of", lambda *_: [])
    monkeypatch.setattr(timing, "compile_all", lambda _: None)
    monkeypatch.setattr(dispatch, "own", {})
    tables_folder().mkdir(parents=True)

    def run(shapes=((True, DEEPSEEK, 16),), warps=4, agreement=RIGHT, verdict=""):
        def timed(region, plans):
            return [
                # A wrong plan is the fastest.
                (plan, (0.9, 0) if plan.m_tiles > 1 else agreement, {
                    "p50_us": 8.0 - (plan.num_warps == warps) - plan.rest_last - plan.m_tiles})
                for plan in plans
            ]  # fmt: skip

        monkeypatch.setattr(region, "measure", timed)
        monkeypatch.setattr(region, "run_checks", lambda names: [Row(n, wrong=verdict)
                                                                 for n in names])  # fmt: skip
        return region.calibrate(shapes, {"gpu": GPU}, tables_folder())

    yield run
    dispatch.prefer(GPU, [])


def plan(tokens, heads=16, fp8=True, widths=DEEPSEEK):
    """As a fresh process finds it."""
    dispatch.prefer(GPU, [])
    load.cache_clear()
    load(REGION, GPU)
    return dispatch.choose(tokens, heads, fp8, widths, described("sm_90", name=GPU))


def test_plans_go_by_the_file(calibrate):
    """A second shape joins the first, one that is measured again replaces itself, and shapes that
    were not measured here go by the shipped rows."""
    shipped = plan(16), plan(16, heads=32)
    assert calibrate() == 0 and calibrate([(False, NARROW, 3)], warps=8) == 0
    assert plan(1).num_warps == plan(16).num_warps == 4 and plan(600).rest_last
    assert plan(33) == plan(64) != plan(32) and plan(16) != shipped[0]
    assert plan(16, 3, False, NARROW).num_warps == 8
    assert plan(16, heads=32) == shipped[1]
    assert calibrate(warps=8) == 0 and plan(600).num_warps == 8
    assert plan(16, 3, False, NARROW).num_warps == 8


@pytest.mark.parametrize("bad", [{"agreement": (0.99, 0)}, {"agreement": (1.0, 2)},
                                 {"verdict": "a case: error 3"}])  # fmt: skip
def test_what_is_wrong_is_not_written(calibrate, bad):
    assert calibrate(**bad) == 1 and not [*tables_folder().iterdir()]


def test_a_layer_that_the_kernel_does_not_take_is_said(calibrate, capsys):
    assert calibrate([(True, Widths(512, 64, 512), 16)]) == 0
    assert "qk_nope_head_dim of 1 to 256" in capsys.readouterr().out
    assert not [*tables_folder().iterdir()]


@pytest.mark.parametrize(
    "old, new",
    [('"kernels": "', '"kernels": "0'), (f'"{GPU}"', '"other"'), ("false, 4]", "false]"),
     ("false, 4]", "false, 4, 4]"), ("false, 4]", "false, 0]"), ("false, 4]", 'false, "4"]'),
     ('"arch"', '"march"'), ("{", "")],
)  # fmt: skip
def test_a_file_of_other_kernels_or_damaged_is_ignored(calibrate, caplog, old, new):
    shipped = plan(1)
    calibrate()
    [path] = tables_folder().iterdir()
    text = path.read_text().replace("true", "false")
    path.write_text(text)
    assert plan(1) != shipped and old in text
    path.write_text(text.replace(old, new))
    assert plan(1) == shipped
    assert "is ignored" in caplog.text and "calibrate again" in caplog.text


def test_a_launch_finds_what_was_compiled_for_it(tmp_path, monkeypatch):
    imitate(monkeypatch, "sm_90", sms=132, name=GPU)
    monkeypatch.setattr(driver, "_active", ahead.Target(GPUTarget("cuda", 90, 32)))
    monkeypatch.setattr(timing, "PROCESSES", 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = region_cases.timed(8, 16, True)
    made = region_cases.Region(case, [region_cases.build(case)], torch.zeros(1))
    one = dataclasses.replace(Plan(), rest_last=True)
    timing.compile_all(region.works_of(made, [one]))
    found = {*tmp_path.glob("*/*")}
    assert "mla_prep.cubin" in {path.name for path in found}
    monkeypatch.setattr(driver.active, "get_current_device", lambda: "made up")
    started = lambda kernel, grid: partial(kernel.warmup, grid=grid)  # noqa: E731
    monkeypatch.setattr(KernelInterface, "__getitem__", started)
    region.provider.fused_mla_decode_prep(made.calls[0], one)
    assert {*tmp_path.glob("*/*")} == found
