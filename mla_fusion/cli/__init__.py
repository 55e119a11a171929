"""The command line `mla-fusion`: one package a command, but for `_ELSEWHERE`.

Its module `command` has `declare(parser)`, which adds its arguments, and `run(arguments)`, which
does the work and returns the exit status: 0 for success (all fused, tokens equal), else 1. A
`UserError` is an error that the user can fix; its exit status is 2. Only the package of the
requested command is imported.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from typing import TYPE_CHECKING

from mla_fusion import __version__
from mla_fusion.cli.arguments import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = {
    "doctor": "say whether fusion can work in this environment",
    "check": "say whether a model would fuse, and why",
    "report": "show the stored reports of engines that were started with the flag on",
    "demo": "run two small models with the fusion off and on, and compare their tokens",
    "bench": "time the fused region or the decode against vLLM's kernels, on a GPU",
    "selftest": "say whether every kernel is right on this GPU",
    "calibrate": "measure on this GPU what attention=auto decides by",
    "plan": "draw how a persistent MLA decode shares a batch among its CTAs",
    "bugreport": "write what doctor, report and selftest find into one file to send",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the command line's."""
    words = sys.argv[1:] if argv is None else [*argv]
    parser = _parser(words[:1])
    near = difflib.get_close_matches("".join(words[:1]), _COMMANDS)
    if near and words[0] not in _COMMANDS:
        parser.error(f"no command is called {words[0]}: did you mean {near[0]}?")
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"mla-fusion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe has gone, as `head` does. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"mla-fusion {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the command in `asked`."""
    parser = argparse.ArgumentParser(
        prog="mla-fusion", description="Fused MLA decode query preparation for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"mla-fusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in asked:
            module = importlib.import_module(f"mla_fusion.cli.{name}.command")
            module.declare(command)
            command.set_defaults(run=module.run)
    return parser
