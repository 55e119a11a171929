"""Combinations of versions, hardware and settings with known trouble, as of September 2026.

A row of `known_issues.csv` has the conditions that `doctor` can see (all must hold, an empty one
always does), the public threads, and the trouble with its remedy, which names the settings that it
cannot see (a model, a flag of vLLM).
"""

import csv
import re
from pathlib import Path
from typing import Any

# Column -> whether its value holds in an environment of `command.probe`.
_CONDITIONS = {
    "platform": lambda e, names: e["platform"] in names.split(),
    "arch": lambda e, name: e["arch"] == name,
    "aiter before": lambda e, version: is_before(e["aiter"], version),
    "triton before": lambda e, version: is_before(e["triton"], version),
    "torch": lambda e, version: numbers(e["torch"])[:2] == numbers(version),
    "vllm": lambda e, _: bool(e["vllm"]),
}

with Path(__file__).with_suffix(".csv").open(newline="") as _file:
    ISSUES = [*csv.DictReader(_file)]


def applies(issue: dict[str, str], environment: dict[str, Any]) -> bool:
    """Whether an environment meets every condition of one of `ISSUES`."""
    return all(not issue[name] or holds(environment, issue[name])
               for name, holds in _CONDITIONS.items())  # fmt: skip


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "0.1.19.post1" is (0, 1, 19, 1)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def is_before(version: str, limit: str) -> bool:
    """Whether a version is older than `limit`; that of a missing package, empty, is not."""
    return bool(version) and numbers(version) < numbers(limit)
