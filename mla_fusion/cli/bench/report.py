"""`mla-fusion bench --report FILE`: what a GPU that was never measured says, in one file to send.

A few shapes of the region and of the decode, with their checks, and what `doctor` finds: minutes,
not the hour of the whole grids. The file is written after each part, because AITER may end the
process, and holds the error of a part that fails.
"""

import argparse
import csv
import json
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mla_fusion.cli.doctor import command as doctor

# A chain of loads, a full GPU, and the two between; sequences that split and those that do not.
SHAPES: dict[str, dict[str, Any]] = {
    "region": {"tokens": (1, 16, 64, 256), "heads": (16, 128), "rounds": 7},
    "decode": {"batches": (4, 64), "contexts": (8192,), "heads": (16, 128)},
}


def write(
    path: Path,
    commit: str,
    defaults: dict[str, dict[str, Any]],
    measure: Callable[[argparse.Namespace], bool],
) -> bool:
    """Measure `SHAPES`, all else as in `defaults`, and write the file; whether all is right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"doctor": doctor.examine().to_json()}
    right = True
    for what, shapes in SHAPES.items():
        path.write_text(json.dumps(report, indent=1))
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "rows.csv")
            settings = {"peers": (), "commit": commit, **defaults[what], **shapes}
            part: dict[str, Any] = {}
            try:
                part["right"] = measure(argparse.Namespace(what=what, csv=rows, **settings))
            except Exception:  # noqa: BLE001 (whatever it is, it goes into the file)
                part["error"] = traceback.format_exc()
            if rows.exists():
                with rows.open(newline="") as file:
                    part["rows"] = list(csv.DictReader(file))
        report[what] = part
        right &= part.get("right", False)
    path.write_text(json.dumps(report, indent=1))
    print(f"Send this file: {path}")
    return right
