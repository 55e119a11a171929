"""Sparse decodes over byte caches: inputs of `pages.py`, and what they should give in float64."""

import dataclasses
import random

import numpy as np
import torch

from mla_fusion.attention.plan.inputs import Scope
from mla_fusion.attention.sparse import sparse_scratch
from mla_fusion.measure.distances import distance
from tests.attention import decodes
from tests.attention.decodes import BF16, FN, FNUZ, lists
from tests.attention.pages import V4, V32, WIDTH, Cache

SLOTS = 41  # `lists` names those below 40


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode; lengths: for each scope those of the tokens, None for all columns."""

    layout: object
    kinds: tuple
    widths: tuple
    lengths: tuple = ()
    heads: int = 8
    fnuz: bool = False
    page: int = 4
    gap: int = 0
    sink: float | None = None
    tokens: int = 3
    seed: int = 0

    @property
    def kv_dtype(self):
        return FNUZ if self.fnuz else FN


def random_case(seed):
    rng = random.Random(seed)
    tokens, count = rng.randint(1, 3), rng.randint(1, 2)
    widths = tuple(rng.choice((1, rng.randint(2, 40), 64, 65)) for _ in range(count))

    def lengths(most):
        drawn = [rng.choice((0, most, rng.randint(0, most))) for _ in range(tokens)]
        return None if rng.random() < 0.3 else drawn

    layout = rng.choice((V32, V4))
    kinds = tuple(rng.choice(("full", "holes", "none", "mixed", "same")) for _ in widths)
    return Case(
        layout, kinds, widths, tuple(map(lengths, widths)), tokens=tokens, seed=seed,
        heads=rng.choice((1, 8, 16, 20, 40)), fnuz=rng.random() < 0.2,
        page=rng.choice((1, 2, 4, 8, 64)), gap=rng.choice((0, 0, 16, 1156)),
        sink=rng.choice((None, 0, 5, 40)),
    )  # fmt: skip


class Inputs:
    """The tensors of a case; `listed`: float64 keys of each token, one for each time it is seen."""

    def __init__(self, case):
        self.case = case
        generator, rng = torch.Generator().manual_seed(case.seed), np.random.default_rng(case.seed)
        width = WIDTH[case.layout]
        self.q = torch.randn(case.tokens, case.heads, width, generator=generator).to(BF16)
        self.sink = None
        if case.sink is not None:
            self.sink = case.sink + 2 * torch.randn(case.heads, generator=generator)
        lengths = case.lengths or [None] * len(case.widths)
        self.lengths = [None if n is None else torch.tensor(n).int() for n in lengths]
        self.scopes, keys = [], [[] for _ in range(case.tokens)]
        for kind, columns, counts in zip(case.kinds, case.widths, self.lengths, strict=True):
            table = lists(kind, columns, case.tokens, generator)
            cache = Cache(case.layout, SLOTS // case.page + 1, case.page, case.fnuz, case.gap)
            for t in range(case.tokens):
                count = columns if counts is None else int(counts[t])
                table[t, count:] = 2**30  # not to be read
                for slot in table[t, :count].tolist():
                    if slot >= 0 and slot not in cache.keys:
                        cache.write(slot, rng.normal(size=width), rng)
                    if slot >= 0:
                        keys[t].append(cache.keys[slot])
            self.scopes.append(Scope(cache.tensor(), table, case.layout))
        self.listed = [torch.tensor(np.array(each)).reshape(-1, width) for each in keys]

    def scratch(self):
        """A refreshed scratch, whose partial rows are NaN."""
        case = self.case
        made = sparse_scratch(
            max_tokens=max(4, case.tokens), num_heads=case.heads, widths=case.widths, q_dtype=BF16,
            kv_dtype=case.kv_dtype, device="cpu", ctas=7,
        )  # fmt: skip
        made.refresh(case.tokens, self.lengths)
        made.plan.partial_output.fill_(torch.nan)
        made.plan.partial_lse.fill_(torch.nan)
        return made

    def check(self, out, lse, tolerance, dtype):
        """Results are near those of keys rounded to `dtype`, and zeros where none is listed."""
        want, want_lse = self.expected(dtype)
        assert distance(out, want) <= tolerance
        decodes.same_lse(lse, want_lse)
        for row, keys in zip(out, self.listed, strict=True):
            assert len(keys) or (row == 0).all()

    def expected(self, dtype=torch.double):
        pairs = [
            decodes.attention(q.double(), keys.to(dtype).double(), 512, self.sink)
            for q, keys in zip(self.q, self.listed, strict=True)
        ]
        out, lse = zip(*pairs, strict=True)
        return torch.stack(out), torch.stack(lse)
