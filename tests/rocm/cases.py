"""Batches and cases."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The requests of a step, decodes first.

    Attributes:
        requests: (tokens in the cache, new tokens) of each.
        rows: rows of the graph beyond the new tokens, which have no slot.
        dummies: requests without tokens that pad a full CUDA graph; vLLM then counts the padded
            rows as tokens.
        drafts: how many tokens the engine speculates.
        shared: blocks at the beginning that all requests share, as prefix caching leaves them.
    """

    requests: tuple[tuple[int, int], ...]
    rows: int = 0
    dummies: int = 0
    drafts: int = 0
    shared: int = 0

    @property
    def live(self):
        return sum(new for _, new in self.requests)


BATCHES = {
    "decode": Batch(((70, 1), (4, 1), (40, 1))),
    "one token": Batch(((9, 1),)),
    "padded": Batch(((70, 1), (4, 1)), rows=3),
    "full graph": Batch(((70, 1), (4, 1)), rows=2, dummies=2),
    "mixed": Batch(((70, 1), (4, 1), (0, 5))),
    "prefill": Batch(((0, 3), (0, 2)), drafts=1),
    "2 tokens": Batch(((70, 2), (4, 2)), drafts=1),
    "4 tokens": Batch(((70, 4), (9, 4)), drafts=3),
    "4 tokens, full graph": Batch(((70, 4), (9, 4)), rows=4, dummies=1, drafts=3),
    "4 tokens, mixed": Batch(((70, 4), (9, 4), (0, 6)), drafts=3),
    "33 requests": Batch(tuple((3 + i, 1) for i in range(33))),
}
# For each number of drafts, what else meets the plan of attention=aiter.
PLANNED = BATCHES | {
    "shared prefix": Batch(((70, 1), (69, 1), (40, 1)), shared=2),
    "1 of 2 tokens": Batch(((70, 1), (4, 1)), drafts=1),
    "2 tokens, full graph": Batch(((70, 2), (9, 2)), rows=4, dummies=2, drafts=1),
    "3 tokens": Batch(((70, 3), (9, 3), (3, 3)), drafts=2),
    "3 tokens, full graph": Batch(((70, 3), (9, 3)), rows=3, dummies=1, drafts=2),
    "2 of 3 tokens": Batch(((70, 2), (9, 2)), drafts=2),
    "4 tokens, shared prefix": Batch(((70, 4), (69, 4)), drafts=3, shared=2),
    "3 of 4 tokens": Batch(((70, 3), (9, 3)), drafts=3),
    "1 of 4 tokens, full graph": Batch(((70, 1), (4, 1)), rows=2, dummies=2, drafts=3),
}


@dataclass(frozen=True)
class Case:
    """One step: the heads of the layer, its cache ("auto" or "fp8"), the batch by name, and the
    packed forms of its weights that are switched on (`imitation.switch_products`)."""

    heads: int
    cache: str
    batch: str
    products: str = ""

    @property
    def of(self):
        return PLANNED[self.batch]

    @property
    def decode_only(self):
        return all(cached for cached, _ in self.of.requests)
