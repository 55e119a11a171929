"""One layer before and after the passes as a drawing: a row for each op, arcs for what it reads."""

from html import escape
from pathlib import Path

from mla_fusion.report.layer_graph import FUSED, KEPT, NEW, REMOVED, LayerGraph, Row, rows

# Pixels. A panel fits the smallest phone, and a character of its font is 6.15 wide.
PANEL_WIDTH, _ROW, _GUTTER, _CHARACTER, _GAP = 360, 18, 56, 6.15, 24
_CLASS = {KEPT: "kept", REMOVED: "gone", NEW: "new", FUSED: "fused"}
SIGN = {KEPT: "\N{MIDDLE DOT}", REMOVED: "\N{MINUS SIGN}", NEW: "+", FUSED: "\N{BLACK DIAMOND}"}

STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def drawing(layer: LayerGraph) -> str:
    """A whole SVG file: before on the left, after on the right."""
    (before, height), (after, other) = map(_panel, ("before", "after"), rows(layer))
    right = f'<g transform="translate({PANEL_WIDTH + _GAP} 0)">{after}</g>'
    page = '<rect width="100%" height="100%" style="fill: var(--page)"/>'
    body = f"<style>{STYLE}</style>{page}{before}{right}"
    return _svg(2 * PANEL_WIDTH + _GAP, max(height, other), body) + "\n"


def panels(layer: LayerGraph) -> str:
    """The drawings before and after, for a page that has `STYLE`."""
    drawn = map(_panel, ("before", "after"), rows(layer))
    return "".join(_svg(PANEL_WIDTH, height, body) for body, height in drawn)


def _svg(width: int, height: int, body: str) -> str:
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
        # The name of an op of ours takes the whole width, so its results are on a line below.
        height = 2 * _ROW if row.mark == FUSED else _ROW
        middles.append(y + _ROW // 2)
        out.append(_row(row, y, height))
        y += height
    for index, row in enumerate(listed):
        style = ' class="fused"' if row.mark == FUSED else ""
        for source in row.reads:
            out.append(f'<path{style} d="{_arc(middles[source], middles[index])}"/>')
    return "".join(out), y + 6


def _row(row: Row, y: int, height: int) -> str:
    base, left = y + 12, _GUTTER + 16
    fits = int((PANEL_WIDTH - left) / _CHARACTER)
    result, box, tail, below = row.node.result, "", "", ""
    full = escape(f"{row.node.name} = {row.node.op} -> {result or 'nothing'}")
    if row.mark == FUSED:
        size = f'y="{y}" width="{PANEL_WIDTH - _GUTTER}" height="{height}"'
        box = f'<rect x="{_GUTTER}" {size}/>'
        cut = result if len(result) <= fits else result[: fits - 1] + "\N{HORIZONTAL ELLIPSIS}"
        below = f'<text class="dim" x="{left}" y="{base + _ROW - 3}">{escape(cut)}</text>'
    elif result and len(row.op) + len(result) < fits:
        tail = f' <tspan class="dim">{escape(result)}</tspan>'
    return (
        f'<g class="{_CLASS[row.mark]}"><title>{full}</title>{box}'
        f'<text class="sign" x="{_GUTTER + 4}" y="{base}">{SIGN[row.mark]}</text>'
        f'<text x="{left}" y="{base}">{escape(row.op)}{tail}</text>{below}</g>'
    )


def _arc(start: int, end: int) -> str:
    """The path from a producer to a reader below it, wider for a longer distance."""
    bulge = min(8 + (end - start) * 0.16, _GUTTER - 4) * 4 / 3
    x = _GUTTER + 1
    return f"M{x} {start} C{x - bulge:.0f} {start} {x - bulge:.0f} {end} {x} {end}"
