"""The tables of docs/aiter.md, from the rules themselves.

    python -m tests.aiter_double.table

writes them between the marks in the page; tests/aiter_double/test_page.py fails until it is done.
"""

from __future__ import annotations

from pathlib import Path

from tests.aiter_double.decode_rules import DECODE_RULES, PLAN_RULES
from tests.aiter_double.fused_rules import RULES
from tests.aiter_double.rule import ABORTS, SILENT
from tests.aiter_double.versions import RELEASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "aiter.md"


def fused() -> str:
    """The rules of the fused op."""
    rows = ["| rule | in words | breaking it | the provider |", "|---|---|---|---|"]
    for rule in RULES:
        rows.append(f"| `{rule.name}` | {rule.says} | {rule.breaking} | {rule.library} |")
    return "\n".join(rows)


def decode() -> str:
    """The rules of the planner and the decode."""
    rows = ["| call | broken by | AITER |", "|---|---|---|"]
    for call, rules in (("get_mla_metadata_v1", PLAN_RULES), ("mla_decode_fwd", DECODE_RULES)):
        for name, (_, words) in rules.items():
            fault = ABORTS if words.startswith("!") else SILENT
            rows.append(f"| `{call}` | {name} | {fault} |")
    return "\n".join(rows)


def releases() -> str:
    """What each release of the double lacks of the last one."""
    rows = ["| release | heads of the planner | without |", "|---|---|---|"]
    for release in RELEASES.values():
        missing = ", ".join(name.replace("_", " ") for name in release.missing())
        rows.append(f"| {release.name} | n x {release.heads_multiple} | {missing or 'nothing'} |")
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with the tables as they are now."""
    for name, text in (("fused", fused()), ("decode", decode()), ("releases", releases())):
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + text + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
