"""What `mla-fusion calibrate` measured on this machine of products and of the fused region, for
`projections.plan_for` and `dispatch.choose`.

Each file lies beside that of the decode (`measured.own_file`), in the form of the shipped ones and
with `measured.kernels()` as "kernels": rows of other kernels are ignored."""

import functools
import json
from pathlib import Path
from typing import Any

from mla_fusion import logger
from mla_fusion.config.identity import tables_folder
from mla_fusion.files import read_bounded
from mla_fusion.kernels import dispatch
from mla_fusion.projections import measured as projections
from mla_fusion.runtime import measured

PRODUCTS, REGION = "projections", "region"
MODULES = {PRODUCTS: projections, REGION: dispatch}  # with `parse` and `prefer`


def file_name(kind: str, gpu: str) -> str:
    """Name of a GPU's file of `PRODUCTS` or `REGION`."""
    return f"{kind}-{measured.file_name(gpu)}"


@functools.cache
def load(kind: str, gpu: str) -> None:
    """Let the rows that were measured here go before the shipped ones, once in a process."""
    if gpu and (table := read(kind, tables_folder() / file_name(kind, gpu), gpu)):
        MODULES[kind].prefer(gpu, MODULES[kind].parse(table))


def read(kind: str, path: Path, gpu: str) -> dict[str, Any]:
    """The content of a file; empty, with one warning, if it is not one, or of other kernels."""
    try:
        table: Any = json.loads(read_bounded(path))
        if not isinstance(table, dict) or table.get("gpu") != gpu:
            raise ValueError("it is of another GPU")
        if table.get("kernels") != measured.kernels():
            raise ValueError("it is of other kernels")
        MODULES[kind].parse(table)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as why:
        text = "%s: %s is ignored (%s); run mla-fusion calibrate again"
        logger.warning(text, kind, path, why)
        return {}
    logger.info("%s: goes by %s", kind, path)
    return table
