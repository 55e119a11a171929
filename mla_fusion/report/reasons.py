"""Why a model or a layer stays unfused: the reasons of `reasons.toml`, and one as it is given. A
code is stable: logs, the report and docs/reasons.md name it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reason:
    """Why there is no fusion, and what an operator can do."""

    scope: str  # "engine", "layer", "output", "product" or "decode"
    why: str
    help: str


_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
REASONS = {code: Reason(**fields) for code, fields in tomllib.loads(_TEXT).items()}


@dataclass(frozen=True)
class Decline:
    """Why an engine, a layer or a product stays as it was: a key of `REASONS`, and its detail."""

    code: str
    detail: str = ""

    def sentences(self) -> tuple[str, str]:
        """Why, with the detail and the code; and what would help."""
        reason = REASONS[self.code]
        seen = f" ({self.detail})" if self.detail else ""
        return f"{reason.why}{seen} [{self.code}].", f"What would help: {reason.help}."

    def explain(self) -> str:
        """One line for the log."""
        return " ".join(self.sentences())


class Declined(Exception):
    """Raised where a layer cannot be fused; `decline` says why."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.decline = Decline(code, detail)


def recognize(text: str) -> Decline | None:
    """The decline whose explanation a log line holds; None if it holds none."""
    for code, reason in REASONS.items():
        before, found, _ = text.partition(f" [{code}]. What would help: ")
        if found:
            detail = before.rpartition(reason.why)[2]
            return Decline(code, detail.removeprefix(" (").removesuffix(")"))
    return None
