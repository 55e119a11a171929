"""Kernels are compiled side by side where that is safe."""

import contextlib
import threading

import pytest
import torch

from mla_fusion import gpu
from mla_fusion.kernels.threads import side_by_side

CPU, H200, MI300X = (gpu.Gpu(arch=arch) for arch in ("", "sm_90", "gfx942"))


@pytest.mark.parametrize("here, threads", [(CPU, 1), (H200, 3), (MI300X, 1)])
def test_each_work_has_a_thread_on_nvidia_gpus_alone(monkeypatch, here, threads):
    monkeypatch.setattr(gpu, "of", lambda device: here)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    meet, seen = threading.Barrier(threads), set()

    def work():
        meet.wait(timeout=20)  # for the others
        seen.add((threading.get_ident(), torch.is_inference_mode_enabled()))

    with torch.inference_mode():
        side_by_side([work] * 3, torch.device("cuda:1"))
    assert len(seen) == threads and {inference for _, inference in seen} == {True}
    with pytest.raises(ZeroDivisionError):
        side_by_side([meet.reset, lambda: 1 / 0], torch.device("cuda:1"))
