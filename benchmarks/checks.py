"""Checks of a GPU script: each is printed and counted, and a failure sets the exit status."""

from __future__ import annotations

import sys
from typing import NoReturn

failures: list[str] = []


def expect(name: str, ok: bool, detail: str) -> None:
    """Record one check."""
    if not ok:
        failures.append(f"{name}: {detail}")
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", flush=True)


def finish() -> NoReturn:
    """Print how many failed, and which; exit with 1 if one did."""
    print(f"{len(failures)} failures")
    for line in failures:
        print(line)
    sys.exit(bool(failures))
