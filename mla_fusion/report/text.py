"""One layer before and after the passes as text."""

from itertools import groupby

from mla_fusion.report.layer_graph import FUSED, KEPT, LEGEND, LayerGraph, Row, rows


def graph(layer: LayerGraph) -> list[str]:
    """Lines with every changed op, marked, and the kept ops that it reads or that read it."""
    legend = ", ".join(f"{mark} {word}" for mark, word in LEGEND.items())
    out = [f"one layer, {len(layer.before)} ops before, {len(layer.after)} after ({legend})"]
    for stage, listed in zip(("before", "after"), rows(layer), strict=True):
        out.append(f"{stage}:")
        changed = {index for index, row in enumerate(listed) if row.mark != KEPT}
        shown = changed.union(*(listed[index].reads for index in changed))
        shown |= {index for index, row in enumerate(listed) if changed & {*row.reads}}
        for near, indices in groupby(range(len(listed)), shown.__contains__):
            run = [listed[index] for index in indices]
            out += map(_line, run) if near else [f"      ... {len(run)} kept"]
    return out


def _line(row: Row) -> str:
    inputs = ", ".join(map(_short, row.node.inputs))
    line = f"  {row.mark} {_short(row.node.name)} = {row.op}({inputs})"
    if row.mark == FUSED or row.node.result:
        line += f" -> {row.node.result or 'nothing'}"
    return line


def _short(name: str) -> str:
    """A shorter name: torch calls every op that writes into a buffer auto_functionalized_N."""
    return name.replace("auto_functionalized", "out")
