"""vLLM's ROCm backend with this library's passes and ops, step by step, over the double of AITER.

The matrix: every batch with 12 and 16 heads, and one batch of each kind with 8, 64 and 128 heads;
each with a bf16 and an fp8 cache, on gfx942 and gfx950. Most of it runs nightly. No AMD hardware
is involved.
"""

import functools
from dataclasses import astuple
from types import SimpleNamespace

import pytest

from mla_fusion.cli import child
from tests import child as children
from tests.rocm.cases import BATCHES, Case

pytestmark = pytest.mark.engine
FUSED, GLUON, DECODE = "fused_qk_rope_concat_and_cache_mla", "mla_gluon", "mla_decode_fwd"
ARCHITECTURES = ("gfx942", "gfx950")
KINDS = ("decode", "padded", "mixed", "4 tokens", "4 tokens, full graph", "4 tokens, mixed")
MATRIX = [
    Case(heads, cache, batch)
    for heads, batches in ((12, BATCHES), (16, BATCHES), (8, KINDS), (64, KINDS), (128, KINDS))
    for cache in ("auto", "fp8")
    for batch in batches
]
# The packed forms of W_UK by architecture: what is switched on, and which vLLM then takes.
PACKED = {"gfx942": {"fp8": "fp8"}, "gfx950": {"fp8": "fp8", "fp4+fp8": "fp4"}}
PRODUCTS = {
    "fp4": "batched_gemm_a16wfp4",
    "fp8": "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant",
}
CASES = {
    architecture: [
        *MATRIX,
        *(
            Case(heads, cache, batch, products)
            for products in PACKED[architecture]
            for heads, batch in ((16, "decode"), (12, "4 tokens"), (8, "padded"), (16, "mixed"))
            for cache in ("auto", "fp8")
        ),
    ]
    for architecture in ARCHITECTURES
}
# gfx942 truncates the rotated key of a bf16 cache, and without the flag an fp8 value is rounded
# twice. The largest change of the output by that, as a share of its largest value: for plain
# weights, and for packed ones, whose up-projection quantizes its input.
BOUNDS = {"auto": (0.01, 0.02), "fp8": (0.06, 0.1)}


def is_nightly(architecture, case):
    """By day gfx942 has every batch, gfx950 what it does otherwise."""
    if case.products:
        return (case.heads, case.batch) not in ((16, "decode"), (12, "4 tokens"))
    if architecture == "gfx942":
        return case.heads != 12 or (case.cache == "fp8" and case.batch not in KINDS)
    return case.heads not in (8, 128) or case.batch not in ("decode", "mixed", "4 tokens")


# (architecture, whether nightly) -> the cases of one process
JOBS = {
    (architecture, nightly): [case for case in cases if is_nightly(architecture, case) == nightly]
    for architecture, cases in CASES.items()
    for nightly in (False, True)
}
ALL = [
    pytest.param(*job, case, marks=pytest.mark.nightly if job[1] else ())
    for job, cases in JOBS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(job), of its cases; a process for each, those of every day both at once."""
    made = {}

    def start(job):
        options = {"architecture": job[0], "cases": [*map(astuple, JOBS[job])]}
        folder = tmp_path_factory.mktemp(job[0])
        asked = children.job("tests.rocm.steps:run_all", folder, options=options, plugin=False)
        made[job] = asked, child.start(asked)

    @functools.cache
    def of(job):
        for each in JOBS:
            if each not in made and each[1] == job[1]:
                start(each)
        found = child.result(*made[job])["results"]
        return [SimpleNamespace(**result) for result in found]

    yield of
    for _, process in made.values():
        process.kill()


def decode_only(case):
    return all(cached for cached, _ in BATCHES[case.batch].requests)


def words(value):
    return str(value) if isinstance(value, str | bool) else "-".join(map(str, astuple(value)))


@pytest.mark.parametrize("architecture, nightly, case", ALL, ids=words)
def test_a_step_is_what_it_is_without_the_flag(results, architecture, nightly, case):
    job = architecture, nightly
    got = results(job)[JOBS[job].index(case)]
    assert not got.fault
    assert (got.fused, got.declined) == (1, "")
    assert got.elsewhere, "bytes outside the addressed slots changed"
    assert got.calls.get(FUSED, 0) == decode_only(case)
    decodes = got.calls.get(GLUON, 0) + got.calls.get(DECODE, 0)
    assert decodes == (case.batch != "prefill")
    if case.products:
        taken = PACKED[architecture][case.products]
        for form, op in PRODUCTS.items():  # absorb and up-projection, in one form
            assert got.calls.get(op, 0) == (2 if form == taken else 0)
    else:
        exact = not decode_only(case) or architecture == "gfx950" or case.cache == "fp8"
        assert got.same_as_reference == exact
    # The query of the backend's decode. The provider multiplies padded rows too, and the double's
    # packed products sum in fp32 in an order that depends on the rows. Without the flag an fp8
    # value of the rope half is rounded to bf16 first.
    assert got.latent_steps <= bool(case.products and BATCHES[case.batch].rows)
    assert got.rope_steps <= (decode_only(case) and case.cache == "fp8")
    if not decode_only(case) or (architecture == "gfx950" and case.cache == "auto"):
        assert got.same, got.error
        assert got.cache_equal == 1
        return
    assert got.cache_steps <= 1
    assert got.cache_equal > (0.95 if case.cache == "auto" else 0.99)
    assert got.error <= BOUNDS[case.cache][bool(case.products)] * got.scale


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrix_reaches_every_decode_of_the_backend(results, architecture):
    called = {op for got in results((architecture, False)) for op in got.calls}
    assert {FUSED, DECODE, "get_mla_metadata_v1"} <= called
    assert (GLUON in called) == (architecture == "gfx950")
