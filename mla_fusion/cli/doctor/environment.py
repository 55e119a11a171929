"""The environment, as `mla-fusion doctor` probes it."""

import importlib
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from mla_fusion import config, kernels
from mla_fusion.attention.plan.device import architecture
from mla_fusion.cli import version_of
from mla_fusion.config import vllm_compat
from mla_fusion.kernels import aiter

_GROUP, _PLUGIN = "vllm.general_plugins", "mla_fusion"


def probe() -> dict[str, Any]:
    """The environment as plain data. The version of a package that is missing or broken is empty,
    and so is why something does not work, if it does."""
    vllm, vllm_error = _import_vllm()
    device, arch = _device()
    providers = {name: _why_not(name) for name in kernels.PROVIDERS}
    # A distribution called aiter may be another project's; then the provider cannot run.
    other = "" if providers["aiter"] else version_of("aiter") or "unknown"
    return {
        "vllm": vllm,
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "aiter": version_of("amd-aiter") or other,
        # Each feature that kernels/aiter.py looks for: is it there?
        "aiter_offers": {} if providers["aiter"] else aiter.capabilities(),
        "platform": _platform(vllm),
        "device": device,
        "arch": arch,  # such as "sm_90" or "gfx942"
        "fp8": str(vllm_compat.fp8_dtype()).removeprefix("torch.") if vllm else "",
        "providers": providers,  # why each cannot run
        "default": vllm_compat.default_provider() if vllm else "",  # provider of the flag alone
        "plugin": _why_no_plugin() if vllm else "vLLM cannot load it",
        "vllm_error": vllm_error,  # why vLLM cannot be imported, unless it is missing
    }


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
    """ "cuda", "rocm" or "cpu", by vLLM if it is installed, else by torch."""
    if vllm:
        is_rocm, is_gpu = vllm_compat.is_rocm(), vllm_compat.is_gpu()
    else:
        is_rocm, is_gpu = bool(torch.version.hip), torch.cuda.is_available()
    return ("rocm" if is_rocm else "cuda") if is_gpu else "cpu"


def _device() -> tuple[str, str]:
    """(name, architecture) of the first GPU; empty without one."""
    if not torch.cuda.is_available():
        return "", ""
    found = torch.cuda.get_device_properties(0)
    return found.name, architecture(torch.device("cuda", 0)) or f"sm_{found.major}{found.minor}"


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
