"""Probes vLLM, torch, Triton, AITER, the GPU, the plugin and the providers, and names known trouble
with what it finds. Exit status 0 if fusion can work here, else 1."""

import argparse
import csv
import importlib
import json
import re
import textwrap
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from mla_fusion import __version__, config, gpu, kernels
from mla_fusion.attention import cards
from mla_fusion.attention.card import NEWEST_TRITON
from mla_fusion.cli import INSTALL_VLLM, mend_vllm, short
from mla_fusion.config import eligibility, vllm_compat
from mla_fusion.kernels import aiter
from mla_fusion.kernels.card import serving as serving_on
from mla_fusion.measure.records import version_of
from mla_fusion.runtime import measured

_GROUP, _PLUGIN = "vllm.general_plugins", "mla_fusion"
# Known trouble as of September 2026. A row has the conditions that `probe` sees (all must hold, an
# empty one always does), the public threads, and the trouble with its remedy, which names the
# settings that it cannot see (a model, a flag of vLLM).
with Path(__file__).with_name("known_issues.csv").open(newline="") as _file:
    ISSUES = [*csv.DictReader(_file)]
# Column -> whether its value holds in an environment of `probe`.
_CONDITIONS = {
    "platform": lambda e, names: e["platform"] in names.split(),
    "arch": lambda e, name: e["arch"] == name,
    "aiter before": lambda e, version: is_before(e["aiter"], version),
    "triton before": lambda e, version: is_before(e["triton"], version),
    "torch": lambda e, version: numbers(e["torch"])[:2] == numbers(version),
    "vllm": lambda e, _: bool(e["vllm"]),
}


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if fusion can work here, else 1."""
    found = examine()
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(found)))
    return 0 if found["works"] else 1


def probe() -> dict[str, Any]:
    """The environment as plain data; imports vLLM and AITER where they are. Empty are the version
    of a missing or broken package, and why something does not work, if it does."""
    vllm, vllm_error = _import_vllm()
    here = gpu.of("cuda:0") if torch.cuda.is_available() else gpu.Gpu()
    is_gpu = vllm_compat.is_gpu() if vllm else torch.cuda.is_available()
    is_rocm = vllm_compat.is_rocm() if vllm else gpu.of("cuda").vendor == "AMD"
    providers = {name: kernels.why_unavailable(name) for name in kernels.PROVIDERS}
    # A distribution called aiter may be another project's; then the provider cannot run.
    other = "" if providers["aiter"] else version_of("aiter") or "unknown"
    return {
        "vllm": vllm,
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "aiter": version_of("amd-aiter") or other,
        # Each feature that kernels/aiter.py looks for: is it there?
        "aiter_offers": {} if providers["aiter"] else aiter.capabilities(),
        # By vLLM if it is installed, else by torch.
        "platform": ("rocm" if is_rocm else "cuda") if is_gpu else "cpu",
        "device": here.name,
        "arch": here.arch,  # such as "sm_90" or "gfx942"
        "decodes": [card.name for card in cards.of(here)] if here.arch else [],
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


def _why_no_plugin() -> str:
    """Why vLLM would not load the plugin in a process of this environment; empty if it would."""
    from vllm import envs
    from vllm.config import PassConfig

    entry = next(iter(metadata.entry_points(group=_GROUP, name=_PLUGIN)), None)
    if entry is None:
        return f"no entry point {_PLUGIN} in {_GROUP}: {_mend_metadata()}"
    if (allowed := envs.VLLM_PLUGINS) is not None and _PLUGIN not in allowed:
        if near := next(filter(_is_nearly, allowed), ""):
            meant = ",".join(_PLUGIN if name == near else name.strip() for name in allowed)
            why = "and vLLM compares names to the letter, blanks too"
            return f"VLLM_PLUGINS names {near!r}, {why}: set VLLM_PLUGINS={meant}"
        return f"VLLM_PLUGINS={','.join(allowed)} leaves it out: add {_PLUGIN}, or unset it"
    try:
        entry.load()()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return f"it fails: {error!r}: {_mend_metadata()}"
    try:
        PassConfig(**{config.FLAG: True})
    except ValueError:
        return "it ran, and vLLM's PassConfig still does not know the flag"
    return ""


def _is_nearly(name: str) -> bool:
    """True if someone who wrote `name` in VLLM_PLUGINS meant this plugin."""
    return name.strip(" \t\"'").lower().replace("-", "_") == _PLUGIN


def _mend_metadata() -> str:
    """Advice on an entry point that is missing or fails: the first metadata of this library
    on sys.path, which hides any other, may be left from an older build."""
    first = next(iter(metadata.distributions(name="mla-fusion")), None)
    if first is None:
        return "install mla-fusion in vLLM's environment"
    where = f"mla-fusion {first.version} in {first.locate_file('')}"
    return f"vLLM reads the metadata of {where}: delete that if it is old, and install it again"


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "0.1.19.post1" is (0, 1, 19, 1)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def is_before(version: str, limit: str) -> bool:
    """True if a version is older than `limit`; that of a missing package, empty, is not."""
    return bool(version) and numbers(version) < numbers(limit)


def examine() -> dict[str, Any]:
    """The content of `--json`: the environment, the problems that rule fusion out, known
    trouble."""
    found = probe()
    vllm, error, providers = found["vllm"], found["vllm_error"], found["providers"]
    names = serving_on(found["platform"])
    serving = [name for name in names if not providers[name]]
    problems = []
    if error:
        remedy = mend_vllm(error) or f"install it again: {INSTALL_VLLM}"
        problems.append(f"vLLM cannot be imported: {short(error, 200)}: {remedy}")
    elif not vllm:
        problems.append(f"vLLM is missing: {INSTALL_VLLM}")
    elif not vllm_compat.is_supported(vllm):
        problems.append(f"vLLM {vllm} is outside the window {vllm_compat.window()}")
    decline = eligibility.why_not_here() if vllm else None
    kept = decline and decline.code == eligibility.INVARIANT and found["arch"] in gpu.HOPPER
    if decline and not kept:
        problems.append(decline.explain())
    if vllm and found["plugin"]:
        problems.append(f"vLLM does not load the plugin: {found['plugin']}")
    if not serving:
        whys = (f"{name}: {providers[name]}" for name in names)
        problems.append("no provider can serve here: " + "; ".join(whys))
    return {
        "works": not problems,
        "batch_invariant": bool(kept),
        "mla_fusion": __version__,
        **found,
        "problems": problems,
        "serving_providers": serving,
        "issues": [
            {"threads": issue["threads"].split(), "text": issue["text"]}
            for issue in ISSUES
            if all(holds(found, issue[name]) for name, holds in _CONDITIONS.items() if issue[name])
        ],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """A diagnosis as one screen: the answer first."""
    works, serving, device = found["works"], found["serving_providers"], found["device"]
    note = ", for development only (no GPU)" if found["platform"] == "cpu" else ""
    can = f"can work here, with provider {' or '.join(serving)}{note}"
    out = [f"fusion {can if works else 'cannot work here'} (mla-fusion {__version__})"]
    offers = [f"{'has' if yes else 'no'} {what}" for what, yes in found["aiter_offers"].items()]
    version = found["vllm"] or ("cannot be imported" if found["vllm_error"] else "missing")
    facts = {
        "vLLM": f"{version} (supported: {vllm_compat.window()})",
        "torch": found["torch"],
        "Triton": found["triton"] or "missing",
        "AITER": (found["aiter"] or "missing") + (f": {', '.join(offers)}" if offers else ""),
        "GPU": f"{device} ({found['arch']}, {found['platform']})" if device else "none",
        "fp8 type": found["fp8"] or "unknown without vLLM",
        "plugin": found["plugin"] or "loaded",
    }
    if device:
        facts["decodes"] = ", ".join(found["decodes"])
    if works and found["platform"] == "cuda":
        facts["auto"] = f"goes by {measured.files(device)}"
    if found["batch_invariant"]:
        out.append("  VLLM_BATCH_INVARIANT=1: it decodes in every step, and graphs stay vLLM's")
    if works and found["default"] not in serving:
        chosen = json.dumps({config.OPTIONS_KEY: {"provider": serving[0]}})
        out.append(f"  name it beside the flag: --additional-config '{chosen}'")
    if works and device:
        unknown = [] if measured.has_measurements(device) else [device]
        if numbers(found["triton"])[:2] > NEWEST_TRITON:
            unknown.append(f"Triton {found['triton']}")
        if unknown:
            what = f"the kernels were not measured with {' and '.join(unknown)}"
            out.append(f"  {what}: run mla-fusion selftest first")
    out += _wrapped("  problem: ", found["problems"])
    out += ["", *_columns(facts), "", "providers"]
    out += _columns({name: why or "available" for name, why in found["providers"].items()})
    if found["issues"]:
        out += ["", "known trouble on this platform (as of September 2026)"]
        out += _wrapped("  ", (f"{', '.join(i['threads'])}: {i['text']}" for i in found["issues"]))
    return out


def _columns(facts: dict[str, str]) -> list[str]:
    return [line for name, value in facts.items() for line in _wrapped(f"  {name:<10}", [value])]


def _wrapped(start: str, texts: Iterable[str]) -> list[str]:
    """Each text after `start`, in lines of at most 100 characters."""
    indent = " " * max(len(start), 4)
    # A path stays whole, to be copied.
    wrapper = textwrap.TextWrapper(
        100, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return [line for text in texts for line in wrapper.wrap(start + text)]
