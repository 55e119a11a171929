"""Writes one JSON file to send with an issue: the diagnosis of doctor, the latest stored reports,
and on a GPU the rows of selftest, which takes a minute. Paths, addresses, host names and the
user's name are left out, as far as a program can tell them from other words."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from mla_fusion import __version__
from mla_fusion.cli import UserError, require_writable, write
from mla_fusion.cli.doctor import command as doctor
from mla_fusion.cli.report.command import cache_root
from mla_fusion.cli.report.redact import Redactor, redactor
from mla_fusion.files import each_text, read_bounded
from mla_fusion.report import QUANTIZATIONS, RangeReport, Report, stored_reports
from mla_fusion.report.graphs import LayerGraph
from mla_fusion.report.reasons import REASONS

_NEWEST, _MOST_BYTES = 4, 2**20  # stored reports, and the size of one, which has kilobytes
# Keys of objects in a stored report; a user may be called like one.
KEYS = {each.name for of in (Report, RangeReport, LayerGraph) for each in fields(of)}
KEYS |= {"detail", *REASONS, "none", *QUANTIZATIONS, "mla-fusion", "vLLM", "torch", "device"}


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    name, text = Path("mla-fusion-bugreport.json"), "where to write it (default: %(default)s)"
    parser.add_argument("file", nargs="?", type=Path, default=name, metavar="FILE", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Write the file; always 0."""
    require_writable(arguments.file)  # before the minute that selftest takes
    redact = redactor()
    found: dict[str, Any] = {"mla_fusion": __version__}
    for name, part in ("doctor", _doctor), ("reports", _reports), ("selftest", _selftest):
        try:
            found[name] = part(redact)
        except UserError as error:
            found[name] = redact(str(error))  # why there is nothing
    write(arguments.file, json.dumps(found, indent=1) + "\n")
    print(f"wrote {arguments.file}: read it before you send it", file=sys.stderr)
    return 0


def _doctor(redact: Redactor) -> dict[str, Any]:
    found = doctor.examine()
    issues = {"issues": found.pop("issues")}  # our own words
    # All keys are ours: a user who is called like one loses none.
    return {**each_text(found, redact, str), **issues}


def _reports(redact: Redactor) -> list[Any]:
    """The newest as they are, but for keys that no report has: one of another release, or a damaged
    one, may be the bug."""

    def key(name: str) -> str:
        return name if name in KEYS else redact(name)

    found = []
    for path in stored_reports(cache_root())[:_NEWEST]:
        try:
            found.append(each_text(json.loads(read_bounded(path, _MOST_BYTES)), redact, key))
        except (OSError, ValueError, RecursionError) as error:
            found.append(redact(f"cannot be read: {error}"))
    return found


def _selftest(redact: Redactor) -> Any:
    from mla_fusion.cli.selftest import command as selftest

    return each_text(selftest.examine(thorough=False), redact, str)
