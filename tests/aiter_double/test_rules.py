"""Every rule of every op: the double enforces it, and enforces nothing that is no rule."""

import ast
import itertools
import re
import traceback
from pathlib import Path

import pytest

from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES, broken
from tests.aiter_double.versions import FP4_PRODUCT, GLUON

HERE = Path(__file__).parent
# Modules of the double that refuse calls.
STRICT = ("decode", "heads", "metadata", "products", "qk_rope", "reduce")


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
    only = {FP4_PRODUCT: "gfx950", GLUON: "gfx950"}
    for op in broken.ALL:
        if only.get(op, double.arch.name) == double.arch.name:
            broken.call(op, double)


def refusals(module):
    """(first, last) lines of each place where a module refuses a call as AITER does."""
    for node in ast.walk(ast.parse((HERE / f"{module}.py").read_text())):
        if isinstance(node, ast.Raise):
            refuses = "NotImplementedError" not in ast.unparse(node)
        elif isinstance(node, ast.Call):
            refuses = ast.unparse(node.func) in ("check", "assume", "reject")
        else:
            refuses = isinstance(node, ast.Assert)
        if refuses:
            yield node.lineno, node.end_lineno


def test_every_refusal_of_the_double_is_a_rule():
    reached = {module: set() for module in STRICT}  # lines that were running at a refusal
    for arch, release in itertools.product(ARCHITECTURES, (RELEASES[0], RELEASES[-1])):
        with aiter_double.installed(arch, release) as double:
            for op, rule in rules_of(double.at):
                if rule.holds(double.at):
                    with pytest.raises(BaseException) as caught:
                        broken.call(op, double, rule)
                    frames = traceback.extract_tb(caught.value.__traceback__)
                    lines = [(Path(frame.filename).stem, frame.lineno) for frame in frames]
                    module, line = [at for at in lines if at[0] in STRICT][-1]
                    reached[module].add(line)
    unreached = [
        f"{module}.py:{first}"
        for module in STRICT
        for first, last in refusals(module)
        if not any(first <= line <= last for line in reached[module])
    ]
    assert not unreached
