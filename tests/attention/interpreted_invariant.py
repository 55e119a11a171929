"""Batch-invariant decodes under the repaired interpreter; test_interpreted.py runs this."""

import random

import pytest
import torch

from mla_fusion.attention import persistent_mla_decode
from mla_fusion.attention.plan import planner_triton
from tests.attention.decodes import BF16, FN, plan_for
from tests.attention.sequences import Sequence, bits_of, step_of
from tests.kernels import interpreter

interpreter.install()

CHUNK, LONGEST = 16, 190


def decode(sequences, dtype, heads, provider, **options):
    """The bits of each sequence of a step."""
    sizes = {"latent": 32, "rope": 16, "page": 16, "longest": LONGEST, "chunks": (CHUNK, 32, 16)}
    given = step_of(sequences, dtype, heads, **sizes | options)
    if provider == "triton":
        plan, batch = given["plan"], len(sequences)
        lengths = torch.tensor([each.length for each in sequences], dtype=torch.int32)
        starts = plan.qo_indptr[: batch + 1].clone()
        planner_triton.fill(plan, starts, lengths, plan.step.max_query_len)
    out, lse = persistent_mla_decode(**given, return_lse=True, provider=provider)
    return bits_of(sequences, out, lse)


def differing(seed, provider="triton", **options):
    """How many rows of a random sequence differ in a bit alone, with fewer drafts, and in batches
    among others, with other plans."""
    rng = random.Random(seed)
    kind = rng.choice((BF16, FN)), rng.choice((3, 3, 18)), provider
    different = 0
    # The last drafts of every other sequence are a chunk of their own.
    length = CHUNK + 1 if seed % 2 == 0 else rng.randint(1, LONGEST)
    own = Sequence(seed, 3 if seed % 2 == 0 else rng.randint(1, 3), length)
    alone = decode([own], *kind, **options)[0]
    for batch, (max_batch, ctas) in enumerate(((64, 3), (1024, 8), (64, 40))):
        others = [
            Sequence(seed + 1000 * (n + 1), rng.randint(0, 3), rng.randint(1, LONGEST))
            for n in range(rng.randint(1, 2))
        ]
        # With the reference the number of rows is part of a product's shape.
        hidden = min(batch, own.rows - 1, own.length - 1) if provider == "triton" else 0
        fewer = own.fewer(hidden)
        at = rng.randint(0, len(others))
        sizes = {"max_batch": max_batch, "ctas": ctas}
        step = [*others[:at], fewer, *others[at:]]
        got = decode(step, *kind, **sizes, **options)[at]
        different += int((got != alone[: fewer.rows]).any(1).sum())
    return different


@pytest.mark.parametrize("provider", ["triton", "reference"])
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 67), marks=pytest.mark.nightly)], ids=len
)
def test_a_sequence_has_the_same_bits_in_every_batch(seeds, provider):
    """66 sequences by night, each alone and in three batches."""
    for seed in seeds:
        assert differing(seed, provider) == 0, seed


def test_a_cut_by_the_batch_is_found():
    assert differing(3, batch_invariant=False) > 0


def test_no_item_is_written_behind_the_plan():
    """Of a sequence longer than the plan was allocated for; bounds are checked."""
    sizes = {"max_batch": 2, "max_kv_len": 2 * CHUNK, "chunks": (CHUNK,) * 3, "v_head_dim": 8}
    plan = plan_for(batch_invariant=True, **sizes)
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 2], [500, 64]))
    planner_triton.fill(plan, starts, lengths, 1)
    assert plan.work_indptr[-1] == len(plan.work_info_set) == 4
