"""GPUs that are not here, as `mla_fusion.gpu` describes them."""

from unittest import mock

from mla_fusion import gpu

# KiB of shared memory (LDS) that a CTA can have.
NVIDIA = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227,
          "sm_120": 99}  # fmt: skip
AMD = {"gfx90a": 64, "gfx942": 64, "gfx950": 160}


def described(arch, sms=10, name=""):
    """A GPU of an architecture; of "" no GPU."""
    kib = (NVIDIA | AMD).get(arch, 0)
    return gpu.Gpu(name, arch, sms, 1024 * kib)


def imitated(arch, **more):
    """Within it, every device is such a GPU."""
    found = described(arch, **more)
    return mock.patch.object(gpu, "of", lambda device: found)


def imitate(monkeypatch, arch, **more):
    """For the rest of a test, every device is such a GPU."""
    found = described(arch, **more)
    monkeypatch.setattr(gpu, "of", lambda device: found)
