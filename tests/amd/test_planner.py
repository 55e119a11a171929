"""The planner on the device, executed: every element of a plan equals that of the specification."""

import random

import pytest
import torch

pytest.importorskip("triton")

from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.buffers import PLANNED
from tests import tally
from tests.amd.execute import Settings
from tests.amd.provider import machine
from tests.attention.decodes import plan_for

GARBAGE = -7
# sequences at most, heads, CTAs, query rows, sequences of the step.
SHAPES = {
    "one CTA": (8, 16, 1, 1, 5),
    "eight CTAs": (8, 16, 8, 1, 8),
    "folded heads": (8, 128, 16, 1, 6),
    "folded heads 2": (8, 128, 16, 1, 7),
    "drafts": (16, 16, 24, 4, 16),
    "MI300X": (256, 16, 304, 1, 200),
    "MI355X": (256, 16, 256, 1, 200),
}
SOME = ("folded heads", "drafts", "MI300X")
NIGHTLY = [pytest.mark.nightly]


def plans(name):
    """A plan of a shape, full of garbage."""
    max_batch, heads, ctas, rows, _ = SHAPES[name]
    plan = plan_for(max_batch=max_batch, num_heads=heads, ctas=ctas, max_query_len=rows)
    for buffer in PLANNED:
        getattr(plan, buffer).fill_(GARBAGE)
    return plan


def steps(name):
    """Steps, as lengths and query rows: ragged; the longest last, and first with query rows for it
    alone; few, and then many, of one length, which are cut, or whole tiles for each CTA."""
    max_batch, _, _, rows, sequences = SHAPES[name]
    rng = random.Random(sequences)
    ragged = [rng.choice((1, rng.randint(1, 300), rng.randint(1, 9000))) for _ in range(sequences)]
    for lengths in (
        ragged,
        sorted(ragged),
        sorted(ragged, reverse=True),
        [1200] * max(1, sequences // 3),
        [9000] * max_batch,
        [200] * max_batch,
    ):
        queries = [rng.choice((rows, rows, rng.randint(0, rows))) for _ in lengths]
        if lengths == sorted(ragged, reverse=True):
            queries = [rows] + [0] * (len(lengths) - 1)
        yield torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, *queries]).cumsum(0).int()


def refresh(plan, step):
    """Plan by the specification."""
    lengths, indptr = step
    rows = plan.settings.max_query_len
    plan.refresh(qo_indptr=indptr, seq_lens=lengths, num_tokens=int(indptr[-1]), max_query_len=rows)


def fill(plan, step):
    """Plan by the kernel."""
    lengths, indptr = step
    planner_triton.fill(plan, indptr, lengths, plan.settings.max_query_len)


def different(want, got):
    """How many elements of each buffer differ; empty if none does."""
    pairs = {name: (getattr(want, name), getattr(got, name)) for name in PLANNED}
    return {name: int((a != b).sum()) for name, (a, b) in pairs.items() if not torch.equal(a, b)}


@pytest.mark.parametrize(
    "name, backwards",
    [pytest.param(name, backwards, marks=[] if name in SOME and not backwards else NIGHTLY)
     for name in SHAPES for backwards in (False, True)],
)  # fmt: skip
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_plans_as_the_specification(target, name, backwards):
    want, got = plans(name), plans(name)
    for step in steps(name):
        refresh(want, step)
        with machine(target, Settings(backwards=backwards)):
            fill(got, step)
        assert not (wrong := different(want, got)), wrong
        compared = sum(4 * getattr(want, name).numel() for name in PLANNED)
        tally.add("AMD machine code", bytes_compared=compared)
