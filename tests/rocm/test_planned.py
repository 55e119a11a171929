"""attention=aiter in vLLM's ROCm backend over the double: each call, step by step.

The matrix: 8 to 128 heads with 0 to 3 drafts, bf16 and fp8 caches, on gfx942 and gfx950; and every
batch with 12 and 64 heads. Most of it runs nightly. No AMD hardware is involved.
"""

from dataclasses import astuple
from types import SimpleNamespace

import pytest

from mla_fusion.cli import child
from tests import child as children
from tests.aiter_double.versions import DECODE, PLANNER
from tests.rocm.cases import BATCHES, PLANNED, Case
from tests.rocm.test_backend import FUSED, words

pytestmark = pytest.mark.engine
ALL_BATCHES = {**BATCHES, **PLANNED}
DRAFTS = ("decode", "2 tokens", "3 tokens", "4 tokens")
MATRIX = [
    Case(heads, cache, batch)
    for heads in (8, 12, 16, 20, 40, 64, 128)
    for cache in ("auto", "fp8")
    for batch in (ALL_BATCHES if heads in (12, 64) else DRAFTS)
]
DAILY = [
    Case(8, "fp8", "decode"),
    Case(12, "auto", "4 tokens"),
    Case(16, "fp8", "3 of 4 tokens"),
    Case(20, "auto", "2 tokens, full graph"),
    Case(40, "fp8", "3 tokens"),
    Case(64, "fp8", "1 of 4 tokens, full graph"),
    Case(128, "auto", "4 tokens, shared prefix"),
]
GRAPHS = [
    Case(heads, cache, batch)
    for heads, cache, batch in (
        (16, "auto", "full graph"), (12, "fp8", "4 tokens, full graph"),
        (64, "auto", "3 tokens, full graph"), (8, "fp8", "2 tokens, full graph"),
    )
]  # fmt: skip
JOBS = {
    "daily": ("gfx942", DAILY, GRAPHS[:2]),
    "gfx942": ("gfx942", MATRIX, GRAPHS[2:]),
    "gfx950": ("gfx950", MATRIX, GRAPHS),
}
# Of the largest output: both are rounded to bf16, and merged from other pieces. For fp8 the bound
# is that of test_backend.py.
BOUNDS = {"auto": 0.02, "fp8": 0.06}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(name of a job); each runs in a process of its own, once."""
    made, found = {}, {}

    def of(name):
        if name not in made:
            architecture, cases, graphs = JOBS[name]
            options = {
                "architecture": architecture,
                "cases": [*map(astuple, cases)],
                "graphs": [*map(astuple, graphs)],
            }
            folder = tmp_path_factory.mktemp(name)
            work = "tests.rocm.planned:run_all"
            job = children.job(work, folder, options=options, plugin=False)
            made[name] = job, child.start(job)
        if name not in found:
            found[name] = child.result(*made[name])
        return found[name]

    return of


def each(kind):
    """(job, case) of every job, the nightly ones marked."""
    return [
        pytest.param(
            name, case, id=f"{name}-{words(case)}",
            marks=() if name == "daily" else pytest.mark.nightly,
        )
        for name, job in JOBS.items()
        for case in job[kind]
    ]  # fmt: skip


def decode_only(case):
    return all(cached for cached, _ in ALL_BATCHES[case.batch].requests)


def is_slower(architecture, case):
    """Whether AITER's table has another decode as faster, or vLLM has."""
    few, many = case.heads <= 16, len(ALL_BATCHES[case.batch].requests) >= 32
    return (architecture, case.cache) == ("gfx950", "auto") and few and many


@pytest.mark.parametrize("job, case", each(1))
def test_a_step_is_planned_once_and_decoded_right(results, job, case):
    """`watch` compares each call and each output; here is what follows from the shape."""
    architecture, cases, *_ = JOBS[job]
    got = SimpleNamespace(**results(job)["steps"][cases.index(case)])
    if (architecture, case.heads, case.cache) == ("gfx942", 128, "fp8"):
        assert "(128 heads, fp8 with 128 heads faults on gfx942" in got.fault
        assert "--tensor-parallel-size" in got.fault and "[aiter-attention]" in got.fault
        assert not got.made, "a layer that stays unfused has no plan"
        return
    assert not got.fault
    assert got.elsewhere, "bytes outside the addressed slots changed"
    assert got.alike <= BOUNDS[case.cache]
    [[heads, longest, _]] = got.made
    assert heads == case.heads and longest >= 1 + ALL_BATCHES[case.batch].drafts
    assert got.calls.get(FUSED, 0) == decode_only(case)
    ours = decode_only(case) and not is_slower(architecture, case)
    assert got.decodes == ours and got.plans == [1] * ours
    # vLLM's builder plans for itself; its own decode runs for mixed batches, and where faster.
    assert got.calls.get(DECODE, 0) + got.calls.get("mla_gluon", 0) == (case.batch != "prefill")
    assert got.calls.get(PLANNER, 0) <= 1 + got.decodes
    for rows, live in got.rows:
        assert rows == live or (case.cache == "fp8" and (rows, live) in ((4, 2), (4, 3)))


@pytest.mark.parametrize("job, case", each(2))
def test_a_captured_decode_plans_each_replay(results, job, case):
    assert results(job)["graphs"][JOBS[job][2].index(case)] == ""
