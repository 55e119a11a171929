"""The tables of docs/aiter.md are those of the rules."""

from tests.aiter_double import broken, table


def test_the_tables_of_the_page_are_current():
    page = table.PAGE.read_text()
    assert page == table.filled(page), "run: python -m tests.aiter_double.table"


def test_every_rule_is_listed_once():
    names = [rule.name for rules in broken.ALL.values() for rule in rules]
    assert len(names) == len(set(names))
    listed = table.listed()
    for name in names:
        assert listed.count(f" {name}: ") == 1, name
