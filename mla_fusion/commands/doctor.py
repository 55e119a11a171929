"""`mla-fusion doctor`: whether fusion can work in this environment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mla_fusion.commands import declare

if TYPE_CHECKING:
    import argparse

    from mla_fusion.commands import Commands


def add(commands: Commands) -> None:
    """Declare the arguments."""
    parser = declare(
        commands,
        "doctor",
        run,
        help="tell whether fusion can work in this environment",
        description="Probes vLLM, torch, Triton, AITER, the GPU, the plugin and the providers, and "
        "names known trouble with what it finds. Exit status 0 if fusion can work here, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run it; 0 if fusion can work here."""
    from mla_fusion import doctor

    diagnosis = doctor.examine()
    if arguments.json:
        print(json.dumps(diagnosis.to_json(), indent=1))
    else:
        print("\n".join(doctor.lines(diagnosis)))
    return 0 if diagnosis.works else 1
