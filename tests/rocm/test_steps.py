"""vLLM's ROCm backend with this library's passes and ops, step by step, over the double of AITER.

vLLM's decode: every batch with 12 and 16 heads, and one batch of each kind with 8, 64 and 128
heads. attention=aiter: 8 to 128 heads with 0 to 3 drafts, and every batch with 12 and 64 heads.
Each with a bf16 and an fp8 cache, on gfx942 and gfx950. Most of it runs nightly. No AMD hardware is
involved.
"""

import functools
import itertools
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from mla_fusion.cli import child
from tests import child as children
from tests.aiter_double.versions import DECODE, FP4_PRODUCT, FP8_PRODUCT, FUSED, GLUON, PLANNER
from tests.rocm.steps import BATCHES, PLANNED, Case

pytestmark = pytest.mark.engine
ARCHITECTURES = ("gfx942", "gfx950")
KINDS = ("decode", "padded", "mixed", "4 tokens", "4 tokens, full graph", "4 tokens, mixed")
DRAFTS = ("decode", "2 tokens", "3 tokens", "4 tokens")
# The packed forms of W_UK by architecture: what is switched on, and which vLLM then takes.
PACKED = {"gfx942": {"fp8": "fp8"}, "gfx950": {"fp8": "fp8", "fp4+fp8": "fp4"}}
PRODUCTS = {"fp4": FP4_PRODUCT, "fp8": FP8_PRODUCT}


def matrix(batches_of, products=("",)):
    """A case of each number of heads with each of its batches, types of cache and products."""
    return [
        Case(heads, cache, batch, on)
        for on in products
        for heads, batches in batches_of.items()
        for cache in ("auto", "fp8")
        for batch in batches
    ]


COMPARED = matrix({12: BATCHES, 16: BATCHES, 8: KINDS, 64: KINDS, 128: KINDS})
OF_PRODUCTS = {16: ("decode", "mixed"), 12: ("4 tokens",), 8: ("padded",)}
BY_AITER = matrix({12: PLANNED, 64: PLANNED} | dict.fromkeys((8, 16, 20, 40, 128), DRAFTS))
DAILY = [Case(*case) for case in (
    (8, "fp8", "decode"), (12, "auto", "4 tokens"), (16, "fp8", "3 of 4 tokens"),
    (20, "auto", "2 tokens, full graph"), (40, "fp8", "3 tokens"),
    (64, "fp8", "1 of 4 tokens, full graph"), (128, "auto", "4 tokens, shared prefix"),
)]  # fmt: skip
GRAPHS = [Case(*case) for case in (
    (16, "auto", "full graph"), (12, "fp8", "4 tokens, full graph"),
    (64, "auto", "3 tokens, full graph"), (8, "fp8", "2 tokens, full graph"),
)]  # fmt: skip
# gfx942 truncates the rotated key of a bf16 cache, and without the flag an fp8 value is rounded
# twice. The largest change of the output by that, as a share of its largest value: for plain
# weights, and for packed ones, whose up-projection quantizes its input.
BOUNDS = {"auto": (0.01, 0.02), "fp8": (0.06, 0.1)}
# The same of attention=aiter: both are rounded to bf16, and merged from other pieces.
OF_PLANS = {"auto": 0.02, "fp8": 0.06}


def is_nightly(architecture, case):
    """By day gfx942 has every batch, gfx950 what it does otherwise."""
    if case.products:
        return (case.heads, case.batch) not in ((16, "decode"), (12, "4 tokens"))
    if architecture == "gfx942":
        return case.heads != 12 or (case.cache == "fp8" and case.batch not in KINDS)
    return case.heads not in (8, 128) or case.batch not in ("decode", "mixed", "4 tokens")


def cases_of(architecture, nightly):
    """The cases of one process by their kind."""
    every = COMPARED + matrix(OF_PRODUCTS, PACKED[architecture])
    compared = [case for case in every if is_nightly(architecture, case) == nightly]
    planned, replayed = (BY_AITER, GRAPHS) if nightly else (DAILY, GRAPHS[:2])
    if architecture == "gfx950" and not nightly:
        planned = replayed = []
    return {"compared": compared, "planned": planned, "replayed": replayed}


JOBS = {job: cases_of(*job) for job in itertools.product(ARCHITECTURES, (False, True))}


def each(kind):
    """(job, case) of every job, the nightly ones marked."""
    return [
        pytest.param(
            job, case, id="-".join(map(str, (*job, *astuple(case)))),
            marks=pytest.mark.nightly if job[1] else (),
        )
        for job, cases in JOBS.items()
        for case in cases[kind]
    ]  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """result(job, kind, case); a process for each job, those of every day both at once."""
    made = {}

    def start(job):
        cases = {kind: [*map(astuple, cases)] for kind, cases in JOBS[job].items()}
        asked = children.job(
            "tests.rocm.work:run_all", tmp_path_factory.mktemp(job[0]),
            options={"architecture": job[0], "cases": cases}, plugin=False,
        )  # fmt: skip
        made[job] = asked, child.start(asked)

    @functools.cache
    def of(job):
        for each in JOBS:
            if each not in made and each[1] == job[1]:
                start(each)
        return child.result(*made[job])

    yield lambda job, kind, case: SimpleNamespace(**of(job)[kind][JOBS[job][kind].index(case)])
    for _, process in made.values():
        process.kill()


@pytest.mark.parametrize("job, case", each("compared"))
def test_a_step_is_what_it_is_without_the_flag(result, job, case):
    architecture, got = job[0], result(job, "compared", case)
    assert not got.fault
    assert got.calls.get(FUSED, 0) == case.decode_only
    decodes = got.calls.get(GLUON, 0) + got.calls.get(DECODE, 0)
    assert decodes == (case.batch != "prefill")
    if case.products:
        taken = PACKED[architecture][case.products]
        for form, op in PRODUCTS.items():  # absorb and up-projection, in one form
            assert got.calls.get(op, 0) == (2 if form == taken else 0)
    else:
        exact = not case.decode_only or architecture == "gfx950" or case.cache == "fp8"
        assert got.same_as_reference == exact
    # The query of the backend's decode. The provider multiplies padded rows too, and the double's
    # packed products sum in fp32 in an order that depends on the rows. Without the flag an fp8
    # value of the rope half is rounded to bf16 first.
    assert got.latent_steps <= bool(case.products and case.of.rows)
    assert got.rope_steps <= (case.decode_only and case.cache == "fp8")
    if not case.decode_only or (architecture == "gfx950" and case.cache == "auto"):
        assert (got.error, got.cache_equal) == (0, 1)
        return
    assert got.cache_steps <= 1
    assert got.cache_equal > (0.95 if case.cache == "auto" else 0.99)
    assert got.error <= BOUNDS[case.cache][bool(case.products)]


@pytest.mark.parametrize("job, case", each("planned"))
def test_a_step_is_planned_once_and_decoded_right(result, job, case):
    """`watch` compares each call and each output; here is what follows from the shape."""
    architecture, got = job[0], result(job, "planned", case)
    if (architecture, case.heads, case.cache) == ("gfx942", 128, "fp8"):
        assert "(128 heads, fp8 with 128 heads faults on gfx942" in got.fault
        assert "--tensor-parallel-size" in got.fault and "[aiter-attention]" in got.fault
        return
    assert not got.fault
    assert got.error <= OF_PLANS[case.cache]
    [[heads, longest, _]] = got.made
    assert heads == case.heads and longest >= 1 + case.of.drafts
    assert got.calls.get(FUSED, 0) == case.decode_only
    # By AITER's table, or by vLLM, another decode is faster.
    few, many = case.heads <= 16, len(case.of.requests) >= 32
    is_slower = (architecture, case.cache) == ("gfx950", "auto") and few and many
    ours = case.decode_only and not is_slower
    assert got.decodes == ours and got.plans == [1] * ours
    # vLLM's builder plans for itself; its own decode runs for mixed batches, and where faster.
    assert got.calls.get(DECODE, 0) + got.calls.get(GLUON, 0) == (case.batch != "prefill")
    assert got.calls.get(PLANNER, 0) <= 1 + got.decodes
    for rows, live in got.rows:
        assert rows == live or (case.cache == "fp8" and (rows, live) in ((4, 2), (4, 3)))


@pytest.mark.parametrize("job, case", each("replayed"))
def test_a_captured_decode_plans_each_replay(result, job, case):
    assert result(job, "replayed", case).fault == ""
