"""Probes vLLM, torch, Triton, AITER, the GPU, the plugin and the providers, and names known trouble
with what it finds. Exit status 0 if fusion can work here, else 1.
"""

import argparse
import json
import textwrap
from collections.abc import Iterable
from typing import Any

from mla_fusion import __version__, config
from mla_fusion.cli import INSTALL_VLLM, mend_vllm, short
from mla_fusion.cli.doctor import known_issues
from mla_fusion.cli.doctor.environment import probe
from mla_fusion.config import vllm_compat
from mla_fusion.runtime import measured

# The providers that serve on each platform; `reference` is plain torch, no faster than vLLM.
_SERVING = {"rocm": ("aiter", "triton"), "cuda": ("triton",), "cpu": ("reference",)}


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if fusion can work here, else 1."""
    found = examine()
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(found)))
    return 0 if found["works"] else 1


def examine() -> dict[str, Any]:
    """What `--json` prints: the environment, the problems that rule fusion out, known trouble.

    Imports vLLM and, where it is installed, AITER.
    """
    found = probe()
    vllm, error, providers = found["vllm"], found["vllm_error"], found["providers"]
    names = _SERVING[found["platform"]]
    serving = [name for name in names if not providers[name]]
    problems = []
    if error:
        remedy = mend_vllm(error) or f"install it anew: {INSTALL_VLLM}"
        problems.append(f"vLLM cannot be imported: {short(error, 200)}: {remedy}")
    elif not vllm:
        problems.append(f"vLLM is missing: {INSTALL_VLLM}")
    elif not vllm_compat.is_supported(vllm):
        problems.append(f"vLLM {vllm} is outside the window {vllm_compat.window()}")
    if vllm and found["plugin"]:
        problems.append(f"vLLM does not load the plugin: {found['plugin']}")
    if not serving:
        whys = (f"{name}: {providers[name]}" for name in names)
        problems.append("no provider can serve here: " + "; ".join(whys))
    return {
        "works": not problems,
        "mla_fusion": __version__,
        **found,
        "problems": problems,
        "serving_providers": serving,
        "issues": [
            {"threads": issue["threads"].split(), "text": issue["text"]}
            for issue in known_issues.ISSUES
            if known_issues.applies(issue, found)
        ],
    }


def lines(found: dict[str, Any]) -> list[str]:
    """A diagnosis as one screen: the answer first."""
    works, serving, device = found["works"], found["serving_providers"], found["device"]
    if works:
        note = ", for development only (no GPU)" if found["platform"] == "cpu" else ""
        answer = f"fusion can work here, with provider {' or '.join(serving)}{note}"
    else:
        answer = "fusion cannot work here"
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
    if works and found["platform"] == "cuda":
        facts["auto"] = f"goes by {measured.files(device)}"
    out = [f"{answer} (mla-fusion {__version__})"]
    if works and found["default"] not in serving:
        chosen = json.dumps({config.OPTIONS_KEY: {"provider": serving[0]}})
        out.append(f"  name it beside the flag: --additional-config '{chosen}'")
    if works and (what := unknown(device, found["triton"])):
        out.append(f"  the kernels were not measured with {what}: run mla-fusion selftest first")
    out += _wrapped("  problem: ", found["problems"])
    out += ["", *_columns(facts), "", "providers"]
    out += _columns({name: why or "available" for name, why in found["providers"].items()})
    if found["issues"]:
        out += ["", "known trouble on this platform (as of September 2026)"]
        out += _wrapped("  ", (f"{', '.join(i['threads'])}: {i['text']}" for i in found["issues"]))
    return out


def unknown(device: str, triton: str) -> str:
    """What no measurement here is of, GPU or Triton; empty if both are known or there is no GPU."""
    if not device:
        return ""
    what = [] if measured.has_measurements(device) else [device]
    newer = known_issues.numbers(triton)[:2] > measured.NEWEST_TRITON
    return " and ".join([*what, f"Triton {triton}"] if newer else what)


def _columns(facts: dict[str, str]) -> list[str]:
    return [line for name, value in facts.items() for line in _wrapped(f"  {name:<10}", [value])]


def _wrapped(start: str, texts: Iterable[str]) -> list[str]:
    """Each text after `start`, in lines of at most 100 characters."""
    indent = " " * max(len(start), 4)
    wrap = textwrap.TextWrapper(100, subsequent_indent=indent, break_on_hyphens=False).wrap
    return [line for text in texts for line in wrap(start + text)]
