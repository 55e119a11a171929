"""One layer before and after the passes as text."""

from mla_fusion.report.layer_graph import LayerGraph
from mla_fusion.report.rows import FUSED, KEPT, LEGEND, Row, producers, rows


def graph(layer: LayerGraph) -> list[str]:
    """Lines with every changed op, marked, and the kept ops that it reads or that read it."""
    legend = ", ".join(f"{mark} {word}" for mark, word in LEGEND.items() if mark != KEPT)
    out = [f"one layer, {len(layer.before)} ops before, {len(layer.after)} after ({legend})"]
    for stage, listed in zip(("before", "after"), rows(layer), strict=True):
        out.append(f"{stage}:")
        shown = _near_changes(listed)
        hidden = 0
        for index, row in enumerate(listed):
            if index not in shown:
                hidden += 1
                continue
            out += _gap(hidden)
            hidden = 0
            inputs = ", ".join(map(_short, row.node.inputs))
            out.append(f"  {row.mark} {_short(row.node.name)} = {row.op}({inputs})")
            if row.mark == FUSED or row.node.result:
                out[-1] += f" -> {row.node.result or 'nothing'}"
        out += _gap(hidden)
    return out


def _gap(hidden: int) -> list[str]:
    return [f"      ... {hidden} kept"] if hidden else []


def _near_changes(listed: list[Row]) -> set[int]:
    shown = set()
    for index, row in enumerate(listed):
        read = producers(listed, row)
        if row.mark != KEPT:
            shown |= {index, *read}
        elif any(listed[other].mark != KEPT for other in read):
            shown.add(index)
    return shown


def _short(name: str) -> str:
    """A shorter name: torch calls every op that writes into a buffer auto_functionalized_N."""
    return name.replace("auto_functionalized", "out")
