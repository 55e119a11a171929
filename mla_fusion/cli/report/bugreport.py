"""Writes one JSON file to send with an issue: the diagnosis of doctor, the latest stored reports,
and on a GPU the rows of selftest, which takes a minute. Paths, host names and the user's name are
left out."""

import argparse
import contextlib
import getpass
import json
import os
import platform
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from mla_fusion import __version__
from mla_fusion.cli import UserError, write
from mla_fusion.cli.doctor import command as doctor
from mla_fusion.cli.report.command import cache_root
from mla_fusion.report import stored_reports
from mla_fusion.report.files import read_bounded

_NEWEST = 4  # stored reports


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    name, text = Path("mla-fusion-bugreport.json"), "where to write it (default: %(default)s)"
    parser.add_argument("file", nargs="?", type=Path, default=name, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Write the file; always 0."""
    write(arguments.file, "")  # before the minute that selftest takes
    found = {"mla_fusion": __version__, "doctor": doctor.examine()}
    for name, part in ("reports", _reports), ("selftest", _selftest):
        try:
            found[name] = part()
        except UserError as error:
            found[name] = str(error)  # why there is nothing
    write(arguments.file, json.dumps(_clean(found, _secrets()), indent=1) + "\n")
    print(f"wrote {arguments.file}: read it before you send it", file=sys.stderr)
    return 0


def _reports() -> list[Any]:
    """The newest as they are: one of another release, or a damaged one, may be the bug."""
    found = []
    for path in stored_reports(cache_root())[:_NEWEST]:
        try:
            found.append(json.loads(read_bounded(path)))
        except (OSError, ValueError) as error:
            found.append(f"cannot be read: {error}")
    return found


def _selftest() -> Any:
    from mla_fusion.cli.selftest import command as selftest

    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "selftest.json")
        selftest.run(argparse.Namespace(json=rows, thorough=False))
        return json.loads(rows.read_bytes())


def _secrets() -> list[tuple[str, str]]:
    """(pattern, what stands for it) of paths and of the names of this host and its user."""
    hosts = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    hosts |= {name.partition(".")[0] for name in hosts}
    folders = {str(Path.home()), str(Path.cwd()), sys.prefix, sys.base_prefix}
    folders |= {each for value in os.environ.values() for each in value.split(os.pathsep)}
    rooted = {each.rstrip("/") for each in folders if each.startswith("/")}
    user = ""
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        user = getpass.getuser()
    return [
        # First those that are known, which may hold spaces; then what looks like one.
        (r"(?<![\w.])" + _any_of(rooted) + r"[^\s'\",;:()\[\]]*", "<path>"),
        (r"(?<=://)[^\s/'\",;()]+|\b\d+(?:\.\d+){3}(?::\d+)?\b", "<host>"),
        (r"(?<![\w.:/<>])(?:~[\w.-]*|\.{1,2})?/[^\s'\",;:()\[\]]+", "<path>"),
        (rf"(?<![\w-]){_any_of(hosts - {'localhost'})}(?![\w-])", "<host>"),
        (rf"(?<![\w-]){_any_of({user} - {'root'})}(?![\w-])", "<user>"),
    ]


def _clean(value: Any, secrets: list[tuple[str, str]]) -> Any:
    """`value`, plain data, without `secrets`, in keys too."""
    if isinstance(value, dict):
        return {_clean(key, secrets): _clean(each, secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(each, secrets) for each in value]
    if isinstance(value, str):
        for pattern, mark in secrets:
            value = re.sub(pattern, mark, value)
    return value


def _any_of(texts: set[str]) -> str:
    """A pattern of any of them that is not empty, the longest first; else of nothing."""
    escaped = map(re.escape, sorted(texts - {""}, key=len, reverse=True))
    return f"(?:{'|'.join(escaped) or '(?!)'})"
