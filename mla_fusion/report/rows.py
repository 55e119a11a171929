"""The ops of one layer with their marks, which the text, the drawing and the page share."""

from dataclasses import dataclass

from mla_fusion.ops import NAMESPACE
from mla_fusion.report.layer_graph import LayerGraph, Node

# The marks of ops, and the same in words.
KEPT, REMOVED, NEW, FUSED = " ", "-", "+", "*"
LEGEND = {REMOVED: "replaced", NEW: "new", FUSED: "new op of mla-fusion", KEPT: "kept"}


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
