"""A report as one HTML page that loads nothing: no script, no font, no picture."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from mla_fusion.report import svg
from mla_fusion.report.rows import KEPT, LEGEND

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mla_fusion.report import RangeReport, Report

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --page: #ffffff;
  --line: #d1d9e0; --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --page: #0d1117;
  --line: #3d444d; --good: #56d364; --bad: #ff8177; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.verdict { font-size: 1.1rem; font-weight: 600; } .good { color: var(--good); }
.bad { color: var(--bad); } .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.3rem 0.6rem 0.3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font: 0.9em ui-monospace, Menlo, Consolas, monospace; }
.panels { display: flex; flex-wrap: wrap; gap: 1.5rem; } .panels svg { max-width: 100%; }
"""


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
