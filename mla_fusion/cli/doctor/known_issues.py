"""Combinations of versions, hardware and settings with known trouble, and where it is reported.

`known_issues.csv` lists them, as of September 2026: the conditions that `doctor` can see (all of a
row must hold, an empty one always does), the public threads, and the trouble with its remedy. The
text names the settings that `doctor` cannot see (a model, a flag of vLLM).
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from mla_fusion.cli.doctor.environment import Environment

# Column -> whether its value holds in an environment.
_CONDITIONS = {
    "platform": lambda e, names: e.platform in names.split(),
    "arch": lambda e, name: e.arch == name,
    "aiter before": lambda e, version: is_before(e.aiter, version),
    "triton before": lambda e, version: is_before(e.triton, version),
    "torch": lambda e, version: numbers(e.torch)[:2] == numbers(version),
    "vllm": lambda e, _: bool(e.vllm),
}


@dataclass(frozen=True)
class Issue:
    """One combination: its public threads, the trouble with its remedy, and where it applies."""

    threads: tuple[str, ...]
    text: str
    conditions: dict[str, str]

    def applies(self, environment: Environment) -> bool:
        """Whether an environment meets every condition."""
        return all(_CONDITIONS[name](environment, value) for name, value in self.conditions.items())


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison: "0.1.19.post1" is (0, 1, 19, 1)."""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


def is_before(version: str, limit: str) -> bool:
    """Whether a version is older than `limit`; that of a missing package, empty, is not."""
    return bool(version) and numbers(version) < numbers(limit)


def of_triton(version: str) -> tuple[Issue, ...]:
    """The trouble of this version of Triton, on whatever GPU."""
    return tuple(
        issue for issue in ISSUES if is_before(version, issue.conditions.get("triton before", "0"))
    )


def _read() -> tuple[Issue, ...]:
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        return tuple(
            Issue(
                tuple(row["threads"].split()),
                row["text"],
                {name: row[name] for name in _CONDITIONS if row[name]},
            )
            for row in csv.DictReader(file)
        )


ISSUES = _read()
