"""Every rule of every op: the double enforces it, and enforces nothing that is no rule."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests import aiter_double
from tests.aiter_double import ARCHITECTURES, RELEASES, broken
from tests.aiter_double.module import FP4_PRODUCT

HERE = Path(__file__).parent
RULES = [(op, rule) for op, rules in broken.ALL.items() for rule in rules]
PLACES = [(arch, release) for arch in ARCHITECTURES for release in RELEASES]
CASES = [(op, rule, *at) for op, rule in RULES for at in PLACES if rule.holds(*at)]
ENDED = [
    (op, rule, *at)
    for op, rule in RULES
    for at in PLACES
    if rule.before != "v1" and rule.on in ("", at[0]) and not rule.holds(*at)
]
# Modules of the double that refuse calls.
STRICT = ("decode", "heads", "metadata", "products", "qk_rope", "reduce")


def names(value: Any) -> str:
    return value if isinstance(value, str) else value.name


@pytest.mark.parametrize("op, rule, arch, release", CASES, ids=names)
def test_the_double_enforces_the_rule(op: str, rule: Any, arch: str, release: str) -> None:
    with aiter_double.installed(arch, release) as double:
        call = broken.call(rule, op, double)
        with pytest.raises(BaseException, match=re.escape(rule.words)) as caught:
            call()
        assert type(caught.value) is rule.expected(double.release)


@pytest.mark.parametrize("op, rule, arch, release", ENDED, ids=names)
def test_a_rule_ends_with_its_release(op: str, rule: Any, arch: str, release: str) -> None:
    with aiter_double.installed(arch, release) as double:
        broken.call(rule, op, double)()


@pytest.mark.parametrize("arch, release", PLACES)
def test_what_the_rules_spoil_is_good(arch: str, release: str) -> None:
    only = {FP4_PRODUCT: "gfx950", "mla_gluon": "gfx950"}
    with aiter_double.installed(arch, release) as double:
        for op in broken.ALL:
            given, taken = broken.good(op, double), double.signatures[op].parameters
            if only.get(op, arch) == arch:
                double.ops[op](**{name: given[name] for name in taken if name in given})


def sites() -> dict[tuple[str, int], int]:
    """Where the double refuses calls as AITER does: (module, first line) -> last line."""
    found = {}
    for module in STRICT:
        for node in ast.walk(ast.parse((HERE / f"{module}.py").read_text())):
            if isinstance(node, ast.Raise):
                refuses = "NotImplementedError" not in ast.unparse(node)
            elif isinstance(node, ast.Call):
                refuses = ast.unparse(node.func) in ("check", "assume", "reject")
            else:
                refuses = isinstance(node, ast.Assert)
            if refuses:
                found[module, node.lineno] = node.end_lineno or node.lineno
    return found


def refused_at(call: Any) -> tuple[str, int]:
    """The innermost line of those modules that was running when the call was refused."""
    with pytest.raises(BaseException) as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    lines = [(Path(frame.filename).stem, frame.lineno or 0) for frame in frames]
    return [line for line in lines if line[0] in STRICT][-1]


def test_every_refusal_of_the_double_is_a_rule() -> None:
    reached = set()
    for op, rule, arch, release in CASES:
        if release in (min(RELEASES), max(RELEASES)):
            with aiter_double.installed(arch, release) as double:
                reached.add(refused_at(broken.call(rule, op, double)))
    unreached = [
        f"{module}.py:{first}"
        for (module, first), last in sites().items()
        if not any(module == where and first <= line <= last for where, line in reached)
    ]
    assert not unreached
