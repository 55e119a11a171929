"""Batches, cases, and the result of a case."""

from __future__ import annotations

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
    """

    requests: tuple[tuple[int, int], ...]
    rows: int = 0
    dummies: int = 0
    drafts: int = 0

    @property
    def live(self) -> int:
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


@dataclass(frozen=True)
class Case:
    """One step: the heads of the layer, its cache ("auto" or "fp8"), the batch by name, and the
    packed forms of its weights that are switched on (`imitation.switch_products`)."""

    heads: int
    cache: str
    batch: str
    products: str = ""


@dataclass
class Result:
    """A step with the passes, compared with the same step without them.

    Attributes:
        fault: why the double refused a call, or empty.
        fused: how many layers the passes fused; declined: why not.
        calls: how often each op of AITER was called in the fused run.
        same_as_reference: whether query, cache and output equal the reference provider's bytes.
        latent_steps, rope_steps: the largest difference of the two halves of the decode's query, in
            steps of its type.
        same: whether the live rows of the output equal those without the passes.
        error, scale: the largest difference of them, and the largest value.
        cache_equal: the share of equal bytes in the written cache entries.
        cache_steps: the largest difference there in steps of the stored type.
        elsewhere: whether no other byte of the cache changed.
    """

    fault: str = ""
    fused: int = 0
    declined: str = ""
    calls: dict[str, int] | None = None
    same_as_reference: bool = False
    latent_steps: int = 0
    rope_steps: int = 0
    same: bool = False
    error: float = 0.0
    scale: float = 0.0
    cache_equal: float = 0.0
    cache_steps: int = 0
    elsewhere: bool = False
