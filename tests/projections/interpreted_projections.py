"""The kernels of products and norms under the repaired interpreter, by the checks of `mla-fusion
selftest`, and those of kernels with a bug; tests/kernels/test_interpreted.py runs this."""

import pytest
import torch

from mla_fusion.cli.selftest import norms, projections
from mla_fusion.projections import reference
from mla_fusion.projections.plans import PLANS
from mla_fusion.projections.triton import launch, normalize
from tests.kernels import interpreter
from tests.nightly import daily

interpreter.install()
DAILY = PLANS[1], PLANS[4], PLANS[6], PLANS[-1]


@pytest.mark.parametrize("plan", daily(PLANS, *DAILY))
def test_every_case_is_right(plan):
    found = [*projections.check(plan, thorough=False, device="cpu")]
    assert all(each.right for each in found), [each for each in found if not each.right]


BUGS = {
    "a step off": lambda plan, *given: [y + y * 2**-7 for y in launch(plan, *given)],
    "last of K": lambda plan, x, w: launch(plan, x[:, :-1], [a[:, :-1] for a in w]),
    "rows": lambda plan, x, w: launch(plan, x.flip(1).contiguous(), w),
    "no NaN": lambda plan, *given: [y.nan_to_num() for y in launch(plan, *given)],
    "NaN": lambda plan, *given: [y.where(~y.isfinite(), torch.nan) for y in launch(plan, *given)],
}


BLOCK_BUGS = {
    "a step off": BUGS["a step off"],
    "scales": lambda plan, x, w, scales: launch(plan, x, w, scales.flip(0)),
    "scales of K": lambda plan, x, w, scales: launch(plan, x, w, scales.flip(1)),
    "x not rounded": lambda plan, x, w, scales: [
        (x.double() @ reference.exact(x, w, scales)[1][0].t()).to(x.dtype)],
    "no NaN": BUGS["no NaN"],
}  # fmt: skip


@pytest.mark.parametrize("plan, bug", [
    *((DAILY[1], bug) for bug in BUGS.values()), *((DAILY[3], bug) for bug in BLOCK_BUGS.values()),
])  # fmt: skip
def test_a_bug_is_seen(plan, bug, monkeypatch):
    monkeypatch.setattr(projections, "launch", bug)
    assert not all(each.right for each in projections.check(plan, False, "cpu"))


def test_two_launches_that_differ(monkeypatch):
    runs = iter(range(1000))
    other = lambda *given: [y * (next(runs) % 2) for y in launch(*given)]  # noqa: E731
    monkeypatch.setattr(projections, "launch", other)
    assert "two launches differ" in next(projections.check(DAILY[0], False, "cpu")).wrong


@pytest.mark.parametrize("case", norms.CASES, ids=str)
def test_norms_are_right(case):
    assert norms.against(case, "cpu").right


NORM_BUGS = {
    "rounded twice": lambda xs, w, e, *more: [
        a * b for a, b in zip(normalize(xs, [torch.ones_like(a) for a in w], e, *more), [*w, 1],
                              strict=False)],
    "a term rounded": lambda xs, w, e, r, *more: normalize(
        xs, w, e, [t.to(xs[0].dtype) for t in r], *more
    ),
    "a term left out": lambda xs, w, e, r, *more: normalize(xs, w, e, [t * 0 for t in r], *more),
    "no factor": lambda xs, w, e, r, factor, wide: normalize(xs, w, e, r, 1.0, wide),
    "epsilons": lambda xs, w, e, *more: normalize(xs, w, e[::-1], *more),
    "rows": lambda *given: [y.roll(1, 0) for y in normalize(*given)],
    "NaN": lambda *given: [y.where(~y.isfinite(), torch.nan) for y in normalize(*given)],
    "a rounded sum": lambda *given: [y.to(given[0][0].dtype).to(y.dtype)
                                     for y in normalize(*given)],
}  # fmt: skip


@pytest.mark.parametrize("bug", NORM_BUGS)
def test_a_bug_of_a_norm_is_seen(bug, monkeypatch):
    monkeypatch.setattr(norms, "normalize", NORM_BUGS[bug])
    assert not all(norms.against(case, "cpu").right for case in norms.CASES)
