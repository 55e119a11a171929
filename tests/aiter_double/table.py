"""The tables of docs/aiter.md, from the rules themselves.

    python -m tests.aiter_double.table

writes them between the marks in the page; tests/aiter_double/test_page.py fails until it is done.
"""

from __future__ import annotations

from pathlib import Path

from tests.aiter_double import broken, heads
from tests.aiter_double.fused_rules import RULES
from tests.aiter_double.versions import RELEASES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "aiter.md"


def fused() -> str:
    """The rules of the fused op."""
    rows = ["| rule | in words | breaking it | the provider |", "|---|---|---|---|"]
    for rule in RULES:
        rows.append(f"| `{rule.name}` | {rule.says} | {rule.breaking} | {rule.library} |")
    return "\n".join(rows)


def adapter() -> str:
    """The rules of the planner and the decode."""
    rows = ["| call | rule | in words | breaking it | the adapter |", "|---|---|---|---|---|"]
    for op, rules in broken.ADAPTER_RULES.items():
        for rule in rules:
            words = f"{rule.says} | {rule.breaking} | {rule.library}"
            rows.append(f"| `{op}` | `{rule.name}` | {words} |")
    return "\n".join(rows)


def others() -> str:
    """The rules of what the adapter does not call."""
    rows = ["| call | rule | in words | breaking it |", "|---|---|---|---|"]
    for op, rules in broken.OTHER_RULES.items():
        rows += [f"| `{op}` | `{r.name}` | {r.says} | {r.breaking} |" for r in rules]
    return "\n".join(rows)


def kernels() -> str:
    """The kernels of the decode that follow a plan."""
    rows = ["| architecture | types | heads: query lengths | with LSE |", "|---|---|---|---|"]
    for (arch, kind), counts in heads.PERSISTENT.items():
        tables = (counts, heads.LSE.get((arch, kind), {}))
        shapes = " | ".join("; ".join(map(_shape, t.items())) or "none" for t in tables)
        rows.append(f"| {arch} | {kind} | {shapes} |")
    return "\n".join(rows)


def _shape(shape: tuple[int, tuple[int, ...]]) -> str:
    return f"{shape[0]}: {', '.join(map(str, shape[1]))}"


def releases() -> str:
    """What each release of the double lacks of the last one."""
    rows = ["| release | heads of the planner | without |", "|---|---|---|"]
    for release in RELEASES.values():
        missing = ", ".join(name.replace("_", " ") for name in release.missing())
        rows.append(f"| {release.name} | n x {release.heads_multiple} | {missing or 'nothing'} |")
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with the tables as they are now."""
    for make in (fused, adapter, others, kernels, releases):
        begin, end = f"<!-- table: {make.__name__} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
