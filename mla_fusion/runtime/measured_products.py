"""What `mla-fusion calibrate` measured of products on this machine, for `projections.plan_for`.

The file lies beside that of the decode (`measured.own_file`), in the form of `projections/gpus` and
with `measured.kernels()` as "kernels": rows of other kernels are ignored."""

import functools
import json
from pathlib import Path
from typing import Any

from mla_fusion import logger
from mla_fusion.config.identity import tables_folder
from mla_fusion.files import read_bounded
from mla_fusion.projections import measured as projections
from mla_fusion.projections.measured import Row, Shape
from mla_fusion.runtime import measured


def file_name(gpu: str) -> str:
    """Name of the file of a GPU."""
    return f"projections-{measured.file_name(gpu)}"


@functools.cache
def load(gpu: str) -> None:
    """Let `plan_for` go by the rows that were measured here, once in a process."""
    if gpu and (rows := read(tables_folder() / file_name(gpu), gpu)):
        projections.prefer(gpu, rows)


def read(path: Path, gpu: str) -> dict[Shape, list[Row]]:
    """The rows of a file; none, and one warning, from a file that is not one, or of other
    kernels."""
    try:
        table: Any = json.loads(read_bounded(path))
        if not isinstance(table, dict) or table.get("gpu") != gpu:
            raise ValueError("it is of another GPU")
        if table.get("kernels") != measured.kernels():
            raise ValueError("it is of other kernels")
        rows = projections.parse(table)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as why:
        text = "projections=auto: %s is ignored (%s); run mla-fusion calibrate again"
        logger.warning(text, path, why)
        return {}
    logger.info("projections=auto: goes by %s", path)
    return rows
