"""Probes vLLM, torch, Triton, AITER, the GPU, the plugin and the providers, and names known trouble
with what it finds. Exit status 0 if fusion can work here, else 1.
"""

import argparse
import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mla_fusion import __version__, config
from mla_fusion.cli import INSTALL_VLLM, mend_vllm, short
from mla_fusion.cli.doctor import known_issues
from mla_fusion.cli.doctor.environment import Environment, probe
from mla_fusion.config import vllm_compat
from mla_fusion.runtime import measured

# The providers that serve on each platform; `reference` is plain torch, no faster than vLLM.
_SERVING = {"rocm": ("aiter", "triton"), "cuda": ("triton",), "cpu": ("reference",)}


@dataclass(frozen=True)
class Diagnosis:
    """The environment, the problems that rule fusion out, and known trouble."""

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


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if fusion can work here, else 1."""
    diagnosis = examine()
    as_json = arguments.json
    print(json.dumps(diagnosis.to_json(), indent=1) if as_json else "\n".join(lines(diagnosis)))
    return 0 if diagnosis.works else 1


def examine() -> Diagnosis:
    """Probe this environment; imports vLLM and, where it is installed, AITER."""
    return diagnose(probe())


def diagnose(found: Environment) -> Diagnosis:
    """The diagnosis of an environment."""
    serving = [name for name in _SERVING[found.platform] if not found.providers[name]]
    problems = []
    if found.vllm_error:
        remedy = mend_vllm(found.vllm_error) or f"install it anew: {INSTALL_VLLM}"
        problems.append(f"vLLM cannot be imported: {short(found.vllm_error, 200)}: {remedy}")
    elif not found.vllm:
        problems.append(f"vLLM is missing: {INSTALL_VLLM}")
    elif not vllm_compat.is_supported(found.vllm):
        problems.append(f"vLLM {found.vllm} is outside the window {vllm_compat.window()}")
    if found.vllm and found.plugin:
        problems.append(f"vLLM does not load the plugin: {found.plugin}")
    if not serving:
        whys = (f"{name}: {found.providers[name]}" for name in _SERVING[found.platform])
        problems.append("no provider can serve here: " + "; ".join(whys))
    issues = [issue for issue in known_issues.ISSUES if issue.applies(found)]
    return Diagnosis(found, problems, serving, issues)


def lines(diagnosis: Diagnosis) -> list[str]:
    """The diagnosis as one screen: the answer first."""
    found = diagnosis.environment
    if diagnosis.works:
        note = ", for development only (no GPU)" if found.platform == "cpu" else ""
        answer = f"fusion can work here, with provider {' or '.join(diagnosis.serving)}{note}"
    else:
        answer = "fusion cannot work here"
    offers = [f"{'has' if yes else 'no'} {what}" for what, yes in found.aiter_offers.items()]
    broken = "cannot be imported" if found.vllm_error else "missing"
    facts = {
        "vLLM": f"{found.vllm or broken} (supported: {vllm_compat.window()})",
        "torch": found.torch,
        "Triton": found.triton or "missing",
        "AITER": (found.aiter or "missing") + (f": {', '.join(offers)}" if offers else ""),
        "GPU": f"{found.device} ({found.arch}, {found.platform})" if found.device else "none",
        "fp8 type": found.fp8 or "unknown without vLLM",
        "plugin": found.plugin or "loaded",
    }
    if diagnosis.works and found.platform == "cuda":
        facts["auto"] = f"goes by {measured.files(found.device)}"
    out = [f"{answer} (mla-fusion {__version__})"]
    if diagnosis.works and found.default not in diagnosis.serving:
        chosen = json.dumps({config.OPTIONS_KEY: {"provider": diagnosis.serving[0]}})
        out.append(f"  name it beside the flag: --additional-config '{chosen}'")
    if diagnosis.works and (what := unknown(found)):
        out.append(f"  the kernels were not measured with {what}: run mla-fusion selftest first")
    out += _wrapped("  problem: ", diagnosis.problems)
    out += ["", *_columns(facts), "", "providers"]
    out += _columns({name: why or "available" for name, why in found.providers.items()})
    if diagnosis.issues:
        out += ["", "known trouble on this platform (as of September 2026)"]
        out += _wrapped("  ", (f"{', '.join(i.threads)}: {i.text}" for i in diagnosis.issues))
    return out


def unknown(found: Environment) -> str:
    """What no measurement here is of, GPU or Triton; empty if both are known or there is no GPU."""
    if not found.device:
        return ""
    what = [] if measured.has_measurements(found.device) else [found.device]
    newer = known_issues.numbers(found.triton)[:2] > measured.NEWEST_TRITON
    what += [f"Triton {found.triton}"] if newer else []
    return " and ".join(what)


def _columns(facts: dict[str, str]) -> list[str]:
    return [line for name, value in facts.items() for line in _wrapped(f"  {name:<10}", [value])]


def _wrapped(start: str, texts: Iterable[str]) -> list[str]:
    """Each text after `start`, in lines of at most 100 characters."""
    indent = " " * max(len(start), 4)
    wrap = textwrap.TextWrapper(100, subsequent_indent=indent, break_on_hyphens=False).wrap
    return [line for text in texts for line in wrap(start + text)]
