"""Processes compile kernels for a GPU that is not here, and the parent finds the binaries."""

import signal
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import KernelInterface, driver

from mla_fusion.kernels import ahead
from mla_fusion.ops import Product
from mla_fusion.projections import plan_for
from mla_fusion.projections import triton as provider
from mla_fusion.runtime import projection
from tests.attention.decodes import BF16
from tests.gpus import imitate

GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def h200(tmp_path, monkeypatch):
    """An H200 is imitated, with a cache of its own."""
    imitate(monkeypatch, "sm_90", sms=132, name="NVIDIA H200")
    monkeypatch.setattr(driver, "_active", ahead.Target(GPUTarget("cuda", 90, 32)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_the_parent_finds_what_a_process_compiled(tmp_path, monkeypatch):
    """Even if it named its ptxas before Inductor set another one for new processes."""
    make_backend(driver.active.get_current_target()).hash()
    another = tmp_path / "ptxas"
    another.write_text(
        f'#!/bin/sh\necho "Another build"\nexec {knobs.nvidia.ptxas_blackwell.path} "$@"\n'
    )
    another.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # by release of Triton
        monkeypatch.setenv(name, str(another))
    of = Product(2048, (576,))
    [one, *_] = provider.launches(of, BF16, lambda tokens: [plan_for(GPU, of, tokens)])
    assert ahead.compile_apart([one], GPU) == ""
    found = {*tmp_path.glob("*/*")}
    assert "vector.cubin" in {path.name for path in found}
    monkeypatch.setattr(driver.active, "get_current_device", lambda: "made up")
    started = lambda kernel, grid: partial(kernel.warmup, grid=grid)  # noqa: E731
    monkeypatch.setattr(KernelInterface, "__getitem__", started)
    x, weight = torch.zeros(1, 2048, dtype=BF16), torch.zeros(576, 2048, dtype=BF16)
    projection.project(x, [weight])
    assert {*tmp_path.glob("*/*")} == found


@pytest.mark.parametrize(
    "launch, said",
    [
        (partial(torch.empty, -1), "negative dimension"),
        (partial(signal.raise_signal, 9), "status -9"),
    ],
)
def test_what_a_process_ended_with_is_told(launch, said):
    assert said in ahead.compile_apart([launch], GPU)
