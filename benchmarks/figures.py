#!/usr/bin/env python3
"""Writes from benchmarks/results/*.csv the tables and plots of docs/performance.md, and what
`attention=auto` decides by: mla_fusion/runtime/gpus/*.json.

    python benchmarks/figures.py            all of it (needs matplotlib: the extra `bench`)
    python benchmarks/figures.py --tables   without the plots
    python benchmarks/figures.py --rows CSV the JSON of a GPU whose rows are kept there alone

A table is between `<!-- table NAME -->` and `<!-- end -->`; each plot carries the hash of the rows
it was drawn from, so that a test fails when either is older than its source.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from mla_fusion.cli.calibrate.tables import tables as shapes_of
from mla_fusion.cli.calibrate.tables import text
from mla_fusion.measure.decode_peers import TOLERANCE
from mla_fusion.runtime.measured import FOLDER, WIDTHS
from mla_fusion.runtime.measured import PAGE as TOKENS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
REGION = RESULTS / "region_h200.csv"
# A decode and the product with W_UV behind it.
STEPS = RESULTS / "step_h200.csv"
COMPLETE = RESULTS / "complete_h200.csv"
RANKS, AUTO = RESULTS / "complete_ranks_h200.csv", RESULTS / "complete_auto_h200.csv"
PRODUCTS = RESULTS / "complete_products_h200.csv"

Row = dict[str, str]
PEERS = {
    "bmm+1": "bmm + 1",
    "flashinfer": "bmm + FlashInfer",
    "vllm-40392": "cat",
    "vllm-unfused": "unfused",
}
ARMS = ("fused", "portable")
DECODERS = {"ours": "ours", "triton_mla": "TRITON_MLA", "flashmla": "FlashMLA",
            "fa3": "FlashAttention 3"}  # fmt: skip


def read(path: Path) -> list[Row]:
    """The rows of a result file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def digest(path: Path) -> str:
    """The hash that a plot carries of its rows."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Region:
    """Medians of the region benchmark, in microseconds per layer."""

    def __init__(self, rows: list[Row]) -> None:
        self.us = {
            (int(r["tokens"]), int(r["heads"]), r["candidate"]): float(r["p50_us"]) for r in rows
        }
        self.floor = {(int(r["tokens"]), int(r["heads"])): float(r["floor_us"]) for r in rows}
        self.shapes = list(self.floor)

    def after(self, shape: tuple[int, int]) -> float:
        """Ours after an unrelated kernel, without that kernel's own time."""
        return self.us[*shape, "plain+triton"] - self.us[*shape, "plain"]

    def best_peer(self, shape: tuple[int, int]) -> float:
        """Time of the fastest of the others."""
        return min(self.us[*shape, peer] for peer in PEERS if (*shape, peer) in self.us)


def spread(factors: list[float]) -> str:
    """The geometric mean, the least and the most."""
    return f"{geometric_mean(factors):.2f}x ({min(factors):.2f}, {max(factors):.2f})"


def region_table(rows: list[Row]) -> list[str]:
    """How many times faster ours is than the best of the others, by heads, both ways."""
    region = Region(rows)
    lines = ["| heads | back to back: mean (least, most) | after another kernel |", "|---|---|---|"]
    for heads in sorted({h for _, h in region.shapes}):
        cells = [str(heads)]
        for ours in (lambda shape: region.us[*shape, "triton"], region.after):
            factors = [
                region.best_peer((t, h)) / ours((t, h)) for t, h in region.shapes if h == heads
            ]
            cells.append(spread(factors))
        lines.append(f"| {' | '.join(cells)} |")
    lost = [
        f"T={t}, H={h}"
        for t, h in region.shapes
        if region.best_peer((t, h)) < max(region.us[t, h, "triton"], region.after((t, h)))
    ]
    lines += ["", f"Shapes where the best of the others is faster: {', '.join(lost) or 'none'}."]
    return lines


def complete_table(rows: list[Row], clock: str = "gpu", arms: tuple[str, ...] = ARMS) -> list[str]:
    """Time of a step of whole models by a clock, by batch: vLLM's default, and in brackets the
    change of each of `arms` against it, in percent."""
    points: dict[tuple[str, ...], dict[tuple[int, str], Row]] = {}
    for r in rows:
        if int(r["batch"]):  # not the prefill
            cache = "bf16" if r["cache"] == "auto" else r["cache"]
            point = r["model"], r["vllm"], cache, r["context"]
            points.setdefault(point, {})[int(r["batch"]), r["arm"]] = r
    batches = sorted({batch for measured in points.values() for batch, _ in measured})
    head = ["model, vLLM, KV cache, context", *(f"batch {batch}" for batch in batches)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for point, measured in points.items():
        cells = [", ".join(point)]
        for batch in batches:
            if (batch, "default") not in measured:
                cells.append("not run")
                continue
            changes = (
                f"{float(row[f'{clock}_change']):+.1f}" if row else "-"
                for row in (measured.get((batch, arm)) for arm in arms)
            )
            time = float(measured[batch, "default"][f"{clock}_us"])
            cells.append(f"{time:.0f} ({', '.join(changes)})")
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
            lost = f"{sum(factor < 1 for factor in factors)} of {len(factors)}"
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
        "complete": complete_table(read(COMPLETE)),
        "complete-ranks": complete_table(read(RANKS), "wall"),
        "complete-auto": complete_table(read(PRODUCTS) + read(AUTO), arms=("auto",)),
        "attention-means": attention_means(read(STEPS)),
    }


def written(page: str) -> str:
    """The page with its tables as the results have them."""
    for name, lines in tables().items():
        text = "\n".join([f"<!-- table {name} -->", *lines, "<!-- end -->"])
        page, found = re.subn(
            rf"<!-- table {name} -->.*?<!-- end -->", lambda _, t=text: t, page, flags=re.S
        )
        if found != 1:
            raise SystemExit(f"{PAGE.name} has {found} places for the table {name!r}, not one")
    return page


def shipped(sources: Sequence[Path] = (STEPS,)) -> dict[str, str]:
    """The files of `FOLDER` by name: of ours and of what vLLM chooses there. ValueError: rows are
    of another shape than the files' or of the decode alone, or ours was wrong."""
    rows = [row for path in sources for row in read(path)]
    for row in rows:
        shape = int(row["latent"]), int(row["rope"]), int(row["page"])
        right = row["candidate"] != "ours" or float(row["error"]) <= TOLERANCE
        if shape != (*WIDTHS, TOKENS) or row["values"] == "0" or not right:
            raise ValueError(f"not a row to decide by: {row}")
    chosen = [row for row in rows if row["candidate"] == "ours" or row["vllm_default"] == "1"]
    return {name: text(table) for name, table in shapes_of(chosen).items()}


def save(figure, name: str, source: Path) -> None:  # type: ignore[no-untyped-def]
    """Write an SVG that is the same for the same rows."""
    from matplotlib import pyplot

    IMAGES.mkdir(exist_ok=True)
    figure.tight_layout(rect=(0, 0.07 if figure.legends else 0, 1, 1))
    metadata = {"Date": None, "Description": f"rows {digest(source)}"}
    figure.savefig(IMAGES / f"{name}.svg", metadata=metadata)
    pyplot.close(figure)


def draw_region() -> None:
    """Times over tokens for a small and a large number of heads, and the factor for all."""
    from matplotlib import pyplot

    region = Region(read(REGION))
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4.4))
    for axis, heads in zip(axes, (16, 128), strict=False):
        tokens = sorted(t for t, h in region.shapes if h == heads)
        axis.plot(tokens, [region.floor[t, heads] for t in tokens], "k--", label="floor")
        axis.plot(tokens, [region.us[t, heads, "triton"] for t in tokens], "o-", label="fused")
        after = [region.after((t, heads)) for t in tokens]
        axis.plot(tokens, after, "o:", color="C0", label="fused, after another kernel")
        for color, (peer, label) in enumerate(PEERS.items(), 1):
            times = [region.us.get((t, heads, peer), math.nan) for t in tokens]
            axis.plot(tokens, times, ".-", color=f"C{color}", label=label)
        axis.set(title=f"{heads} heads", xlabel="tokens", ylabel="µs per layer")
        axis.set(xscale="log", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=7, fontsize=8)
    for heads in sorted({h for _, h in region.shapes}):
        tokens = sorted(t for t, h in region.shapes if h == heads)
        times = [region.best_peer((t, heads)) / region.us[t, heads, "triton"] for t in tokens]
        axes[2].plot(tokens, times, "o-", label=f"{heads} heads")
    axes[2].axhline(1, color="k", lw=0.8)
    axes[2].set(title="times faster than the best peer", xlabel="tokens", xscale="log")
    axes[2].set_ylim(bottom=0)
    axes[2].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xticks(tokens, [str(t) for t in tokens])
        axis.minorticks_off()
    save(figure, "region", REGION)


def main() -> None:
    """Bring all up to their source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", action="store_true", help="do not draw")
    parser.add_argument("--rows", type=Path, nargs="+", help="write their JSON alone")
    options = parser.parse_args()
    for name, content in shipped(options.rows or (STEPS,)).items():
        (FOLDER / name).write_text(content)
    if options.rows:
        return
    PAGE.write_text(written(PAGE.read_text()))
    if not options.tables:
        import matplotlib

        matplotlib.use("svg")
        matplotlib.rcParams.update({"svg.hashsalt": "mla-fusion", "svg.fonttype": "none"})
        draw_region()


if __name__ == "__main__":
    main()
