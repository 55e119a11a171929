"""A report as one HTML page that loads nothing: no script, no font, no picture."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mla_fusion.report import Report, svg
from mla_fusion.report.layer_graph import LEGEND

_STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def page(report: Report) -> str:
    """The whole document."""
    decode = report.decode_ranges()
    layers, fused = sum(r.layers for r in decode), sum(r.fused for r in decode)
    ranges, why = [], []
    for r in report.ranges:
        tokens = f"{r.range[0]}\N{EN DASH}{r.range[1]}"
        tokens += "" if r.range[1] <= report.bucket else ", untouched"
        ranges.append((tokens, r.layers, r.fused, sum(r.declined.values())))
        why += [(decline.code, count, decline.explain()) for decline, count in r.declined.items()]
    versions = " ".join(f"{k} {v}," for k, v in report.versions.items() if k != "device")
    facts = {"provider": report.provider, "decode bucket": f"{report.bucket} tokens"}
    facts["compiled with"] = versions.rstrip(",")
    facts["compiled for"] = report.versions.get("device", "")
    title = f"MLA fusion: {report.model or 'a model'}"
    tone = "good" if 0 < fused == layers else "bad"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {tone}">{fused} of {layers} MLA layers of the decode graphs fused</p>',
        _table((), [(name, value) for name, value in facts.items() if value]),
        "<h2>Ranges of token counts</h2>",
        _table(("tokens", "MLA layers", "fused", "declined"), ranges),
        '<p class="dim">Graphs above the decode bucket are left untouched.</p>',
    ]
    if why:
        body += ["<h2>Why layers declined</h2>", _table(("code", "layers", "why"), why)]
    layer = next((r.layer for r in decode if r.layer), None)
    if layer:
        legend = escape(", ".join(f"{svg.SIGN[mark]} {word}" for mark, word in LEGEND.items()))
        body += [
            "<h2>Ops of one layer</h2>",
            _table(("op", "before", "after"), layer.changes()),
            "<h2>Graph of one layer</h2>",
            f'<p class="dim">{legend}. An arc leads from an op to one that reads it.</p>',
            f'<div class="panels">{svg.panels(layer)}</div>',
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon: a browser would ask the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{svg.STYLE}</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    listed = [*rows]
    styles = [' class="number"' if isinstance(value, int) else "" for value in listed[0]]
    out = ["<table>"]
    for tag, row in [*([("th", head)] if head else []), *(("td", row) for row in listed)]:
        cells = zip(styles, row, strict=True)
        row_of = (f"<{tag}{style}>{escape(str(value))}</{tag}>" for style, value in cells)
        out.append(f"<tr>{''.join(row_of)}</tr>")
    return "\n".join([*out, "</table>"])
