"""A report as a page that loads nothing, and its layer before and after, as text and as a drawing
with a row for each op and arcs for what it reads."""

import html
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from mla_fusion.files import printable
from mla_fusion.ops import NAMESPACE
from mla_fusion.report import Report
from mla_fusion.report.graphs import LayerGraph, Node, PassOps

# The marks of ops in text, with their CSS class, their sign in a drawing, and a change in words.
KEPT, REMOVED, NEW, FUSED = " ", "-", "+", "*"
_MARKS = {
    KEPT: ("kept", "\N{MIDDLE DOT}", ""),
    REMOVED: ("gone", "\N{MINUS SIGN}", "replaced"),
    NEW: ("new", "+", "new"),
    FUSED: ("fused", "\N{BLACK DIAMOND}", "new op of mla-fusion"),
}
# Pixels. A panel fits the smallest phone, and a character of its font is 6.15 wide.
PANEL_WIDTH, _ROW, _GUTTER, _CHARACTER, _GAP = 360, 18, 56, 6.15, 24
_LEFT = _GUTTER + 16  # of a text
_FITS = int((PANEL_WIDTH - _LEFT) / _CHARACTER)  # characters
_PAGE_STYLE, _STYLE = (
    "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("page.css", "svg.css")
)


class Row(NamedTuple):
    """One op of a layer as every view shows it."""

    mark: str
    node: Node
    op: str  # without its namespace: names of torch and vLLM do not clash; with bounds
    reads: list[int]  # the rows whose results it takes


def rows(layer: LayerGraph) -> dict[str, list[Row]]:
    """The ops "before" and "after", each with its mark."""
    kept = {node.name for node in layer.before} & {node.name for node in layer.after}
    found: dict[str, list[Row]] = {}
    for stage, nodes, changed in ("before", layer.before, REMOVED), ("after", layer.after, NEW):
        at = {node.name: index for index, node in enumerate(nodes)}
        found[stage] = []
        for node in nodes:
            mark = KEPT if node.name in kept else changed
            if changed == NEW and node.op.startswith(f"{NAMESPACE}::"):
                mark = FUSED
            reads = {at[name] for each in node.inputs if (name := each.partition(".")[0]) in at}
            op = node.op.rpartition("::")[2] + node.bounds
            found[stage].append(Row(mark, node, op, sorted(reads)))
    return found


def text(layer: LayerGraph) -> list[str]:
    """Lines with every changed op, marked, and the kept ops that it reads or that read it."""
    legend = ", ".join(f"{mark} {word}" for mark, (_, _, word) in _MARKS.items() if word)
    out = [f"one layer, {len(layer.before)} ops before, {len(layer.after)} after ({legend})"]
    for stage, listed in rows(layer).items():
        out.append(f"{stage}:")
        changed = {index for index, row in enumerate(listed) if row.mark != KEPT}
        shown = changed.union(*(listed[index].reads for index in changed))
        shown |= {index for index, row in enumerate(listed) if changed & {*row.reads}}
        for near, indices in groupby(range(len(listed)), shown.__contains__):
            run = [listed[index] for index in indices]
            out += map(_line, run) if near else [f"      ... {len(run)} kept"]
    return out


def _line(row: Row) -> str:
    line = f"  {row.mark} {row.node.name} = {row.op}({', '.join(row.node.inputs)})"
    # Shorter: torch calls every op that writes into a buffer auto_functionalized_N.
    line = line.replace("auto_functionalized", "out")
    if row.mark == FUSED or row.node.result:
        line += f" -> {row.node.result or 'nothing'}"
    return line


def escape(text: str) -> str:
    """`text` in XML, which has no way to write most control characters."""
    return html.escape(printable(text))


def drawing(layer: LayerGraph) -> str:
    """A whole SVG file: before on the left, after on the right."""
    (before, height), (after, other) = (_panel(*each) for each in rows(layer).items())
    right = f'<g transform="translate({PANEL_WIDTH + _GAP} 0)">{after}</g>'
    page = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    body = f"<style>{_STYLE}</style>{page}{before}{right}"
    return _svg(body, max(height, other), 2 * PANEL_WIDTH + _GAP) + "\n"


def _svg(body: str, height: int, width: int = PANEL_WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="graph" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{body}</svg>'
    )


def _panel(title: str, listed: list[Row]) -> tuple[str, int]:
    """(what is drawn, its height)."""
    out = [f'<text class="head" x="4" y="14">{title}: {len(listed)} ops</text>']
    middles: list[int] = []
    y = 22
    for row in listed:
        height = _ROW * (1 + len(_below(row)))
        middles.append(y + _ROW // 2)
        out.append(_row(row, y, height))
        y += height
    for row, end in zip(listed, middles, strict=True):
        style = ' class="fused"' if row.mark == FUSED else ""
        out += [f'<path{style} d="{_arc(middles[source], end)}"/>' for source in row.reads]
    return "".join(out), y + 6


def _row(row: Row, y: int, height: int) -> str:
    base, result, box, tail, below = y + 12, row.node.result, "", "", ""
    inputs = ", ".join(row.node.inputs)
    full = escape(f"{row.node.name} = {row.op}({inputs}) -> {result or 'nothing'}")
    style, sign, _ = _MARKS[row.mark]
    if row.mark == FUSED:
        size = f'y="{y}" width="{PANEL_WIDTH - _GUTTER}" height="{height}"'
        box = f'<rect x="{_GUTTER}" {size}/>'
        below = "".join(
            f'<text class="dim" x="{_LEFT}" y="{base + _ROW * line - 3}">{escape(text)}</text>'
            for line, text in enumerate(_below(row), 1)
        )
    elif result and len(row.op) + len(result) < _FITS:
        tail = f' <tspan class="dim">{escape(result)}</tspan>'
    return (
        f'<g class="{style}"><title>{full}</title>{box}'
        f'<text class="sign" x="{_GUTTER + 4}" y="{base}">{sign}</text>'
        f'<text x="{_LEFT}" y="{base}">{escape(row.op)}{tail}</text>{below}</g>'
    )


def _below(row: Row) -> list[str]:
    """The results of an op of ours, whose name takes the whole width, as lines of it."""
    lines = [""]
    for result in re.split(r"(?<=\]), ", row.node.result) if row.mark == FUSED else ():
        if lines[-1] and len(lines[-1]) + 2 + len(result) > _FITS:
            lines.append("")
        lines[-1] += f", {result}" if lines[-1] else result
    cut = (x if len(x) <= _FITS else x[: _FITS - 1] + "\N{HORIZONTAL ELLIPSIS}" for x in lines)
    return [*filter(None, cut)]


def _arc(start: int, end: int) -> str:
    """The path from a producer to a reader below it, wider for a longer distance."""
    bulge = min(8 + (end - start) * 0.16, _GUTTER - 4) * 4 / 3
    x = _GUTTER + 1
    return f"M{x} {start} C{x - bulge:.0f} {start} {x - bulge:.0f} {end} {x} {end}"


def page(report: Report) -> str:
    """The whole HTML document: no script, no font, no picture."""
    decode = report.decode()
    ranges, why = [], []
    for r in report.ranges:
        tokens = f"{r.range[0]}\N{EN DASH}{r.range[1]}"
        tokens += "" if r.range[1] <= report.bucket else ", untouched"
        ranges.append((tokens, r.layers, r.fused, sum(r.declined.values())))
        why += [(decline.code, count, decline.explain()) for decline, count in r.declined.items()]
    facts = {
        "provider": report.provider,
        "decode bucket": f"{report.bucket} tokens",
        "layers": report.chosen,
        "compiled with": ", ".join(f"{k} {v}" for k, v in report.versions.items() if k != "device"),
        "compiled for": report.versions.get("device", ""),
    }
    title = escape(f"MLA fusion: {report.model or 'a model'}")
    tone = "good" if 0 < decode.fused == decode.layers else "bad"
    fused = f"{decode.fused} of {decode.layers} MLA layers of the decode graphs fused"
    body = [
        f"<h1>{title}</h1>",
        f'<p class="verdict {tone}">{fused}</p>',
        _table((), [(name, value) for name, value in facts.items() if value]),
        "<h2>Ranges of token counts</h2>",
        _table(("tokens", "MLA layers", "fused", "declined"), ranges),
        '<p class="dim">Graphs above the decode bucket are left untouched.</p>',
    ]
    if why:
        body += ["<h2>Why layers declined</h2>", _table(("code", "layers", "why"), why)]
    if decode.products or decode.plain_products:
        body.append("<h2>Products of up to 16 tokens</h2>")
        body += (
            [_table(("widths", "launches"), [*decode.products.items()])] if decode.products else []
        )
        kept = [(d.code, count, d.explain()) for d, count in decode.plain_products.items()]
        body += [_table(("code", "products kept", "why"), kept)] if kept else []
    if decode.passes:
        steps = [
            (number, sum(ops.before.values()), sum(ops.after.values()), _changes(ops))
            for number, ops in decode.passes.items()
        ]
        body += [
            "<h2>Ops of the decode graphs, pass by pass</h2>",
            _table(("pass", "ops before", "after", "changes"), steps),
        ]
    if layer := decode.layer:
        legend = ", ".join(f"{sign} {word}" for _, sign, word in _MARKS.values() if word)
        panels = (_svg(*_panel(*each)) for each in rows(layer).items())
        body += [
            "<h2>Ops of one layer</h2>",
            _table(("op", "before", "after"), layer.changes()),
            "<h2>Graph of one layer</h2>",
            f'<p class="dim">{legend}. An arc leads from an op to one that reads it.</p>',
            f'<div class="panels">{"".join(panels)}</div>',
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon: a browser would ask the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>{_PAGE_STYLE}{_STYLE}</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _changes(ops: PassOps) -> str:
    """Such as "2 more empty, 3 fewer mm"."""
    counted = (
        f"{abs(after - before)} {'more' if after > before else 'fewer'} {op.rpartition('::')[2]}"
        for op, before, after in ops.changes()
    )
    return ", ".join(counted)


def _table(head: Sequence[str], listed: Sequence[Sequence[object]]) -> str:
    styles = [' class="number"' if isinstance(value, int) else "" for value in listed[0]]
    out = ["<table>"]
    for tag, row in [*([("th", head)] if head else []), *(("td", row) for row in listed)]:
        cells = zip(styles, row, strict=True)
        row_of = (f"<{tag}{style}>{escape(str(value))}</{tag}>" for style, value in cells)
        out.append(f"<tr>{''.join(row_of)}</tr>")
    return "\n".join([*out, "</table>"])
