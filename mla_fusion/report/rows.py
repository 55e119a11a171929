"""The ops of one layer with their marks, which the text, the drawing and the page share."""

from dataclasses import dataclass

from mla_fusion.ops import NAMESPACE
from mla_fusion.report.layer_graph import LayerGraph, Node

# The marks of ops, and the same in words.
KEPT, REMOVED, NEW, FUSED = " ", "-", "+", "*"
LEGEND = {REMOVED: "replaced", NEW: "new", FUSED: "new op of mla-fusion", KEPT: "kept"}


@dataclass(frozen=True)
class Row:
    """One op of a layer as every view shows it."""

    mark: str
    node: Node

    @property
    def op(self) -> str:
        """The op without its namespace: names of torch and vLLM do not clash."""
        return self.node.op.rpartition("::")[2]


def rows(layer: LayerGraph) -> tuple[list[Row], list[Row]]:
    """The ops before and after, each with its mark."""
    old = {node.name for node in layer.before}
    kept = old & {node.name for node in layer.after}
    before = [Row(KEPT if node.name in kept else REMOVED, node) for node in layer.before]
    after = [Row(_mark(node, kept), node) for node in layer.after]
    return before, after


def _mark(node: Node, kept: set[str]) -> str:
    if node.op.startswith(f"{NAMESPACE}::"):
        return FUSED
    return KEPT if node.name in kept else NEW


def producers(all_rows: list[Row], row: Row) -> list[int]:
    """The indices in `all_rows` of the ops whose results `row` reads."""
    at = {other.node.name: index for index, other in enumerate(all_rows)}
    names = [name.partition(".")[0] for name in row.node.inputs]
    return sorted({at[name] for name in names if name in at})
