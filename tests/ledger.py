"""The ledger of known failures: `tests/known_failures.toml`, read and held to its rules.

Each `[[failure]]` names a test, why it fails, and since when:

    [[failure]]
    test = "tests/test_upstream.py::test_name[parameters]"
    cause = "what is wrong, and where it is reported or can be seen"
    since = "2026-11-21"

The test still runs. It must fail: a listed test that passes fails the run, so that an entry goes
when its cause does. An entry without a cause or a date, or for a test that does not exist, stops
the run before it starts.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

NAME = "known_failures.toml"
FIELDS = ("test", "cause", "since")


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a ledger; none if there is no such file.

    Raises:
        pytest.UsageError: an entry breaks a rule that can be seen without running anything.
    """
    if not path.exists():
        return []
    entries = tomllib.loads(path.read_text()).get("failure", [])
    seen: set[str] = set()
    for entry in entries:
        where = f"{path.name}: the entry for {entry.get('test', '(no test)')}"
        if set(entry) != set(FIELDS) or not all(str(entry[f]).strip() for f in FIELDS):
            raise pytest.UsageError(f"{where} must have {', '.join(FIELDS)}, and nothing else")
        try:
            datetime.date.fromisoformat(entry["since"])
        except ValueError as error:
            raise pytest.UsageError(f"{where}: since must be a date, YYYY-MM-DD") from error
        if entry["test"] in seen:
            raise pytest.UsageError(f"{where} stands there twice")
        seen.add(entry["test"])
    return entries


def exists(test: str, root: Path) -> bool:
    """Whether the file of a test id has a test function of that name."""
    path, _, rest = test.partition("::")
    name = rest.split("[")[0].split("::")[-1]
    source = root / path
    return source.is_file() and bool(re.search(rf"def {re.escape(name)}\(", source.read_text()))


def mark(items: list[pytest.Item], entries: list[dict[str, Any]], root: Path) -> None:
    """Expect the listed tests to fail.

    Raises:
        pytest.UsageError: a listed test does not exist. The parameters in its id are checked too
            if this run collected other parameters of the same test.
    """
    by_id = {item.nodeid: item for item in items}
    for entry in entries:
        test = entry["test"]
        function = test.split("[")[0]
        siblings = [nodeid for nodeid in by_id if nodeid.split("[")[0] == function]
        if not exists(test, root) or (siblings and test not in by_id):
            raise pytest.UsageError(f"{NAME}: there is no test {test}")
        if test in by_id:
            reason = f"{entry['cause']} (since {entry['since']})"
            by_id[test].add_marker(pytest.mark.xfail(strict=True, reason=reason))
