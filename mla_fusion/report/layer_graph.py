"""One layer of a compiled graph before and after the passes, small enough to store in a report."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from mla_fusion.ops import NAMESPACE

# The marks of ops, and those of a change in words.
KEPT, REMOVED, NEW, FUSED = " ", "-", "+", "*"
LEGEND = {REMOVED: "replaced", NEW: "new", FUSED: "new op of mla-fusion"}


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


@dataclass(frozen=True)
class Row:
    """One op of a layer as every view shows it; `reads` are the rows whose results it takes."""

    mark: str
    node: Node
    reads: list[int]

    @property
    def op(self) -> str:
        """The op without its namespace: names of torch and vLLM do not clash."""
        return self.node.op.rpartition("::")[2]


def rows(layer: LayerGraph) -> tuple[list[Row], list[Row]]:
    """The ops before and after, each with its mark."""
    kept = {node.name for node in layer.before} & {node.name for node in layer.after}
    return _marked(layer.before, kept, REMOVED), _marked(layer.after, kept, NEW)


def _marked(nodes: list[Node], kept: set[str], otherwise: str) -> list[Row]:
    at = {node.name: index for index, node in enumerate(nodes)}
    listed = []
    for node in nodes:
        mark = KEPT if node.name in kept else otherwise
        if otherwise == NEW and node.op.startswith(f"{NAMESPACE}::"):
            mark = FUSED
        reads = {at[name] for each in node.inputs if (name := each.partition(".")[0]) in at}
        listed.append(Row(mark, node, sorted(reads)))
    return listed
