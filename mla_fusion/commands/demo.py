"""`mla-fusion demo`: two small models with the fusion off and on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mla_fusion.commands import declare

if TYPE_CHECKING:
    import argparse

    from mla_fusion.commands import Commands


def add(commands: Commands) -> None:
    """Declare the arguments."""
    parser = declare(
        commands,
        "demo",
        run,
        help="run two small models with the fusion off and on, and compare their tokens",
        description="Builds two small models with random weights, DeepSeek-V2- and V3-shaped, runs "
        "a vLLM engine for each with the flag off and on, and compares the tokens. Needs no GPU.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/demo"),
        help="folder for the models, the logs and report.json (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 when every layer fused and the tokens are equal."""
    from mla_fusion import demo

    return 0 if demo.run(arguments.out) else 1
