#!/usr/bin/env python3
"""Writes what `attention=auto` decides by: mla_fusion/runtime/gpus/*.json, from results/*.csv.

    python benchmarks/tables.py

The rows are those of `mla-fusion bench decode` of ours and of the peer that the GPU's vLLM chooses.
Rows of the decode alone count only for shapes without a row that has the product with W_UV too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import figures

from mla_fusion.runtime import measured

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCES = [*figures.ATTENTION, figures.RESULTS / "step_h200.csv"]
DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
BACKENDS = {"fa3": "FLASH_ATTN_MLA", "flashmla": "FLASHMLA"}
TIMES = "p20_us", "p50_us", "p80_us"


def tables(rows: Iterable[figures.Row]) -> dict[str, dict[str, Any]]:
    """The content of each file, by its name."""
    shapes: dict[tuple[Any, ...], dict[tuple[int, ...], dict[str, figures.Row]]] = {}
    behind = set()
    for row in rows:
        # Older files are of one query row, and of the decode alone.
        of = row["gpu"], row["dtype"], int(row["heads"]), int(row.get("queries", 1))
        values = int(row.get("values", 0))
        behind |= {of} if values else set()
        step = int(row["batch"]), int(row["context"]), int(row["ragged"])
        who = "theirs" if row["vllm_default"] == "1" else row["candidate"]
        shapes.setdefault((*of, values), {}).setdefault(step, {})[who] = row
    found: dict[str, dict[str, Any]] = {}
    for (gpu, dtype, heads, queries, values), steps in sorted(shapes.items()):
        if not values and (gpu, dtype, heads, queries) in behind:
            continue
        pairs = {step: (us["ours"], us["theirs"]) for step, us in sorted(steps.items())}
        ours, theirs = next(iter(pairs.values()))
        table = found.setdefault(measured.file_name(gpu), {"gpu": gpu, "shapes": []})
        table["shapes"].append(
            {"dtype": DTYPES[dtype], "heads": heads, "queries": queries}
            | {"backend": BACKENDS[theirs["candidate"]], "values": values}
            | {name: ours[name] for name in ("vllm", "triton", "commit", "command")}
            | {"rows": [[*step, *(float(row[t]) for row in pair for t in TIMES)]
                        for step, pair in pairs.items()]}
        )  # fmt: skip
    return found


def text(table: dict[str, Any]) -> str:
    """A file: a line for each row."""
    line = json.dumps(table)
    for joined, broken in ("[[", "[\n["), ("], [", "],\n["), ("}, {", "},\n{"):
        line = line.replace(joined, broken)
    return line + "\n"


if __name__ == "__main__":
    for name, table in tables(row for path in SOURCES for row in figures.read(path)).items():
        (measured.FOLDER / name).write_text(text(table))
