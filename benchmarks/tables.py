#!/usr/bin/env python3
"""Writes what `attention=auto` decides by: mla_fusion/runtime/gpus/*.json, from results/*.csv.

python benchmarks/tables.py
"""

from __future__ import annotations

import figures

from mla_fusion.cli.calibrate.tables import tables, text
from mla_fusion.runtime import measured

SOURCES = [*figures.ATTENTION, figures.RESULTS / "step_h200.csv"]


def shipped() -> dict[str, str]:
    """The files by name: of ours and of what vLLM chooses there."""
    rows = [row for path in SOURCES for row in figures.read(path)]
    chosen = [row for row in rows if row["candidate"] == "ours" or row["vllm_default"] == "1"]
    return {name: text(table) for name, table in tables(chosen).items()}


if __name__ == "__main__":
    for name, content in shipped().items():
        (measured.FOLDER / name).write_text(content)
