"""The sub-commands of `mla-fusion`, one module each: its arguments, and what it prints.

A module has `add(commands)`, which declares the arguments, and `run(arguments)`, which does the
work and returns the exit status: 0 as hoped (all fused, tokens equal), 1 not so. What the user can
put right is raised as `engine.UserError`.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def declare(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], **texts: Any
) -> argparse.ArgumentParser:
    """A sub-command called `name` that does `run`; `texts` are its help and description."""
    parser = commands.add_parser(name, **texts)
    parser.set_defaults(run=run)
    return parser


def positive(text: str) -> int:
    """An argument that is a positive whole number."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def zero_or_more(text: str) -> int:
    """An argument that is a whole number, 0 included."""
    return 0 if text == "0" else positive(text)
