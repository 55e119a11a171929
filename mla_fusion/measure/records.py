"""The rows of a measurement in a CSV file, each behind the GPU, versions and command it is of."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

from mla_fusion import gpu

T = TypeVar("T")
Row = dict[str, Any]
FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]


def version_of(package: str) -> str:
    """The version of an installed package; empty if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def environment(commit: str = "", program: str = "mla-fusion") -> dict[str, str]:
    """GPU, driver, versions, commit and command; what is not there is an empty string."""
    return {
        "gpu": gpu.of("cuda").name,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "flashinfer": version_of("flashinfer-python"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join([program, *sys.argv[1:]]),
    }


def table(
    path: Path,
    facts: Mapping[str, str],
    columns: Sequence[str],
    work: Iterable[T],
    measure: Callable[[T], list[Row]],
) -> list[Row]:
    """Measure all `work`, and return its rows. Those of each shape go into the CSV file at once, in
    six digits behind `FACTS`."""
    rows: list[Row] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *columns], extrasaction="ignore")
        writer.writeheader()
        for shape in work:
            rows += (new := measure(shape))
            for row in new:
                short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({**facts, **short})
            file.flush()
            torch.cuda.empty_cache()
    return rows


def text(table: Mapping[str, Any]) -> str:
    """A JSON file of measurements: a line for each row."""
    line = json.dumps(table)
    for joined, broken in ("[[", "[\n["), ("], [", "],\n["), ("}, {", "},\n{"):
        line = line.replace(joined, broken)
    return line + "\n"


def medians(rows: Iterable[Row], columns: Sequence[str]) -> dict[tuple[Any, ...], dict[str, float]]:
    """The median of each candidate, by what the rows have in `columns`."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        of_shape = found.setdefault(tuple(row[name] for name in columns), {})
        of_shape[row["candidate"]] = row["p50_us"]
    return found
