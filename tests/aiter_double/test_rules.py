"""Every rule of every op: the double enforces it, and enforces nothing that is no rule."""

import re

import pytest

from tests.aiter_double import broken


def rules_of(at):
    """(op, rule) of an architecture, also where it does not hold in a release."""
    return [
        (op, r) for op, rules in broken.ALL.items() for r in rules if r.on in ("", at.arch.name)
    ]


def test_the_double_enforces_every_rule(double):
    for op, rule in rules_of(double.at):
        if rule.holds(double.at):
            with rule.named(), pytest.raises(BaseException, match=re.escape(rule.words)) as caught:
                broken.call(op, double, rule)
            assert type(caught.value) is rule.expected(double.at), rule.name


def test_a_rule_ends_with_its_release(double):
    for op, rule in rules_of(double.at):
        if rule.before != "v1" and not rule.holds(double.at):
            with rule.named():
                broken.call(op, double, rule)


def test_the_calls_that_rules_spoil_are_good(double):
    for op in broken.ALL:
        broken.call(op, double)
