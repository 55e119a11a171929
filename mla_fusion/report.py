"""What fused where: counts per compile range, reasons, an op census, and readable graphs.

The passes add one `GraphRecord` per compiled graph. When the worker has compiled, `publish` sums
them into a `Report`, logs it, and stores it under vLLM's cache root, so that a start from a warm
compile cache, in which no pass runs, shows the same report.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo.utils

from mla_fusion import reasons
from mla_fusion.patterns.site import functionalized_op, op_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import fx

    from mla_fusion.patterns.site import Decline

logger = logging.getLogger("vllm.mla_fusion")


@dataclass(frozen=True)
class Variant:
    """What tells one fused op from another, so that a kernel can be compiled before it is needed.

    Types are names in torch; `table_dtype` is that of the cosines, empty where nothing rotates.
    """

    is_neox: bool
    rope_dim: int
    table_dtype: str
    query_dtype: str
    kv_cache_dtype: str


@dataclass
class GraphRecord:
    """One compiled graph: its token range, and what became of its MLA layers."""

    start: int
    end: int
    layers: int = 0
    fused: int = 0
    declined: dict[str, Decline] = field(default_factory=dict)
    census: dict[str, dict[str, int]] = field(default_factory=dict)
    variants: set[Variant] = field(default_factory=set)
    pass_ms: float = 0.0


@dataclass
class RangeReport:
    """All graphs of one compile range."""

    range: tuple[int, int]
    layers: int = 0
    fused: int = 0
    # reason code -> {"layers": how many, "detail": of the first one}
    declined: dict[str, dict[str, Any]] = field(default_factory=dict)
    # op -> calls in one layer, under "before" and "after"
    census: dict[str, dict[str, int]] = field(default_factory=dict)
    variants: list[Variant] = field(default_factory=list)
    pass_ms: float = 0.0


@dataclass
class Report:
    """What an operator is told; `bucket` is the decode bucket in tokens."""

    provider: str
    bucket: int
    ranges: list[RangeReport]

    @property
    def fused(self) -> int:
        """Fused layers, over all ranges."""
        return sum(r.fused for r in self.ranges)

    def lines(self) -> list[str]:
        """The report as text, one range a line, then the reasons and the census."""
        out = [f"MLA fusion: provider {self.provider}, decode bucket {self.bucket} tokens"]
        for r in self.ranges:
            note = "" if r.range[1] <= self.bucket else "  (outside the decode bucket: untouched)"
            out.append(
                f"  tokens {r.range[0]} to {r.range[1]}: {r.layers} MLA layers, "
                f"{r.fused} fused, {sum(d['layers'] for d in r.declined.values())} declined{note}"
            )
            for code, entry in r.declined.items():
                text = reasons.explain(code, entry["detail"])
                out.append(f"    {entry['layers']} declined: {text}")
            if r.census:
                ops = sorted({*r.census["before"], *r.census["after"]})
                out.append("    ops of one layer, before -> after:")
                for op in ops:
                    before, after = r.census["before"].get(op, 0), r.census["after"].get(op, 0)
                    if before != after:
                        out.append(f"      {before:3d} -> {after:<3d} {op}")
        return out


_records: list[GraphRecord] = []


def add(record: GraphRecord) -> None:
    """Called by the passes, once per compiled graph."""
    _records.append(record)


def forget() -> None:
    """Drop what an engine of this process left that did not live to its report."""
    _records.clear()


def take(provider: str, bucket: int) -> Report | None:
    """The report of all graphs compiled since the last call; None if no pass ran."""
    if not _records:
        return None
    ranges: dict[tuple[int, int], RangeReport] = {}
    for record in _records:
        key = (record.start, record.end)
        total = ranges.setdefault(key, RangeReport(key))
        total.layers += record.layers
        total.fused += record.fused
        total.pass_ms += record.pass_ms
        total.census = total.census or record.census
        total.variants += [v for v in record.variants if v not in total.variants]
        for decline in record.declined.values():
            entry = total.declined.setdefault(decline.code, {"layers": 0, "detail": decline.detail})
            entry["layers"] += 1
    _records.clear()
    return Report(provider, bucket, [ranges[key] for key in sorted(ranges)])


def load(path: Path) -> Report:
    """The report stored at `path`."""
    stored = json.loads(path.read_text())
    for entry in stored["ranges"]:
        entry["range"] = tuple(entry["range"])
        entry["variants"] = [Variant(**variant) for variant in entry["variants"]]
    stored["ranges"] = [RangeReport(**entry) for entry in stored["ranges"]]
    return Report(**stored)


def collect(path: Path, provider: str, bucket: int) -> Report | None:
    """The report of this start, stored at `path`, or the one stored there by an earlier start."""
    report = take(provider, bucket)
    if report is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report), indent=1))
    elif path.exists():
        report = load(path)
        logger.info("The compiled graphs come from vLLM's cache, and so does the report on them:")
    return report


def publish(report: Report | None, model: str) -> None:
    """Log a report; nothing fused, or nothing known, is a warning that says why."""
    if report is None or not any(r.layers for r in report.ranges):
        logger.warning(
            "fuse_aiter_qk_rope_kvcache_mla is on and fused nothing: no MLA layer was found in a "
            "compiled graph. Either %s is a model class that vLLM does not compile, or vLLM found "
            "its graphs in a compile cache that was filled without this report (delete it or set "
            "VLLM_DISABLE_COMPILE_CACHE=1 once).",
            model,
        )
        return
    level = logging.INFO if report.fused else logging.WARNING
    if not report.fused:
        logger.warning("fuse_aiter_qk_rope_kvcache_mla is on and fused no layer; the reasons:")
    for line in report.lines():
        logger.log(level, line)


class Census:
    """Counts the ops of one layer: those that lie between two attention calls in a graph.

    The last layer is taken, so that what precedes the first attention does not count; a model of
    one layer shows what precedes it too.
    """

    def __init__(self, graph: fx.Graph, calls: Sequence[fx.Node]) -> None:
        self.graph = graph
        self.before = self._count(calls)

    def after(self, calls: Sequence[fx.Node]) -> dict[str, dict[str, int]]:
        """The census, once the graph was rewritten; `calls` are the new attention calls."""
        return {"before": self.before, "after": self._count(calls)} if calls else {}

    def _count(self, calls: Sequence[fx.Node]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        node = calls[-1] if calls else None
        while node is not None and node.op != "root":
            if node.op == "call_function" and node.users:
                counts[_label(node)] += 1
            node = node.prev
            if node in calls:
                break
        return dict(counts)


def _label(node: fx.Node) -> str:
    functional = functionalized_op(node)
    if functional:
        return functional
    return op_name(node.target) or getattr(node.target, "__name__", str(node.target))


def show(stage: str, graph: fx.Graph) -> None:
    """Hand the graph to depyf, which writes it as Python if vLLM's debug_dump_path is set."""
    # By attribute: depyf replaces the function while it records.
    torch._dynamo.utils.lazy_format_graph_code(f"mla_fusion.{stage}", graph.owning_module)  # type: ignore[arg-type]
