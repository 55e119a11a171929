"""The environment, as `mla-fusion doctor` probes it."""

import importlib
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from mla_fusion import config, kernels
from mla_fusion.cli import version_of
from mla_fusion.config import vllm_compat

_GROUP, _PLUGIN = "vllm.general_plugins", "mla_fusion"


@dataclass(frozen=True)
class Environment:
    """The result of `probe`. The version of a package that is missing or broken is empty."""

    vllm: str
    torch: str
    triton: str
    aiter: str
    aiter_offers: dict[str, bool]  # each feature that kernels/aiter.py looks for: is it there?
    platform: str  # "cuda", "rocm" or "cpu"; vLLM's if it is installed, else torch's
    device: str
    arch: str  # such as "sm_90" or "gfx942"
    fp8: str  # the name of the platform's fp8 type in torch
    providers: dict[str, str]  # why each provider cannot run; empty if it can
    default: str  # the provider of the flag alone; empty if there is none
    plugin: str  # why vLLM would not load the plugin; empty if it would
    vllm_error: str = ""  # why vLLM cannot be imported; empty if it can, or is missing


def probe() -> Environment:
    """Probe this environment."""
    import torch

    vllm, vllm_error = _import_vllm()
    platform = _platform(vllm)
    device, arch = _device()
    providers = {name: _why_not(name) for name in kernels.PROVIDERS}
    return Environment(
        vllm=vllm,
        torch=str(torch.__version__),
        triton=version_of("triton"),
        aiter=_aiter_version(providers["aiter"]),
        aiter_offers={} if providers["aiter"] else _aiter_offers(),
        platform=platform,
        device=device,
        arch=arch,
        fp8=str(vllm_compat.fp8_dtype()).removeprefix("torch.") if vllm else "",
        providers=providers,
        default=vllm_compat.default_provider() if vllm else "",
        plugin=_why_no_plugin() if vllm else "vLLM cannot load it",
        vllm_error=vllm_error,
    )


def _import_vllm() -> tuple[str, str]:
    """(version, why it cannot be imported), each empty if it does not apply."""
    if find_spec("vllm") is None:
        return "", ""
    try:
        version = vllm_compat.installed_version()
        importlib.import_module("vllm.platforms").current_platform.is_rocm()
        importlib.import_module("vllm.config")  # with most of what a server imports
    except Exception as error:  # noqa: BLE001 - a broken install may raise anything
        return "", f"{type(error).__name__}: {error}"
    return version, ""


def _platform(vllm: str) -> str:
    if vllm:
        from vllm.platforms import current_platform as platform

        found = {"rocm": platform.is_rocm(), "cuda": platform.is_cuda()}
        return next((name for name, is_it in found.items() if is_it), "cpu")
    import torch

    gpu = "rocm" if torch.version.hip else "cuda"
    return gpu if torch.cuda.is_available() else "cpu"


def _device() -> tuple[str, str]:
    """(name, architecture) of the first GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return "", ""
    properties: Any = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return properties.name, properties.gcnArchName.partition(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


def _aiter_version(why_not: str) -> str:
    """The version of AMD's AITER, "unknown" without one; `why_not` is the provider's reason.

    A distribution called aiter may be another project's; then the provider cannot run.
    """
    return version_of("amd-aiter") or ("" if why_not else version_of("aiter") or "unknown")


def _aiter_offers() -> dict[str, bool]:
    from mla_fusion.kernels import aiter

    return aiter.capabilities()


def _why_not(provider: str) -> str:
    try:
        kernels.get_provider(provider)
    except kernels.ProviderUnavailable as error:
        return str(error)
    return ""


def _why_no_plugin() -> str:
    """Why vLLM would not load the plugin in a process of this environment; empty if it would."""
    from vllm import envs
    from vllm.config import PassConfig

    entries = metadata.entry_points(group=_GROUP, name=_PLUGIN)
    if not entries:
        return f"no entry point {_PLUGIN} in {_GROUP}: install mla-fusion in vLLM's environment"
    allowed = envs.VLLM_PLUGINS
    if allowed is not None and _PLUGIN not in allowed:
        return f"VLLM_PLUGINS={','.join(allowed)} leaves it out: add {_PLUGIN}, or unset it"
    try:
        next(iter(entries)).load()()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"it fails: {error!r}"
    try:
        PassConfig(**{config.FLAG: True})
    except ValueError:
        return "it ran, and vLLM's PassConfig still does not know the flag"
    return ""
