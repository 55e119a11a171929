"""The command line `mla-fusion`; the commands themselves are the modules of `commands`.

Exit status: 0 all fused (and tokens equal), 1 not so, 2 something the user can put right.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from mla_fusion import __version__
from mla_fusion.commands import bench, check, demo, doctor, plan, report
from mla_fusion.engine import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMANDS = (doctor, check, report, demo, bench, plan)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; `argv` defaults to the command line's."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"mla-fusion {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone, as `head` does; Python would complain again while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"mla-fusion {arguments.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mla-fusion", description="Fused MLA decode query preparation for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"mla-fusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
