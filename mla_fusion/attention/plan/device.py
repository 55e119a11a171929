"""What kernels ask about a device and the installed Triton."""

import torch


def power_of_two(size: int) -> int:
    """`size`, or the next power of two."""
    return 1 << (size - 1).bit_length()


def triton_version() -> tuple[int, int]:
    """Of the installed Triton, major and minor."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


def sm_count(device: torch.device | str) -> int:
    """SMs of a device, compute units on AMD: the default number of CTAs; ValueError without any."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"ctas must be given on {device}: it has no SMs")
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def architecture(device: torch.device) -> str:
    """The AMD architecture of a device, such as "gfx942"; empty for any other device."""
    if device.type != "cuda" or torch.version.hip is None:
        return ""
    return str(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])


def cdna(device: torch.device | str) -> int:
    """3 for a GPU of gfx942, 4 for one of gfx950, 0 for any other device."""
    return {"gfx942": 3, "gfx950": 4}.get(architecture(torch.device(device)), 0)


def has_hopper(device: torch.device | str) -> bool:
    """Whether a device is a GPU of sm_90."""
    is_nvidia = torch.device(device).type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) == (9, 0)
