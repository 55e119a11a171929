"""One layer of a compiled graph before and after the passes, small enough to store in a report."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


class Node(NamedTuple):
    """One op: its name in the graph, what it calls, what it reads, and its result.

    `inputs` are names of nodes, with ".1" for the second output of an op; some are outside the
    layer. `result` is text such as "bf16[T, 16, 192]", where T is the token count.
    """

    name: str
    op: str
    inputs: list[str]
    result: str


@dataclass
class LayerGraph:
    """The ops of one layer in graph order. A kept node has the same name in both."""

    before: list[Node]
    after: list[Node]

    def changes(self) -> list[tuple[str, int, int]]:
        """(op, calls before, calls after) of every op whose count changed."""
        before, after = (Counter(node.op for node in nodes) for nodes in (self.before, self.after))
        ops = sorted(before | after)
        return [(op, before[op], after[op]) for op in ops if before[op] != after[op]]
