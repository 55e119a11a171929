"""Measures this GPU for what the flag switches on. The kernels are checked first, as by mla-fusion
selftest. Then products of a model's layer are timed against cuBLAS, launch plans of the fused
region against each other, and the portable decode against vLLM's backends. Takes up to 8 minutes
for a model. Run it on an idle GPU, and again after an upgrade of mla-fusion or Triton."""

import argparse
from pathlib import Path

from mla_fusion.cli import option, require, require_gpu, zero_or_more


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    text = (
        "as for mla-fusion check: a file or its folder; without it all shapes that the shipped "
        "measurements have, and only --out counts"
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="CONFIG", help=text)
    option(parser, "--tensor-parallel-size", "TP", "measure the heads of one rank of TP", 1)
    text, types = "as in vLLM (default: auto, which is bfloat16)", "auto bfloat16 fp8 fp8_e4m3"
    option(parser, "--kv-cache-dtype", None, text, "auto", choices=types.split())
    option(parser, "--speculative-tokens", "K", "draft tokens a step", 0, zero_or_more)
    option(parser, "--out", "FOLDER", "default: where an engine reads it", kind=Path)


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if the file was written, 1 if a result was wrong or nothing could be compared."""
    require_gpu()
    require("vllm", "mla_fusion.passes")
    from mla_fusion.cli.calibrate import measure  # takes seconds

    return measure.run(arguments)
