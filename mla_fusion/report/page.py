"""A report as one HTML page that loads nothing: no script, no font, no picture."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mla_fusion.report import RangeReport, Report, svg
from mla_fusion.report.rows import KEPT, LEGEND

_STYLE = "\n" + Path(__file__).with_suffix(".css").read_text(encoding="utf-8")


def page(report: Report) -> str:
    """The whole document."""
    decode = report.decode_ranges()
    layers, fused = sum(r.layers for r in decode), sum(r.fused for r in decode)
    title = f"MLA fusion: {report.model or 'a model'}"
    tone = "good" if 0 < fused == layers else "bad"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {tone}">{fused} of {layers} MLA layers of the decode graphs fused</p>',
        _table((), _facts(report)),
        "<h2>Ranges of token counts</h2>",
        _table(
            ("tokens", "MLA layers", "fused", "declined"),
            [_range_row(r, report.bucket) for r in report.ranges],
        ),
        '<p class="dim">Graphs above the decode bucket are left untouched.</p>',
        *_declined(report.ranges),
    ]
    layer = next((r.layer for r in decode if r.layer), None)
    if layer:
        before, after = svg.panels(layer)
        marks = ", ".join(
            f"{svg.SIGN[mark]} {word}" for mark, word in LEGEND.items() if mark != KEPT
        )
        body += [
            "<h2>Ops of one layer</h2>",
            _table(("op", "before", "after"), layer.changes()),
            "<h2>Graph of one layer</h2>",
            f'<p class="dim">{escape(marks)}. An arc leads from an op to one that reads it.</p>',
            f'<div class="panels">{before}{after}</div>',
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # An empty icon: a browser would ask the server for one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{svg.STYLE}</style>\n</head>\n"
        "<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _facts(report: Report) -> list[tuple[str, str]]:
    versions = " ".join(f"{k} {v}," for k, v in report.versions.items() if k != "device")
    facts = {
        "provider": report.provider,
        "decode bucket": f"{report.bucket} tokens",
        "compiled with": versions.rstrip(","),
        "compiled for": report.versions.get("device", ""),
    }
    return [(name, value) for name, value in facts.items() if value]


def _range_row(r: RangeReport, bucket: int) -> tuple[object, ...]:
    outside = "" if r.range[1] <= bucket else ", untouched"
    declined = sum(r.declined.values())
    return f"{r.range[0]}\N{EN DASH}{r.range[1]}{outside}", r.layers, r.fused, declined


def _declined(ranges: Iterable[RangeReport]) -> list[str]:
    rows = [
        (decline.code, layers, decline.explain())
        for r in ranges
        for decline, layers in r.declined.items()
    ]
    if not rows:
        return []
    return ["<h2>Why layers declined</h2>", _table(("code", "layers", "why"), rows)]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    listed = [*rows]
    numbers = [isinstance(value, int) for value in listed[0]]
    out = ["<table>"]
    for tag, row in [*([("th", head)] if head else []), *(("td", row) for row in listed)]:
        cells = (_cell(tag, value, number) for value, number in zip(row, numbers, strict=True))
        out.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*out, "</table>"])


def _cell(tag: str, value: object, number: bool) -> str:
    style = ' class="number"' if number else ""
    return f"<{tag}{style}>{escape(str(value))}</{tag}>"
