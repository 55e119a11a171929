"""Reports of fused and declined layers: counts per compile range, reasons, a layer before and
after.

The passes add one `RangeReport` per compiled graph. `take` makes the `Report` of a worker, `merge`
joins the reports of all workers, and `publish` logs the result. `store` writes it under vLLM's
cache root. A start from a warm compile cache runs no pass, and reads it by `find`."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from mla_fusion import logger
from mla_fusion.files import read_bounded
from mla_fusion.ops import Norm, Product, Variant
from mla_fusion.report.graphs import LayerGraph, PassOps
from mla_fusion.report.reasons import Decline

# In front of each log line about the flag: whoever searches the log for one of them finds it.
FLAG_LINE = "mla-fusion: fuse_aiter_qk_rope_kvcache_mla"
QUANTIZATIONS = {
    "group": "in groups of 128",
    "group_ue8m0": "in groups of 128, scales powers of two,",
    "tensor": "by one given scale",
}


@dataclass
class RangeReport:
    """One compiled graph, or all of one compile range."""

    range: tuple[int, int]
    layers: int = 0
    fused: int = 0
    declined: dict[Decline, int] = field(default_factory=dict)  # layers, as `counted` has it
    layer: LayerGraph | None = None  # a fused one of the first graph in which there is one
    variants: list[Variant] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)  # fused, by `Epilogue.quantization`
    plain_outputs: dict[Decline, int] = field(default_factory=dict)  # fused, not quantized
    products: dict[Product, int] = field(default_factory=dict)  # launches of pass 7
    plain_products: dict[Decline, int] = field(default_factory=dict)  # as they were
    norms: dict[Norm, int] = field(default_factory=dict)  # launches of pass 8
    pass_ms: float = 0.0
    passes: dict[str, PassOps] = field(default_factory=dict)  # by number, in their order

    def add(self, graph: "RangeReport") -> None:
        """Count a graph of the range."""
        self.layers += graph.layers
        self.fused += graph.fused
        self.pass_ms += graph.pass_ms
        self.layer = self.layer or graph.layer
        self.variants += [v for v in graph.variants if v not in self.variants]
        self.outputs = Counter(self.outputs) + Counter(graph.outputs)
        self.declined = counted(self.declined, graph.declined)
        self.plain_outputs = counted(self.plain_outputs, graph.plain_outputs)
        self.products = Counter(self.products) + Counter(graph.products)
        self.norms = Counter(self.norms) + Counter(graph.norms)
        self.plain_products = counted(self.plain_products, graph.plain_products)
        for number, found in graph.passes.items():
            self.passes[number] = self.passes.get(number, PassOps({}, {})) + found


def counted(*declines: Iterable[Decline]) -> dict[Decline, int]:
    """Number of declined layers, or products, from lists or counts, under the first decline of each
    code."""
    total: dict[Decline, int] = {}
    for decline in chain(*(Counter(each).elements() for each in declines)):
        first = next((d for d in total if d.code == decline.code), decline)
        total[first] = total.get(first, 0) + 1
    return total


@dataclass
class Report:
    """The report of an engine, of all its workers."""

    provider: str
    bucket: int  # the decode bucket in tokens
    ranges: list[RangeReport]
    model: str = ""  # the architecture
    versions: dict[str, str] = field(default_factory=dict)  # of what compiled it
    uncompiled: int = 0  # MLA layers of the model that were in no graph
    others: int = 0  # layers with another attention, which a hybrid has between them
    ranks: int = 1  # workers
    differing: list[str] = field(default_factory=list)  # what fused where the rest does not hold
    attention: str = "auto"  # who decodes, as the option of that name
    epilogue: str = ""  # what that decode does beyond the attention, or why it does not
    chosen: str = ""  # the layers that may fuse, as the option `layers`; empty for all
    version: int = 9  # of the stored format

    def quantizations(self) -> set[str]:
        """The quantizations of attention outputs, on any rank."""
        return {kind for r in self.ranges for kind in r.outputs}

    def decode_ranges(self) -> list[RangeReport]:
        """The ranges inside the bucket that have MLA layers."""
        return [r for r in self.ranges if r.range[1] <= self.bucket and r.layers]

    def decode(self) -> RangeReport:
        """The decode ranges as one: a layer counts as often as a graph has it."""
        total = RangeReport((1, self.bucket))
        for each in self.decode_ranges():
            total.add(each)
        return total

    def lines(self) -> list[str]:
        """The report as text: for each range its counts, reasons and changed ops."""
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        attention = "" if self.attention == "auto" else self.attention
        named = {"provider": self.provider, "attention": attention, "epilogue": self.epilogue}
        named["layers"] = self.chosen
        who = ", ".join(f"{name} {value}" for name, value in named.items() if value)
        out = [f"MLA fusion: {who}, decode bucket {self.bucket} tokens{ranks}"]
        out += [f"  differs on {other}" for other in self.differing]
        for r in self.ranges:
            note = "" if r.range[1] <= self.bucket else "  (outside the decode bucket: untouched)"
            out.append(
                f"  tokens {r.range[0]} to {r.range[1]}: {r.layers} MLA layers, "
                f"{r.fused} fused, {sum(r.declined.values())} declined{note}"
            )
            out += [f"    {n} declined: {d.explain()}" for d, n in r.declined.items()]
            if self.epilogue:  # else vLLM's backend decodes
                out += [
                    f"    {n} outputs quantized {QUANTIZATIONS[kind]} by the attention op"
                    for kind, n in r.outputs.items()
                    if n and kind in QUANTIZATIONS
                ]
                out += [
                    f"    {n} outputs not quantized by the attention op: {d.explain()}"
                    for d, n in r.plain_outputs.items()
                ]
            out += [f"    {n} launches of products {widths}" for widths, n in r.products.items()]
            out += [f"    {n} launches of norms {widths}" for widths, n in r.norms.items()]
            out += [f"    {n} products kept: {d.explain()}" for d, n in r.plain_products.items()]
            if r.layer:
                out.append("    ops of one layer, before -> after:")
                out += [f"      {old:3d} -> {new:<3d} {op}" for op, old, new in r.layer.changes()]
        if self.uncompiled:
            why = Decline("no-graph").explain()
            out.append(f"  outside any graph: {self.uncompiled} MLA layers: {why}")
        if self.others:
            out.append(f"  {self.others} layers without MLA, as they were")
        return out


_records: list[RangeReport] = []
listeners: list[Callable[[RangeReport], object]] = []  # called with each record, until `take`
_compiled: dict[int, tuple[Any, list[RangeReport]]] = {}  # compiled code, by its id, and records


def add(record: RangeReport) -> None:
    """Keep the record of a compiled graph; the passes call it once for each."""
    _records.append(record)
    for told in listeners:
        told(record)


@contextlib.contextmanager
def of_equal_graphs() -> Iterator[list[Any]]:
    """Count a graph of which vLLM takes the code of an equal one, in which no pass runs: it is what
    the caller puts into the list."""
    before, made = len(_records), list[Any]()
    yield made
    code = made[0]
    if new := _records[before:]:
        _compiled[id(code)] = code, new
    elif known := _compiled.get(id(code)):
        _records.extend(replace(record, pass_ms=0.0) for record in known[1])


def forget() -> None:
    """Discard records left by an engine of this process that died before it reported."""
    _records.clear()
    _compiled.clear()
    listeners.clear()


def take(provider: str, bucket: int, model_layers: int = 0, **of_engine: Any) -> Report | None:
    """The report of all graphs compiled since the last call; None if no pass ran. `model_layers`
    counts the MLA layers of model and draft head; the others are fields of `Report`."""
    if not _records:
        return None
    ranges: dict[tuple[int, int], RangeReport] = {}
    for record in sorted(_records, key=lambda record: record.range):
        ranges.setdefault(record.range, RangeReport(record.range)).add(record)
    forget()
    uncompiled = max(model_layers - max(r.layers for r in ranges.values()), 0)
    return Report(provider, bucket, [*ranges.values()], uncompiled=uncompiled, **of_engine)


def merge(reports: Sequence[Report], stages: int = 1) -> Report:
    """The first of the ranks' reports, with the `variants` and the keys of `outputs` of all. A rank
    with another outcome is named in `differing`. The `stages` of a pipeline, each of as many ranks
    in a row, may have unlike numbers of layers, and other products."""
    first, *others = reports
    ranges = []
    for r in first.ranges:
        same = [o for report in others for o in report.ranges if o.range == r.range]
        variants = dict.fromkeys(v for each in (r, *same) for v in each.variants)
        kinds = dict.fromkeys((kind for each in same for kind in each.outputs), 0)
        ranges.append(replace(r, variants=[*variants], outputs={**kinds, **r.outputs}))
    ranks, launches, expected = len(reports) // stages, [*map(_launches, reports)], _outcome(first)
    differing = [
        f"rank {rank}: {_said(other)}"
        for rank, other in enumerate(reports)
        if _outcome(other) != expected
        or (not (a := launches[rank]) <= (b := launches[rank - rank % ranks]) and not b <= a)
    ]
    return replace(first, ranges=ranges, ranks=len(reports), differing=differing)


def _outcome(report: Report) -> list[Any]:
    """(range, layers that stay unfused: all or a number, by reason and in sum) of the decode."""
    found = []
    for r in report.decode_ranges():
        unfused = {"": r.layers - r.fused} | {d.code: layers for d, layers in r.declined.items()}
        found.append((r.range, {c: "all" if n == r.layers else n for c, n in unfused.items()}))
    return found


def _launches(report: Report) -> Counter[Any]:
    """How often the decode launches each product and norm and keeps a product, by its reason. No
    pass counts a piece that Inductor has in its cache, where another rank may have put it."""
    return Counter(
        (r.range, of.code if isinstance(of, Decline) else of)
        for r in report.decode_ranges()
        for counts in (r.products, r.norms, r.plain_products)
        for of in Counter[Any](counts).elements()
    )


def _said(report: Report) -> str:
    """A rank's report in one line."""
    found = [
        ", ".join([
            f"{r.fused} of {r.layers} fused in decode range {r.range}", *_codes(r),
            *(f"{n} launches of {of}" for of, n in (*r.products.items(), *r.norms.items())),
            *(f"{n} products kept [{d.code}]" for d, n in r.plain_products.items()),
        ])
        for r in report.decode_ranges()
    ]  # fmt: skip
    return "; ".join(found) or "no MLA layer in a graph"


def _codes(found: RangeReport) -> list[str]:
    return [f"{layers} [{d.code}]" for d, layers in found.declined.items()]


def load(path: Path) -> Report:
    """The report stored at `path`, every text in it printable. Raises OSError if the file cannot be
    read, and ValueError if it is no report or another release stored it."""
    # Imported here: the plugin is loaded before vLLM needs pydantic.
    from mla_fusion.report import schema

    return schema.parse(read_bounded(path), str(path), Report, RangeReport)


def _plain(value: Any) -> dict[str, Any]:
    """A part of a report as JSON takes it, the way `load` reads it."""
    fields = vars(value).copy()
    for name in {"declined", "plain_outputs", "plain_products"} & fields.keys():
        of = fields[name].items()
        fields[name] = {d.code: {"layers": layers, "detail": d.detail} for d, layers in of}
    lists = {"products", "norms"} & fields.keys()
    return fields | {name: [*fields[name].items()] for name in lists}


def folder(cache_root: Path) -> Path:
    """The folder of stored reports under a vLLM cache root."""
    return cache_root / "torch_compile_cache" / "mla_fusion"


def stored_reports(cache_root: Path) -> list[Path]:
    """The reports stored under a vLLM cache root, or copied by `check --dump`, newest first."""
    modified = {}
    for path in (*folder(cache_root).glob("*.json"), *cache_root.glob("report.json")):
        with contextlib.suppress(OSError):  # a link that leads nowhere, or a file just deleted
            modified[path] = path.stat().st_mtime
    return sorted(modified, key=modified.__getitem__, reverse=True)


def store(path: Path, report: Report) -> None:
    """Keep the report of this start; a file that cannot be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In one step: another start may read it, and this process may be killed.
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(report, default=_plain, separators=(",", ":")))
        part.replace(path)
    except OSError as error:
        logger.warning("mla-fusion could not store its report at %s: %s", path, error)


def find(path: Path) -> Report | None:
    """The report of the graphs in vLLM's compile cache; a file that cannot be read is a warning."""
    try:
        return load(path) if path.exists() else None
    except (OSError, ValueError) as error:
        logger.warning(
            "mla-fusion does not know what fused in the graphs of vLLM's compile cache: %s. Delete "
            "that file, and set VLLM_DISABLE_COMPILE_CACHE=1 once",
            error,
        )
        return None


def publish(report: Report | None, model: str, cached: bool) -> None:
    """Log one line for each decode range; if nothing fused, one warning with the reasons instead.
    report: None if no graph was compiled and no earlier one is found; cached: graphs come from
    vLLM's compile cache, and the report from an earlier start."""
    decode = report.decode_ranges() if report else []
    if report is None or not decode:
        logger.warning(
            "%s is on and fused nothing: no MLA layer was found in a compiled graph. Either "
            "%s is a model class that vLLM does not compile [no-graph] "
            "(mla-fusion check says so), or vLLM found its graphs in a compile cache that was "
            "filled without this report (delete it or set VLLM_DISABLE_COMPILE_CACHE=1 once).",
            *(FLAG_LINE, model),
        )
    elif not any(r.fused for r in decode):
        found = report.decode().declined
        layers = max(r.layers for r in decode)
        kept = all(decline.code == "batch-invariant" for decline in found)
        if kept and "in every step" in report.attention:
            said = "%s: %d MLA layers, attention %s; graphs stay vLLM's [batch-invariant]"
            logger.info(said, FLAG_LINE, layers, report.attention)
        else:
            why = report.attention if kept else " ".join(decline.explain() for decline in found)
            logger.warning("%s is on and fused none of %d MLA layers: %s", FLAG_LINE, layers, why)
    else:
        note = f"; {report.uncompiled} in no graph [no-graph]" if report.uncompiled else ""
        note += f"; {report.others} layers without MLA" if report.others else ""
        note += " (graphs from vLLM's compile cache)" if cached else ""
        fused = f"fused on {report.ranks} ranks" if report.ranks > 1 else "fused"
        for r in decode:
            codes = ", ".join(_codes(r))
            declined = f"; declined: {codes}, mla-fusion report says why" if codes else ""
            launches = sum(r.products.values())
            products = f"; products in {launches} launches of this library" if launches else ""
            logger.info(
                "%s: decode range %s: %d of %d MLA layers %s; prefill ranges untouched%s",
                *(FLAG_LINE, r.range, r.fused, r.layers, fused + declined + products, note),
            )
        for other in report.differing:
            logger.warning("%s: it differs on %s", FLAG_LINE, other)
