"""Rows of a CSV file, each with the facts of the machine that measured it."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import torch

from mla_fusion.cli.doctor.environment import version_of

if TYPE_CHECKING:
    import csv
    from collections.abc import Mapping

Row = dict[str, Any]
FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0]
    except OSError:
        return ""


def environment(commit: str = "") -> dict[str, str]:
    """GPU, driver, versions and commit; what is not there is an empty string."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vllm": version_of("vllm"),
        "flashinfer": version_of("flashinfer-python"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
    }


def write(writer: csv.DictWriter[str], facts: Mapping[str, str], rows: list[Row]) -> None:
    """Rows of a shape, in four digits."""
    for row in rows:
        rounded = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        writer.writerow({**facts, **rounded})
