"""What `gpu.of` makes of torch's answers, and that it asks once."""

from types import SimpleNamespace

import pytest
import torch

from mla_fusion import gpu

GPUS = [
    ("gfx942:sramecc+:xnack-", (9, 4), gpu.Gpu("a GPU", "gfx942", 10, 65536), (0, 0), "fnuz"),
    ("gfx90a", (9, 0), gpu.Gpu("a GPU", "gfx90a", 10, 65536), (0, 0), "fn"),
    (None, (12, 0), gpu.Gpu("a GPU", "sm_120", 10, 65536), (12, 0), "fn"),
    (None, (8, 6), gpu.Gpu("a GPU", "sm_86", 10, 65536), (8, 6), ""),
]


@pytest.mark.parametrize(("gcn", "version", "wanted", "capability", "fp8"), GPUS)
def test_a_gpu_is_asked_once(monkeypatch, gcn, version, wanted, capability, fp8):
    asked = []
    found = SimpleNamespace(
        name="a GPU", gcnArchName=gcn, major=version[0], minor=version[1],
        multi_processor_count=10, shared_memory_per_multiprocessor=65536,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", gcn and "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: asked.append(device) or found
    )
    gpu._described.cache_clear()
    assert gpu.of("cuda") == gpu.of(torch.device("cuda", 1)) == wanted
    gpu._described.cache_clear()
    assert asked == [torch.device("cuda", 1)]
    assert wanted.vendor == ("AMD" if gcn else "NVIDIA") and wanted.capability == capability
    assert wanted.fp8 == (getattr(torch, f"float8_e4m3{fp8}") if fp8 else None)


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
def test_a_device_that_is_no_gpu(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = gpu.of(device)
    assert found == gpu.Gpu() and not found.vendor and not found.no_fp8()
    assert gpu.fp8_type() == torch.float8_e4m3fn
