"""Both planners on random ragged batches; test_interpreted.py runs this.

Every buffer must be the same, element by element, after two refreshes of different sizes; every
load and store of the kernel is checked for bounds and races.
"""

import random

import torch

from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.buffers import PLANNED
from tests.attention.decodes import plan_for
from tests.kernels import interpreter

interpreter.install()
PLANS = 40


def test_the_kernel_plans_as_the_specification():
    rng, moved = random.Random(0), 0
    for number in range(PLANS // 2):
        longest = rng.choice((1, 2, 4, 8))
        fields = {
            "max_batch": rng.randint(1, 9),
            "max_query_len": longest,
            "num_heads": rng.choice((8, 32, 128, 128)),
            "ctas": rng.randint(1, 12),
            "heads_per_work": rng.choice((None, 16)),
            "max_split_per_batch": rng.choice((-1, -1, 1, 4)),
            "kv_granularity": rng.choice((1, 16, 16, 64)),
            "overhead": rng.choice((1, 2, 16)),
            "v_head_dim": 8,
        }
        want, got, scratch = (plan_for(**fields) for _ in range(3))
        for rare in (False, longest > 1):
            for _ in range(200 if rare else 1):
                step = batch(rng, fields["max_batch"], longest)
                if rare and moves_a_cut(scratch, step, longest):
                    moved += 1
                    break
            want.refresh(**step, max_query_len=longest)
            planner_triton.fill(got, step["qo_indptr"], step["seq_lens"], longest)
            for name in PLANNED:
                a, b = getattr(want, name), getattr(got, name)
                assert torch.equal(a, b), (number, name, fields, step, a, b)
    assert moved >= 8, "too few plans with a cut moved to the end of its tile"


def batch(rng, most, longest):
    """A step of up to `most` sequences."""
    rows = [rng.choice((longest, 0, rng.randint(0, longest))) for _ in range(rng.randint(1, most))]
    # The last: a few tokens in the last block, which a cut may not leave to a split.
    few = 16 * rng.randint(1, 99) + rng.randint(1, 3)
    lengths = [rng.choice((0, 1, rng.randint(0, 3000), few)) for _ in rows]
    return {
        "qo_indptr": torch.tensor([0, *rows]).cumsum(0).int(),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "num_tokens": sum(rows),
    }


def moves_a_cut(scratch, step, longest):
    """Whether queries of `longest` rows are cut otherwise than single rows are."""
    seen = []
    for length in (1, longest):
        scratch.refresh(**step, max_query_len=length)
        seen.append((scratch.work_indptr.clone(), scratch.work_info_set[:, 4:6].clone()))
    return not all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_the_kernel_cuts_only_what_the_specification_cuts():
    """Whole tiles where they are within the budget, and no single blocks of a long sequence: with
    the lengths above neither rule ever decides."""
    cases = [
        (8, [1100] * 7 + [1300], 8, False),
        (7, [1100] * 7 + [1300], 8, True),
        (8, [1100] * 7 + [1600], 8, True),
        (16, [1100, 1300], 128, False),  # eight tiles each
        (60, [64 * 32], 8, True),
        (60, [64 * 33], 8, True),
        # Small shares.
        (12, [1024] * 6, 8, True),
        (12, [2256, 2394, 741, 376], 8, True),
        (4, [108, 423, 1038, 638], 8, True),
        (7, [1000, 2200, 100], 32, True),
    ]
    for ctas, lengths, num_heads, is_cut in cases:
        want, got = (
            plan_for(max_batch=9, max_query_len=1, num_heads=num_heads, heads_per_work=16,
                     ctas=ctas, kv_granularity=64, overhead=4, v_head_dim=8)
            for _ in range(2)
        )  # fmt: skip
        indptr = torch.arange(len(lengths) + 1, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        want.refresh(qo_indptr=indptr, seq_lens=seq_lens, num_tokens=len(lengths), max_query_len=1)
        planner_triton.fill(got, indptr, seq_lens, 1)
        assert (want.reduce_indptr[-1] > 0) == is_cut, (ctas, lengths)
        for name in PLANNED:
            assert torch.equal(getattr(want, name), getattr(got, name)), (name, ctas, lengths)
