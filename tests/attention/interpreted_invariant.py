"""Batch-invariant decodes under the repaired interpreter; test_interpreted.py runs this."""

import dataclasses
import random

import pytest
import torch

from mla_fusion.attention import persistent_mla_decode
from mla_fusion.attention.plan import planner_triton
from tests.attention.decodes import BF16, FN, SCALE, plan_for, refresh
from tests.attention.decodes import random as values
from tests.kernels import interpreter

interpreter.install()

LATENT, WIDTH, PAGE, CHUNK, LONGEST = 32, 48, 16, 32, 190


@dataclasses.dataclass(frozen=True)
class Sequence:
    """`rows` query rows at the end of `length` tokens; drafts: `hidden` more follow the last."""

    seed: int
    rows: int
    length: int
    hidden: int = 0


def decode(sequences, dtype, heads, provider, **options):
    """Output and LSE of each sequence of a step, as bytes."""
    most = {"max_batch": 64, "max_query_len": 3, "max_kv_len": LONGEST, "batch_invariant": True}
    of_plan = {
        "q_dtype": dtype,
        "kv_dtype": dtype,
        "v_head_dim": LATENT,
        "num_heads": heads,
        "overhead": 1,
    }
    plan = plan_for(**most | of_plan | {"chunk": CHUNK} | options)
    pages, q, cache, table = -(-LONGEST // PAGE), [], [], []
    for number, each in enumerate(sequences):
        g = torch.Generator().manual_seed(each.seed)
        keys = values(g, pages * PAGE, WIDTH, dtype=dtype)
        keys[each.length :] = torch.randn(()).to(dtype)  # nobody's, of the last page too
        rows = values(g, each.rows + each.hidden, heads, WIDTH, dtype=dtype)
        q.append(rows[: each.rows])
        cache.append(keys.view(pages, PAGE, WIDTH))
        table.append(torch.arange(pages, dtype=torch.int32) + number * pages)
    refresh(plan, [len(rows) for rows in q], [each.length for each in sequences])
    if provider == "triton":
        starts = plan.qo_indptr[: len(q) + 1].clone()
        lengths = torch.tensor([each.length for each in sequences], dtype=torch.int32)
        planner_triton.fill(plan, starts, lengths, plan.step.max_query_len)
    given = {"q": torch.cat(q), "kv_cache": torch.cat(cache), "block_table": torch.stack(table)}
    scales = {"q_scale": torch.tensor([0.2]), "kv_scale": torch.tensor([0.3])}
    out, lse = persistent_mla_decode(
        plan=plan, softmax_scale=SCALE, return_lse=True, provider=provider, **given, **scales
    )
    results = torch.cat([out.view(torch.int16).flatten(1), lse.view(torch.int32)], 1)
    return results.split([each.rows for each in sequences])


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
        fewer = Sequence(seed, own.rows - hidden, own.length - hidden, hidden)
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
    assert differing(1, batch_invariant=False) > 0
