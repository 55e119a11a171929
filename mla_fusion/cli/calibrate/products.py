"""Measures the products of a model's layers for `projections=auto`, as one rank has them."""

import argparse
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import torch

from mla_fusion.cli.bench import projections as bench
from mla_fusion.cli.check import model_config
from mla_fusion.cli.selftest.kernels import run_checks
from mla_fusion.config import models
from mla_fusion.measure.records import text
from mla_fusion.measure.timing import measure_ceilings
from mla_fusion.projections.measured import shape_of
from mla_fusion.projections.shapes import shapes_of
from mla_fusion.runtime import measured, measured_here

CHECKS = "projection vector", "projection matrix", "projection block"


def calibrate(arguments: argparse.Namespace, facts: Mapping[str, str], folder: Path) -> int:
    """Measure, and write the file that `measured_here.load` reads; 1 if a result was wrong."""
    model, ranks = model_config.read(arguments.model), arguments.tensor_parallel_size
    model_config.cut(model, 1, ranks)  # it refuses what is no MLA model, or no rank of it
    wide_router = models.facts(str(model.config.get("model_type"))).wide_router
    shapes = bench.measurable(shapes_of(model.config, ranks, wide_router))
    path = folder / measured_here.file_name(measured_here.PRODUCTS, facts["gpu"])
    if any(row.verdict == "WRONG" for row in run_checks(CHECKS)):
        print("no product is measured; open an issue with `mla-fusion selftest --json FILE`")
        return 1
    torch.manual_seed(0)
    bench.compile_all(shapes, bench.DEFAULTS["tokens"])
    measure = functools.partial(
        bench.measure, rounds=bench.DEFAULTS["rounds"], ceilings=measure_ceilings()
    )
    work = bench.inputs(shapes, bench.DEFAULTS["tokens"])
    rows = list(itertools.chain.from_iterable(map(measure, work)))
    if any(row["wrong"] for row in rows):
        print("WRONG results, marked with !: nothing is written for projections=auto")
        return 1
    new = {**bench.table(rows, facts), "kernels": measured.kernels()}
    old = measured_here.read(measured_here.PRODUCTS, path, facts["gpu"]).get("shapes", [])
    new["shapes"] = [each for each in old if shape_of(each) not in shapes] + new["shapes"]
    path.write_text(text(new))
    print(f"Rows of products: {path}.")
    return 0
