"""The command line `mla-fusion`: one package a command, but for `_ELSEWHERE`; and what they share.

The docstring of a command's module is what its --help says first. It has `declare(parser)`, which
adds its arguments, and `run(arguments)`, which returns the exit status: 0 for success (all fused,
tokens equal), else 1; 2 after a `UserError`. Only the requested command is imported."""

import argparse
import contextlib
import difflib
import errno
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from mla_fusion import __version__
from mla_fusion.files import printable

_COMMANDS = {
    "doctor": "say whether fusion can work in this environment",
    "check": "say whether a model would fuse, and why",
    "report": "show the stored reports of engines that were started with the flag on",
    "demo": "run two small models with the fusion off and on, and compare their tokens",
    "bisect": "name the first layer whose fusion changes an answer to your prompts",
    "bench": "time the fused region or the decode against vLLM's kernels, on a GPU",
    "selftest": "say whether every kernel is right on this GPU",
    "calibrate": "measure on this GPU what attention=auto decides by",
    "plan": "draw how a persistent MLA decode shares a batch among its CTAs",
    "bugreport": "write what doctor, report and selftest find into one file to send",
}
_ELSEWHERE = {"bugreport": "report.bugreport"}
GPU_DEVICES = "nv[ghi]*", "kfd", "dxg"  # in /dev: of NVIDIA, of AMD, and under Windows

# The recipes of README and docs/commands.md; tools/setup_env.py makes the second environment.
INSTALL_VLLM = (
    "in a clone of mla-fusion pip install '.[vllm]', or without a GPU make setup, which makes "
    ".venv with a CPU build"
)
_HINTS = {
    "vllm": INSTALL_VLLM,
    "mla_fusion.passes": "leave the folder of the checkout, or install it: pip install .",
}


class UserError(Exception):
    """An error that the user can fix; the message says what happened, why, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the command line's."""
    words = sys.argv[1:] if argv is None else [*argv]
    parser = _parser(words[:1])
    near = difflib.get_close_matches("".join(words[:1]), _COMMANDS)
    if near and near[0] != words[0]:
        parser.error(f"no command is called {words[0]}: did you mean {near[0]}?")
    arguments = parser.parse_args(words)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        said = "\n".join(map(printable, str(error).split("\n")))  # names of files may be anything
        print(f"mla-fusion {arguments.command}: {said}", file=sys.stderr)
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
    text = "Fused MLA decode query preparation for vLLM."
    parser = argparse.ArgumentParser(prog="mla-fusion", description=text)
    parser.add_argument("--version", action="version", version=f"mla-fusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in asked:
            where = _ELSEWHERE.get(name, f"{name}.command")
            module = importlib.import_module(f"mla_fusion.cli.{where}")
            command.description = module.__doc__
            command.set_defaults(run=module.run)
            module.declare(command)
    return parser


def positive(text: str) -> int:
    """An argument that is a positive whole number."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def zero_or_more(text: str) -> int:
    """An argument that is a whole number, 0 included."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor a positive whole number")
    return int(text)


def option(
    parser: argparse._ActionsContainer,
    name: str,
    metavar: str | None,
    text: str,
    default: Any = None,
    kind: Callable[[str], Any] = positive,
    choices: Collection[str] | None = None,
) -> None:
    """Add an option of one value; its help ends with the default, unless None or in `text`."""
    if default is not None and "(default: " not in text:
        text += f" (default: {default})"
    given: dict[str, Any] = {"metavar": metavar, "choices": choices, "help": text}
    parser.add_argument(name, type=str if choices else kind, default=default, **given)


def mend_vllm(error: str) -> str:
    """Advice on an error of vLLM's import; empty for an unknown error."""
    if "torchvision::nms" not in error:
        return ""
    packages = "torchvision torchaudio torchcodec"
    return f"pip uninstall -y {packages}: they are of another torch, and no model here needs them"


def short(text: str, most: int = 80) -> str:
    """`text` in one line of a readable length."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that `option` names, unless it is there; a UserError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {option} {folder}: {error}") from None


def write(path: Path, text: str, option: str = "") -> None:
    """Write a file that the user named, by `option`; a UserError if it cannot be written. A file
    that is there is replaced in one step: after an error it has its old content."""
    with _part(path, option) as (part, target):
        part.write_text(text, encoding="utf-8")
        if part != target:
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)


def require_writable(path: Path) -> None:
    """A UserError, before any work, if `write` would raise it now. The file stays as it is."""
    with _part(path):
        pass


@contextlib.contextmanager
def _part(path: Path, option: str = "") -> Iterator[tuple[Path, Path]]:
    """(an empty file beside the target, the target), which are one for a device or a pipe. An
    OSError, also of the body, becomes a UserError."""
    part = None
    try:
        target = Path(os.path.realpath(path))  # a link stays one
        for number, found in (
            (errno.ELOOP, target.is_symlink()),
            (errno.EISDIR, target.is_dir()),
            (errno.EACCES, target.exists() and not os.access(target, os.W_OK)),
        ):
            if found:
                raise OSError(number, os.strerror(number))
        if target.exists() and not target.is_file():
            yield target, target
        else:
            part = target.with_name(f".mla-fusion-{os.getpid()}.part")
            part.touch()
            yield part, target
    except OSError as error:
        raise UserError(f"cannot write {option}{path}: {error.strerror}") from None
    finally:
        if part:
            part.unlink(missing_ok=True)


def require_gpu() -> None:
    """A UserError without a GPU: at once where the system has no device of one, else by torch."""
    if any(any(Path("/dev").glob(name)) for name in GPU_DEVICES):
        import torch

        if torch.cuda.is_available():
            return
    raise UserError("needs a CUDA or ROCm GPU, and torch sees none here")


def require(*modules: str, purpose: str = "it") -> None:
    """A UserError that names the first package that is missing, what needs it, and a remedy."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            hint = _HINTS.get(module, f"pip install {module}")
            raise UserError(f"{purpose} needs the package {module}, which is missing: {hint}")
