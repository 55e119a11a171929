"""`mla-fusion check`: whether and why a model would fuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion import kernels
from mla_fusion.commands import declare, positive, zero_or_more

if TYPE_CHECKING:
    import argparse

    from mla_fusion.commands import Commands


def add(commands: Commands) -> None:
    """Declare the arguments."""
    parser = declare(
        commands,
        "check",
        run,
        help="tell whether and why a model would fuse",
        description="Reads config.json; where that does not decide, cuts the model to a few layers "
        "with random weights and starts a vLLM engine on it with the flag on. Prints whether every "
        "MLA layer fuses, where, and what to type, or why not. Needs no GPU and no network.",
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="CONFIG",
        help="the model's config.json, or its folder; not a name on the Hub",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=positive,
        default=256,
        metavar="N",
        help="as the server will get it (default: %(default)s; vLLM's own depends on the GPU)",
    )
    parser.add_argument(
        "--speculative-tokens",
        type=zero_or_more,
        default=0,
        metavar="K",
        help="draft tokens a step: the decode bucket is N * (1 + K) tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="TP",
        help="emulated: the heads of one rank of TP (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="T", help="as in vLLM (default: %(default)s)"
    )
    parser.add_argument(
        "--layers",
        type=positive,
        default=2,
        metavar="L",
        help="layers that are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--provider",
        choices=kernels.PROVIDERS,
        default="reference",
        help="who computes the fused op (default: %(default)s)",
    )
    parser.add_argument(
        "--dump",
        type=Path,
        metavar="DIR",
        help="write the report, and the graph before and after the passes as readable Python, for "
        "mla-fusion report DIR (needs depyf)",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 when every layer fused."""
    from mla_fusion import check

    named = {k: v for k, v in vars(arguments).items() if k not in ("run", "command")}
    return 0 if check.run(check.Settings(**named)) else 1
