"""The device that kernels run on: asked of torch once a device, read by everything else."""

import dataclasses
import functools

import torch

# Families: the architectures for which kernels of their own are here.
HOPPER = ("sm_90",)
CDNA = ("gfx942", "gfx950")  # AMD's generations 3 and 4


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU; of a CPU, or any other device, every field is empty.

    name: the product, as the driver has it. arch: "sm_90" or "gfx942", for example. sms: its SMs,
    compute units on AMD. shared_memory: bytes of shared memory (LDS) of an SM.
    """

    name: str = ""
    arch: str = ""
    sms: int = 0
    shared_memory: int = 0

    @property
    def vendor(self) -> str:
        """Who makes it, "NVIDIA" or "AMD"; empty without a GPU."""
        return {"sm": "NVIDIA", "gf": "AMD"}.get(self.arch[:2], "")

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of an NVIDIA GPU; (0, 0) for other devices."""
        digits = self.arch[3:] if self.vendor == "NVIDIA" else "00"
        return int(digits[:-1]), int(digits[-1])

    @property
    def fp8(self) -> torch.dtype | None:
        """The fp8 type (e4m3) in which it computes; None where Triton compiles no fp8."""
        if self.vendor == "NVIDIA" and self.capability < (8, 9):
            return None
        return torch.float8_e4m3fnuz if self.arch == "gfx942" else torch.float8_e4m3fn

    def no_fp8(self) -> str:
        """Why kernels with fp8 (e4m3) do not compile for it; empty if they do."""
        why = f"Triton compiles fp8 (e4m3) for sm_89 and newer, not for {self.arch}"
        return "" if self.fp8 else why


def of(device: torch.device | str) -> Gpu:
    """The GPU that `device` names, "cuda" the current one; an empty `Gpu` if it names none."""
    device = torch.device(device)
    if str(device) == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _described(device) if ":" in str(device) and device.type == "cuda" else Gpu()


@functools.cache
def _described(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    arch = f"sm_{found.major}{found.minor}"
    if torch.version.hip is not None:
        arch = str(found.gcnArchName.split(":")[0])
    memory = int(found.shared_memory_per_multiprocessor)
    return Gpu(found.name, arch, int(found.multi_processor_count), memory)


def fp8_type() -> torch.dtype:
    """The fp8 type of the current GPU; e4m3fn if it has none, or there is none."""
    return of("cuda").fp8 or torch.float8_e4m3fn


@functools.cache
def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)
