"""The tables of docs/aiter.md from the rules themselves, and a list of all rules.

    python -m tests.aiter_double.table          writes the tables between the marks in the page
    python -m tests.aiter_double.table rules    prints every rule

tests/aiter_double/test_page.py fails until the page is written.
"""

import sys
from pathlib import Path

from tests.aiter_double import broken, heads, versions
from tests.aiter_double.rule import TRUSTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "aiter.md"


def trusted():
    """The rules that only the caller can keep."""
    rows = []
    for op in (versions.FUSED, *broken.ADAPTER_RULES):
        if says := [rule.says for rule in broken.ALL[op] if rule.library == TRUSTED]:
            rows.append(f"- `{op}`: {'; '.join(says)}.")
    return "\n".join(rows)


def listed():
    """Every rule in a line: its call and name, the rule, what breaking it does, and the library."""
    lines = []
    for op, each in broken.ALL.items():
        for rule in each:
            line = f"{op} {rule.name}: {rule.says}. Breaking it: {rule.breaking}."
            lines.append(f"{line} Here: {rule.library}.")
    return "\n".join(lines)


def kernels():
    """The kernels of the decode that follow a plan."""

    def shapes(counts):
        return "; ".join(f"{n}: {', '.join(map(str, q))}" for n, q in counts.items()) or "none"

    rows = ["| architecture | types | heads: query lengths | with LSE |", "|---|---|---|---|"]
    for key, counts in heads.PERSISTENT.items():
        cells = (*key, shapes(counts), shapes(heads.LSE.get(key, {})))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def filled(page):
    """The page with the tables as they are now."""
    for make in (trusted, kernels):
        begin, end = f"<!-- table: {make.__name__} -->\n", "<!-- end -->"
        before, rest = page.split(begin)
        page = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    if sys.argv[1:] == ["rules"]:
        print(listed())
    else:
        PAGE.write_text(filled(PAGE.read_text()))
