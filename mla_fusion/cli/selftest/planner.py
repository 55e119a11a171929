"""The planner's kernel against its specification, in every element of every buffer."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.attention.plan import planner_triton
from mla_fusion.attention.plan.buffers import PLANNED
from mla_fusion.measure.outcome import Outcome

LONGEST = 8  # query rows
RULES: dict[str, dict[str, Any]] = {
    "cap -1": {}, "cap 16": {"max_split_per_batch": 16}, "chunks": {"batch_invariant": True},
}  # fmt: skip
# What the planner is compiled for: max_batch, heads (16, 32 and 128 are 1, 2 and 8 head blocks
# with queries of up to 8 rows), CTAs, kv_granularity and overhead.
PLANNERS = [
    (1, 16, 264, 64, 4),
    (7, 128, 256, 16, 4),
    (64, 128, 264, 64, 4),
    (256, 16, 132, 64, 4),
    (256, 32, 256, 16, 16),
]
THOROUGH = [*PLANNERS, (1, 128, 132, 16, 16), (7, 32, 132, 64, 16), (256, 16, 264, 64, 4)]


def check(
    planners: Sequence[tuple[int, ...]], device: str = "cuda", plans: int = 8
) -> Iterator[Outcome]:
    """Ragged batches, each planned where an earlier plan was; error: elements that differ."""
    rng = random.Random(0)
    for shape, rule in itertools.product(planners, RULES):
        max_batch, heads, ctas, granularity, overhead = shape
        chunk = granularity * max(1, 256 // granularity)
        fields: dict[str, Any] = {
            "max_batch": max_batch, "max_query_len": LONGEST, "num_heads": heads,
            "q_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "ctas": ctas, "v_head_dim": 8,
            "kv_granularity": granularity, "overhead": overhead,
            "max_kv_len": 100 * max(1000, granularity),
            "chunks": (chunk, 4 * chunk, 16 * chunk), **RULES[rule],
        }  # fmt: skip
        want, got = (PersistentDecodePlan.allocate(**fields, device=at) for at in ("cpu", device))
        different = 0
        for _ in range(plans):
            rows, lengths, longest = ragged_batch(rng, max_batch, granularity)
            starts = torch.tensor([0, *rows]).cumsum(0).int()
            lens = torch.tensor(lengths, dtype=torch.int32)
            step = {"num_tokens": sum(rows), "max_query_len": longest}
            want.refresh(qo_indptr=starts, seq_lens=lens, **step)
            planner_triton.fill(got, starts.to(device), lens.to(device), longest)
            for name in PLANNED:
                different += int((getattr(want, name) != getattr(got, name).cpu()).sum())
        name = f"{plans} plans of {max_batch} sequences, {heads} heads, {ctas} CTAs, {rule}"
        yield Outcome(name, different, 0)


def check_all(thorough: bool) -> Iterator[Outcome]:
    """The planners of `mla-fusion selftest`."""
    return check(THOROUGH, plans=20) if thorough else check(PLANNERS)


def ragged_batch(
    rng: random.Random, max_batch: int, granularity: int
) -> tuple[list[int], list[int], int]:
    """Query rows and KV tokens of up to `max_batch` sequences, and the most rows of one."""
    longest, batch = rng.randint(1, LONGEST), rng.randint(1, max_batch)
    rows = [rng.choice((longest, 0, rng.randint(0, longest))) for _ in range(batch)]
    lengths = {
        "long": lambda: rng.randint(1, 100_000),
        # Few tokens in the last block, which a cut may not leave to a split.
        "few": lambda: granularity * rng.randint(1, 99) + rng.randint(1, 3),
        "short": lambda: rng.randint(0, 64),
    }
    kinds = rng.choice((["long"], ["short"], ["few"], ["long", "short", "short", "few"]))
    return rows, [lengths[rng.choice(kinds)]() for _ in rows], longest
