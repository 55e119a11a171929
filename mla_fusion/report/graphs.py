"""The ops of a graph as a report stores them: a layer before and after, and counts of each pass."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple


class Node(NamedTuple):
    """One op of a graph."""

    name: str
    op: str  # what it calls
    inputs: list[str]  # nodes, also outside the layer; ".1" is the second output of one
    result: str  # such as "bf16[T, 16, 192]", where T is the token count
    bounds: str = ""  # of a slice, such as "[:, :, 128:192]"


class PassOps(NamedTuple):
    """Number of calls of each op of a graph, in front of a pass and behind it."""

    before: dict[str, int]
    after: dict[str, int]

    def changes(self) -> list[tuple[str, int, int]]:
        """(op, calls before, calls after) of every op whose count changed."""
        before, after = map(Counter, self)
        ops = sorted(before | after)
        return [(op, before[op], after[op]) for op in ops if before[op] != after[op]]

    def __add__(self, other: Any) -> "PassOps":
        return PassOps(*(Counter(a) + Counter(b) for a, b in zip(self, other, strict=True)))


@dataclass
class LayerGraph:
    """The ops of one layer in graph order. A kept node has the same name in both."""

    before: list[Node]
    after: list[Node]

    def changes(self) -> list[tuple[str, int, int]]:
        """`PassOps.changes` of the layer."""
        return PassOps(*(Counter(n.op for n in nodes) for nodes in vars(self).values())).changes()
