"""Whether fusion can work in this environment: everything is probed, nothing assumed."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mla_fusion import __version__, config, kernels, known_issues, vllm_compat

if TYPE_CHECKING:
    from collections.abc import Iterable

# What serves on each platform; `reference` is plain torch and no faster than vLLM.
_SERVING = {"rocm": ("aiter", "triton"), "cuda": ("triton",), "cpu": ("reference",)}
_GROUP, _PLUGIN = "vllm.general_plugins", "mla_fusion"


@dataclass(frozen=True)
class Environment:
    """What was found. A version is empty where the package is missing.

    platform: "cuda", "rocm" or "cpu", vLLM's where it is there, else torch's.
    arch: such as "sm_90" or "gfx942". fp8: the name of the platform's fp8 type in torch.
    aiter_offers: what kernels/aiter.py looks for, and whether this AITER has it.
    providers: why each cannot run, or an empty string.
    plugin: why vLLM would not load it, or an empty string.
    """

    vllm: str
    torch: str
    triton: str
    aiter: str
    aiter_offers: dict[str, bool]
    platform: str
    device: str
    arch: str
    fp8: str
    providers: dict[str, str]
    plugin: str


@dataclass(frozen=True)
class Diagnosis:
    """The environment, and what follows: problems that rule fusion out, and known trouble."""

    environment: Environment
    problems: list[str]
    serving: list[str]
    issues: list[known_issues.Issue]

    @property
    def works(self) -> bool:
        """Whether nothing rules fusion out."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "works": self.works,
            "mla_fusion": __version__,
            **asdict(self.environment),
            "problems": self.problems,
            "serving_providers": self.serving,
            "issues": [{"threads": [*i.threads], "text": i.text} for i in self.issues],
        }


def examine() -> Diagnosis:
    """Probe this environment; imports vLLM and, where it is installed, AITER."""
    return diagnose(probe())


def diagnose(found: Environment) -> Diagnosis:
    """What follows from what was found."""
    serving = [name for name in _SERVING[found.platform] if not found.providers[name]]
    problems = []
    if not found.vllm:
        problems.append("vLLM is missing or cannot be imported: pip install 'mla-fusion[vllm]'")
    elif not vllm_compat.is_supported(found.vllm):
        problems.append(f"vLLM {found.vllm} is outside the window {vllm_compat.window()}")
    if found.plugin:
        problems.append(f"vLLM does not load the plugin: {found.plugin}")
    if not serving:
        whys = (f"{name}: {found.providers[name]}" for name in _SERVING[found.platform])
        problems.append("no provider can serve here: " + "; ".join(whys))
    issues = [issue for issue in known_issues.ISSUES if issue.applies(found)]
    return Diagnosis(found, problems, serving, issues)


def probe() -> Environment:
    """Look at all of it."""
    import torch

    vllm = _vllm_version()
    platform = _platform(vllm)
    device, arch = _device()
    providers = {name: _why_not(name) for name in kernels.PROVIDERS}
    return Environment(
        vllm=vllm,
        torch=str(torch.__version__),
        triton=_version_of("triton"),
        aiter=_aiter_version(providers["aiter"]),
        aiter_offers=_aiter_offers() if not providers["aiter"] else {},
        platform=platform,
        device=device,
        arch=arch,
        fp8=str(vllm_compat.fp8_dtype()).removeprefix("torch.") if vllm else "",
        providers=providers,
        plugin=_why_no_plugin() if vllm else "vLLM is missing",
    )


def _vllm_version() -> str:
    if find_spec("vllm") is None:
        return ""
    try:
        return vllm_compat.installed_version()
    except (ImportError, AttributeError, OSError):
        return ""  # a broken install, such as one built for another torch


def _platform(vllm: str) -> str:
    if vllm:
        from vllm.platforms import current_platform as platform

        found = {"rocm": platform.is_rocm(), "cuda": platform.is_cuda()}
        return next((name for name, is_it in found.items() if is_it), "cpu")
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "rocm" if torch.version.hip else "cuda"


def _device() -> tuple[str, str]:
    """(name, architecture) of the first GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return "", ""
    properties: Any = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return properties.name, properties.gcnArchName.partition(":")[0]
    return properties.name, f"sm_{properties.major}{properties.minor}"


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _aiter_version(why_not: str) -> str:
    """The version of AMD's AITER, "unknown" if it says none; `why_not` is the provider's reason.

    A distribution called aiter may be AMD's or another project's: the provider can tell.
    """
    return _version_of("amd-aiter") or ("" if why_not else _version_of("aiter") or "unknown")


def _aiter_offers() -> dict[str, bool]:
    module: Any = importlib.import_module("mla_fusion.kernels.aiter")
    offers: dict[str, bool] = module.capabilities()
    return offers


def _why_not(provider: str) -> str:
    try:
        kernels.get_provider(provider)
    except kernels.ProviderUnavailable as error:
        return str(error)
    return ""


def _why_no_plugin() -> str:
    """Why vLLM would not load the plugin in a process of this environment; empty if it would."""
    import vllm.config.compilation as compilation
    from vllm import envs

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
    if not hasattr(compilation.PassConfig, config.FLAG):
        return "it ran, and vLLM's PassConfig still does not know the flag"
    return ""


def lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as one screen: the answer first."""
    found = diagnosis.environment
    if diagnosis.works:
        note = ", for development only (no GPU)" if found.platform == "cpu" else ""
        answer = f"fusion can work here, with provider {' or '.join(diagnosis.serving)}{note}"
    else:
        answer = "fusion cannot work here"
    offers = ", ".join(
        f"{'has' if yes else 'no'} {what}" for what, yes in found.aiter_offers.items()
    )
    facts = {
        "vLLM": f"{found.vllm or 'missing'} (supported: {vllm_compat.window()})",
        "torch": found.torch,
        "Triton": found.triton or "missing",
        "AITER": (found.aiter or "missing") + (f": {offers}" if offers else ""),
        "GPU": f"{found.device} ({found.arch}, {found.platform})" if found.device else "none",
        "fp8 type": found.fp8 or "unknown without vLLM",
        "plugin": found.plugin or "loaded",
    }
    out = [f"{answer} (mla-fusion {__version__})"]
    out += _wrapped("  problem: ", diagnosis.problems)
    out += ["", *_columns(facts), "", "providers"]
    out += _columns({name: why or "available" for name, why in found.providers.items()})
    if diagnosis.issues:
        out += ["", "known trouble on this platform (as of September 2026)"]
        out += _wrapped("  ", (f"{', '.join(i.threads)}: {i.text}" for i in diagnosis.issues))
    return out


def _columns(facts: dict[str, str]) -> list[str]:
    return [line for name, value in facts.items() for line in _wrapped(f"  {name:<10}", [value])]


def _wrapped(start: str, texts: Iterable[str]) -> list[str]:
    """Each text behind `start`, in lines of at most 100 characters."""
    indent = " " * max(len(start), 4)
    return [
        line
        for text in texts
        for line in textwrap.wrap(
            start + text, 100, subsequent_indent=indent, break_on_hyphens=False
        )
    ]
