"""Arguments of the commands, and the error that a command reports to its user."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

GPU_DEVICES = "nv[ghi]*", "kfd", "dxg"  # in /dev: of NVIDIA, of AMD, and under Windows

# The recipes of README and docs/commands.md; tools/setup_env.py makes the second environment.
INSTALL_VLLM = (
    "in a clone of mla-fusion pip install '.[vllm]', or without a GPU make setup, which makes "
    ".venv with a CPU build"
)
_WITHOUT_TORCHVISION = (
    "pip uninstall -y torchvision torchaudio torchcodec: they are of another torch, and no model "
    "here needs them"
)


def mend_vllm(error: str) -> str:
    """What to do about an error of vLLM's import; empty if it is none that is known here."""
    return _WITHOUT_TORCHVISION if "torchvision::nms" in error else ""


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
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor a positive whole number")
    return int(text)


def count(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str,
    text: str,
    default: int | None = None,
) -> None:
    """Add an option that takes a positive whole number."""
    if default is not None:
        text += f" (default: {default})"
    parser.add_argument(name, type=positive, default=default, metavar=metavar, help=text)


def short(text: str, most: int = 80) -> str:
    """`text` in one line of a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def pick(asked: Collection[str], offered: Collection[str]) -> list[str]:
    """The candidates that --peers names, all on offer if it names none.

    Raises:
        UserError: one is not on offer.
    """
    if unknown := [name for name in asked if name not in offered]:
        raise UserError(
            f"no candidate is called {' or '.join(unknown)}: --peers takes {', '.join(offered)}"
        )
    return [*(asked or offered)]


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that `option` names, unless it is there.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {option} {folder}: {error}") from None


def require_gpu() -> None:
    """Check that there is a GPU: at once where the system has no device of one, else by torch.

    Raises:
        UserError: there is none.
    """
    if not (any(any(Path("/dev").glob(name)) for name in GPU_DEVICES) and _torch_sees_one()):
        raise UserError("needs a CUDA or ROCm GPU, and torch sees none here")


def _torch_sees_one() -> bool:
    import torch

    return torch.cuda.is_available()


def require(*modules: str, purpose: str = "it") -> None:
    """Check that packages are installed.

    Raises:
        UserError: one is missing; the message names it, what needs it and how to get it.
    """
    hints = {
        "vllm": INSTALL_VLLM,
        "depyf": "pip install depyf",
        "mla_fusion.passes": "leave the folder of the checkout, or install it: pip install .",
    }
    for module in modules:
        if importlib.util.find_spec(module) is None:
            hint = hints.get(module, f"pip install {module}")
            raise UserError(f"{purpose} needs the package {module}, which is missing: {hint}")
