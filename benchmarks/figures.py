#!/usr/bin/env python3
"""Writes from benchmarks/results/*.csv the tables of README.md and docs/performance.md, a plot, and
what `attention=auto` and CUSTOM decide by: the files in mla_fusion/runtime/{gpus,sparse_gpus}.

    python benchmarks/figures.py           all of it (needs matplotlib: the extra `bench`)
    python benchmarks/figures.py --tables  without the plot

A table is between `<!-- table NAME -->` and `<!-- end -->`; the plot carries the hash of the rows
it was drawn from, so that a test fails when either is older than its source.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import itertools
import re
from pathlib import Path
from statistics import geometric_mean, median

from mla_fusion.cli.calibrate.tables import tables as shapes_of
from mla_fusion.measure.decode_peers import TOLERANCE
from mla_fusion.measure.records import text
from mla_fusion.runtime.measured import FOLDER, WIDTHS
from mla_fusion.runtime.measured import PAGE as TOKENS
from mla_fusion.runtime.sparse_step import FOLDER as SPARSE_FOLDER

WINDOW = 128  # slots of V4's window, beside those that are chosen
SPARSE_TOLERANCE = 1e-2  # of benchmarks/sparse.py
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "README.md", ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "steps.svg"
REGION = RESULTS / "region_h200.csv"
# A decode and the product with W_UV behind it.
STEPS = RESULTS / "step_h200.csv"
AUTO = RESULTS / "complete_auto_h200.csv"
RANKS = RESULTS / "complete_ranks_h200.csv"
SERVE = RESULTS / "serve_vllm033_h200.csv"

Row = dict[str, str]
PEERS = "bmm+1", "flashinfer", "vllm-40392", "vllm-unfused"
MODELS = {
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "glm-4.7-flash": "GLM-4.7-Flash",
    "deepseek-r1-tp8": "R1 in block fp8, one rank of 8",
    "deepseek-r1-bf16": "R1 in bf16, one rank of 8",
    "r1-dp": "R1 with 128 heads",
    "deepseek-r1-deep": "R1, 16 heads a rank",
    "r1-ep": "R1, 128 heads, 16 experts",
}
# A dark page: the colours of mla_fusion/report/svg.css in place of matplotlib's.
DARK = """<style>svg { background: #ffffff }
@media (prefers-color-scheme: dark) { svg { background: #0d1117 } text { fill: #e6edf3 }
[style*="fill: #ffffff"] { fill: #0d1117 !important }
[style*="stroke: #000000"] { stroke: #e6edf3 !important }
[style*="stroke: #b0b0b0"] { stroke: #6e7681 !important } }</style>
"""
DECODERS = {"ours": "ours", "triton_mla": "TRITON_MLA", "flashmla": "FlashMLA",
            "fa3": "FlashAttention 3"}  # fmt: skip


def read(path: Path) -> list[Row]:
    """The rows of a result file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def digest() -> str:
    """The hash that the plot carries of its rows."""
    return hashlib.sha256(AUTO.read_bytes()).hexdigest()[:16]


def spread(factors: list[float]) -> str:
    """The geometric mean, the least and the most."""
    return f"{geometric_mean(factors):.2f}x ({min(factors):.2f}-{max(factors):.2f})"


def region_table(rows: list[Row]) -> list[str]:
    """How many times faster ours is than the best of the others, by heads: back to back, and after
    an unrelated kernel, without that kernel's own time."""
    us = {(int(r["tokens"]), int(r["heads"]), r["candidate"]): float(r["p50_us"]) for r in rows}
    ours: dict[int, list[float]] = {}
    after: dict[int, list[float]] = {}
    for t, h in dict.fromkeys(shape[:2] for shape in us):
        best = min(us[t, h, peer] for peer in PEERS if (t, h, peer) in us)
        ours.setdefault(h, []).append(best / us[t, h, "triton"])
        after.setdefault(h, []).append(best / (us[t, h, "plain+triton"] - us[t, h, "plain"]))
    lines = ["| heads | back to back: mean (range) | after another kernel |", "|---|---|---|"]
    return lines + [f"| {h} | {spread(ours[h])} | {spread(after[h])} |" for h in sorted(ours)]


Steps = dict[tuple[int, str], Row]  # by batch and arm


def steps(rows: list[Row]) -> dict[tuple[str, ...], Steps]:
    """The decode steps of each model, layers, vLLM, type of the KV cache and context."""
    found: dict[tuple[str, ...], Steps] = {}
    for r in rows:
        if int(r["batch"]):  # no prefill
            cache = "bf16" if r["cache"] == "auto" else r["cache"]
            point = MODELS[r["model"]], f"{r['layers']} layers", r["vllm"], cache, r["context"]
            found.setdefault(point, {})[int(r["batch"]), r["arm"]] = r
    return found


def newest() -> dict[tuple[str, ...], Steps]:
    """The steps with context 1024, of each model's newest vLLM."""
    found = {p: s for p, s in steps(read(AUTO)).items() if p[-1] == "1024"}
    last = {model: max(p[2] for p in found if p[0] == model) for model in {p[0] for p in found}}
    return {point: measured for point, measured in found.items() if point[2] == last[point[0]]}


def complete_table(points: dict[tuple[str, ...], Steps]) -> list[str]:
    """GPU time of a step of whole models by batch: vLLM's default, and in brackets the change with
    the flag, in percent."""
    batches = sorted({batch for measured in points.values() for batch, _ in measured})
    head = ["model, vLLM, KV cache, context, commit", *(f"batch {batch}" for batch in batches)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for point, measured in points.items():
        commits = dict.fromkeys(row["commit"] for row in measured.values())
        cells = [", ".join((*point, *commits))]
        for batch in batches:
            if (batch, "default") not in measured:
                cells.append("not run")
                continue
            time = float(measured[batch, "default"]["gpu_us"])
            cells.append(f"{time:.0f} ({float(measured[batch, 'auto']['gpu_change']):+.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def star(off: list[float], on: list[float]) -> str:
    """A star if the ranges of the rounds without and with the flag overlap."""
    return "*" * (min(on) <= max(off) and min(off) <= max(on))


def ranks_table(rows: list[Row]) -> list[str]:
    """The change of a step of several GPUs with the flag, in percent, by batch of an engine: GPU
    time on each rank; by the clock."""
    points: dict[str, dict[int, str]] = {}
    for default, r in itertools.pairwise(rows):
        if r["arm"] != "auto":
            continue
        way = next((way for way in ("dcp", "dp") if r.get(way)), "tp").upper() + r["gpus"]
        marks = "1 draft" * bool(r.get("drafts")), "fused with norms" * bool(r.get("multicast"))
        told = MODELS[r["model"]], f"{r['layers']} layers", way, *marks, r["vllm"]
        name = ", ".join(filter(None, (*told, r.get("all_reduce"), r["commit"])))
        ranks = [r[column] for column in r if re.fullmatch(r"gpu\d*_change", column)]
        gpu = "/".join(f"{float(change):+.1f}" for change in filter(None, ranks))
        rounds = ([float(of[f"wall_{end}"]) for end in ("min", "max")] for of in (default, r))
        clock = f"{float(r['wall_change']):+.1f}{star(*rounds)}"
        points.setdefault(name, {})[int(r["batch"])] = f"{gpu}; {clock}"
    batches = sorted({batch for cells in points.values() for batch in cells})
    head = ["model, vLLM, all-reduce, commit", *(f"batch {batch}" for batch in batches)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, cells in points.items():
        lines.append(f"| {' | '.join([name, *(cells.get(b, 'not run') for b in batches)])} |")
    return lines


def serve_table(rows: list[Row]) -> list[str]:
    """Medians of the rounds (least to most) by load: without and with the flag."""
    columns = {"median_tpot_ms": "TPOT, ms", "median_ttft_ms": "TTFT, ms",
               "output_throughput": "tokens/s"}  # fmt: skip
    lines = [f"| requests/s | {' | '.join(columns.values())} |", "|---" * 4 + "|"]
    for rate in dict.fromkeys(r["rate"] for r in rows):
        cells = ["all at once" if rate == "inf" else f"{float(rate):.0f}"]
        for column in columns:
            off, on = (
                [float(r[column]) for r in rows if (r["rate"], r["arm"]) == (rate, arm)]
                for arm in ("default", "auto")
            )
            told = (f"{median(us):.4g} ({min(us):.4g}-{max(us):.4g})" for us in (off, on))
            cells.append("; ".join(told) + star(off, on))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def attention_means(rows: list[Row]) -> list[str]:
    """How many times faster ours is than each peer, over all shapes of a number of heads, and of
    query rows if there are several: the geometric mean, the least and the most, and in how many
    shapes the peer is faster."""
    # By heads, query rows and dtype, then by candidate, then by shape.
    times: dict[tuple[int, int, str], dict[str, dict[tuple[str, ...], float]]] = {}
    for r in rows:
        of = times.setdefault((int(r["heads"]), int(r["queries"]), r["dtype"]), {})
        shape = r["batch"], r["context"], r["ragged"]
        of.setdefault(r["candidate"], {})[shape] = float(r["p50_us"])
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for (heads, queries, dtype), each in sorted(times.items()):
        name = f"{heads} x {queries}" if queries > 1 else str(heads)
        for peer in each.keys() & DECODERS.keys() - {"ours"}:
            factors = [us / each["ours"][shape] for shape, us in each[peer].items()]
            lost = f"{sum(factor < 1 for factor in factors)}/{len(factors)}"
            cells.setdefault(name, {})[dtype, peer] = f"{spread(factors)}; {lost}"
    measured = {key for of_heads in cells.values() for key in of_heads}
    keys = [(t, peer) for t in ("bf16", "fp8") for peer in DECODERS if (t, peer) in measured]
    lines = [
        f"| heads | {' | '.join(f'{dtype}, {DECODERS[peer]}' for dtype, peer in keys)} |",
        "|---" * (len(keys) + 1) + "|",
    ]
    for name, of_heads in cells.items():
        lines.append(f"| {name} | {' | '.join(of_heads.get(k, 'not run') for k in keys)} |")
    return lines


def tables() -> dict[str, list[str]]:
    """Name and lines of every table of the page."""
    return {
        "region": region_table(read(REGION)),
        "readme": complete_table(newest()),
        "complete-auto": complete_table(steps(read(AUTO))),
        "ranks": ranks_table(read(RANKS)),
        "serve": serve_table(read(SERVE)),
        "attention-means": attention_means(read(STEPS)),
    }


def written() -> dict[Path, str]:
    """The pages with their tables as the results have them."""
    pages = {page: page.read_text() for page in PAGES}
    for name, lines in tables().items():
        text = "\n".join([f"<!-- table {name} -->", *lines, "<!-- end -->"])
        place = re.compile(rf"<!-- table {name} -->.*?<!-- end -->", re.S)
        found = [page for page, content in pages.items() for _ in place.findall(content)]
        if len(found) != 1:
            raise SystemExit(f"the table {name!r} has {len(found)} places, not one")
        pages[found[0]] = place.sub(lambda _, t=text: t, pages[found[0]])
    return pages


def shipped(source: Path = STEPS) -> dict[str, str]:
    """The files of `FOLDER` by name: of ours and of what vLLM chooses there. ValueError: rows are
    of another shape than the files' or of the decode alone, or ours was wrong."""
    rows = read(source)
    for row in rows:
        shape = int(row["latent"]), int(row["rope"]), int(row["page"])
        right = row["candidate"] != "ours" or float(row["error"]) <= TOLERANCE
        if shape != (*WIDTHS, TOKENS) or row["values"] == "0" or not right:
            raise ValueError(f"not a row to decide by: {row}")
    chosen = [row for row in rows if row["candidate"] == "ours" or row["vllm_default"] == "1"]
    return {name: text(table) for name, table in shapes_of(chosen).items()}


def sparse_shipped() -> dict[str, str]:
    """The files of `SPARSE_FOLDER` by name: of ours and of vLLM's choice, by each one's last rows.
    ValueError: ours was wrong."""
    last: dict[tuple[str, ...], Row] = {}
    for row in itertools.chain(*map(read, sorted(RESULTS.glob("sparse_*.csv")))):
        ours = row["candidate"] == "ours"
        if ours and not float(row["error"]) <= SPARSE_TOLERANCE:
            raise ValueError(f"not a row to decide by: {row}")
        slots = int(row["topk"]) + (WINDOW if "v4" in row["cache"] else 0)
        cache = row["cache"] + "_window" * (slots == WINDOW)
        form = {"dtype": cache, "queries": "1", "values": "0", "batch": row["tokens"],
                "context": str(slots), "ragged": "0"}  # fmt: skip
        peer = "ours" if ours else "fa3_sparse" if row["cache"] == "bf16" else "flashmla_sparse"
        if ours or row["vllm_default"] == "1":
            key = row["gpu"], row["cache"], row["topk"], row["heads"], row["tokens"], peer
            last[key] = row | form | {"candidate": peer}
    return {name: text(table) for name, table in shapes_of(last.values()).items()}


def draw_steps() -> None:
    """Bars of the step time by batch, with vLLM's defaults and with the flag, for each model: an
    SVG that is the same for the same rows."""
    from matplotlib import pyplot

    pyplot.rcParams |= {"backend": "svg", "svg.hashsalt": "mla-fusion", "svg.fonttype": "none"}
    points = newest()
    figure, axes = pyplot.subplots(1, len(points), figsize=(10, 3.4))
    arms = {"default": ("vLLM", "#8c959f"), "auto": ("with the flag", "#1f77b4")}
    for axis, (point, measured) in zip(axes, points.items(), strict=True):
        batches = sorted({batch for batch, _ in measured})
        for left, (arm, (label, color)) in enumerate(arms.items()):
            times = [float(measured[batch, arm]["gpu_us"]) / 1000 for batch in batches]
            places = [place + 0.4 * left for place in range(len(batches))]
            axis.bar(places, times, 0.38, color=color, label=label)
        for place, batch in enumerate(batches):
            change = float(measured[batch, "auto"]["gpu_change"])
            top = max(float(measured[batch, arm]["gpu_us"]) for arm in arms) / 1000
            axis.text(place + 0.2, top, f"{change:+.1f} %", ha="center", va="bottom", fontsize=7)
        axis.margins(y=0.1)
        axis.set_xticks([place + 0.2 for place in range(len(batches))], [str(b) for b in batches])
        axis.set_title("{}, {}\nvLLM {}".format(*point), fontsize=9)
        axis.set(xlabel="requests at once", ylabel="ms a step", axisbelow=True)
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    drawn = io.StringIO()
    metadata = {"Date": None, "Description": f"rows {digest()}"}
    figure.savefig(drawn, format="svg", metadata=metadata)
    PLOT.write_text(drawn.getvalue().replace(" <defs>", DARK + " <defs>", 1))


def main() -> None:
    """Bring all up to their source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="do not draw")
    options = parser.parse_args()
    for name, content in shipped().items():
        (FOLDER / name).write_text(content)
    for name, content in sparse_shipped().items():
        (SPARSE_FOLDER / name).write_text(content)
    for page, content in written().items():
        page.write_text(content)
    if not options.tables:
        draw_steps()


if __name__ == "__main__":
    main()
