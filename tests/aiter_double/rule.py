"""One rule of AITER: how to break it, what AITER does then, and what the library does."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.aiter_double.faults import Aborted, SilentlyWrong
from tests.aiter_double.versions import number

if TYPE_CHECKING:
    from collections.abc import Callable


ABORTS, SILENT = "aborts", "silently wrong"
TYPE, ASSERTS, KEY = "refuses the type", "fails an assertion", "raises KeyError"
RAISED, AVOIDED, TRUSTED = "refused in Python", "avoided", "the caller's word"


@dataclass(frozen=True)
class Rule:
    """One rule of one call.

    Attributes:
        says: the rule in words.
        fault: what AITER does: `ABORTS` (before v0.1.14 a RuntimeError), `SILENT`, `TYPE` (an
            AssertionError from v0.1.14, silently wrong before), `ASSERTS` or `KEY` (errors of its
            Python side).
        direct: what to change in a good direct call; gets its arguments.
        words: part of what the double then says.
        hostile: how to make the library break the rule; None where only values on the device show
            it: then the rule is the caller's.
        refused: part of the ValueError with which the library refuses before the call; empty if it
            calls AITER so that the result is right.
        before: the first release in which the rule no longer holds, if there is one.
        since: the first release in which it holds.
        on: the one architecture that has the rule, if not both have.
    """

    name: str
    says: str
    fault: str
    direct: Callable[[dict[str, Any]], dict[str, Any]]
    words: str
    hostile: Any = None
    refused: str = ""
    before: str = "v1"
    since: str = "v0"
    on: str = ""

    @property
    def library(self):
        """What the library does."""
        if self.hostile is None:
            return TRUSTED
        return RAISED if self.refused else AVOIDED

    @property
    def breaking(self):
        """What AITER does, where and when."""
        since = f", from {self.since}" if self.since != "v0" else ""
        until = f", until {self.before}" if self.before != "v1" else ""
        on = f", on {self.on}" if self.on else ""
        return self.fault + on + since + until

    def holds(self, at):
        """Whether an architecture and a release have the rule."""
        since, before = number(self.since), number(self.before)
        return self.on in ("", at.arch.name) and since <= number(at.release) < before

    def expected(self, at):
        """What the double raises where the rule is broken."""
        if self.fault == ABORTS:
            return Aborted if at.has("aborts") else RuntimeError
        if self.fault == SILENT or (self.fault == TYPE and not at.has("strict_fp8")):
            return SilentlyWrong
        return KeyError if self.fault == KEY else AssertionError

    @contextmanager
    def named(self):
        """Name the rule in an error of the block."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"rule {self.name}")
            raise
