"""`mla-fusion bench`: the fused region against its peers, on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion.commands import declare, positive

if TYPE_CHECKING:
    import argparse

    from mla_fusion.commands import Commands

_TOKENS = (1, 8, 32, 64, 128, 256, 512)
_HEADS = (8, 16, 32, 64, 128)


def add(commands: Commands) -> None:
    """Declare the arguments."""
    parser = declare(
        commands,
        "bench",
        run,
        help="time the fused region against vLLM's and FlashInfer's kernels, on a GPU",
        description="Times the fused region alone, many layers in one CUDA graph with distinct "
        "weights, against vLLM unfused, vLLM's fuse_rope_kvcache_cat_mla, torch's product with one "
        "kernel, and FlashInfer, each checked in the same run. Needs a GPU; what is not installed "
        "is left out.",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        default=Path("build/bench/region.csv"),
        help="file for the rows (default: %(default)s)",
    )
    for name, default in (("tokens", _TOKENS), ("heads", _HEADS)):
        parser.add_argument(
            f"--{name}",
            type=positive,
            nargs="+",
            default=default,
            metavar=name[0].upper(),
            help="(default: " + " ".join(map(str, default)) + ")",
        )
    parser.add_argument(
        "--layers",
        type=positive,
        default=61,
        metavar="L",
        help="layers in one CUDA graph (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=15,
        metavar="N",
        help="samples of each candidate, taken in turns (default: %(default)s)",
    )
    parser.add_argument("--bf16", action="store_true", help="bf16 cache and query, not fp8")
    parser.add_argument(
        "--peers", nargs="+", default=(), metavar="NAME", help="candidates (default: all)"
    )
    parser.add_argument("--commit", default="", help="commit, where git does not know it")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 when the provider's results passed every check."""
    from mla_fusion import bench_run

    named = {k: v for k, v in vars(arguments).items() if k not in ("run", "command")}
    command = " ".join(["mla-fusion", *sys.argv[1:]])
    return 0 if bench_run.run(bench_run.Settings(**named, command=command)) else 1
