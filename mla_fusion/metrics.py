"""How many forward passes ran fused: `snapshot` in Python, `mla_fusion_steps_total` in Prometheus.

Counted where vLLM prepares the attention metadata, which happens in Python in every forward pass
and once for each group of layers with the same metadata (a KV-cache group). The fused op itself is
no place to count: a replayed CUDA graph runs no Python. Nothing is read from the device.

A pass is fused if it was decode-only, as `runtime.is_decode_only` tells the ops too, and its token
count, padded to the next CUDA graph, lies in a compile range in which layers fused. Passes of a
draft model count like any other; the engine's warm-up does not.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_fusion.runtime import is_decode_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mla_fusion.report import Report

_NAME = "mla_fusion_steps"
_HELP = "Forward passes of a group of MLA layers, fused or as vLLM runs them (mla-fusion)."
_PATHS = ("fused", "unfused")


@dataclass
class _Group:
    """The counts of one group of layers, and what exports them."""

    counts: list[int]  # in the order of _PATHS
    exported: list[Any]


_groups: dict[str, _Group] = {}
_ranges: list[tuple[int, int]] = []
_capture_sizes: list[int] = []
_rank = 0
_counter: Any = None
_started = False


def start(report: Report | None, capture_sizes: Sequence[int], rank: int) -> None:
    """Forget all counts and count from now on: the engine's warm-up is over.

    Args:
        report: what fused in which range; None if nothing did.
        capture_sizes: the token counts of CUDA graphs, empty without them.
        rank: of this worker; the label "rank" of the exported metric.
    """
    global _rank, _started
    _groups.clear()
    _ranges[:] = [r.range for r in report.decode_ranges() if r.fused] if report else []
    _capture_sizes[:] = sorted(capture_sizes)
    _rank, _started = rank, True


def count(group: str, metadata: Any) -> None:
    """Count one forward pass of the layers whose first is `group`."""
    if not _started:
        return
    found = _groups.get(group) or _add(group)
    path = 0 if is_decode_only(metadata) and _in_fused_range(metadata.num_actual_tokens) else 1
    found.counts[path] += 1
    found.exported[path].inc()


def snapshot() -> dict[str, dict[str, int]]:
    """{first layer of a group: {"fused": passes, "unfused": passes}} of this process.

    The workers of a vLLM engine are other processes as a rule: ask them with
    `llm.collective_rpc("mla_fusion_steps")`, which gives one such dictionary for each rank.
    """
    return {name: dict(zip(_PATHS, group.counts, strict=True)) for name, group in _groups.items()}


def _in_fused_range(tokens: int) -> bool:
    larger = bisect_left(_capture_sizes, tokens)
    padded = _capture_sizes[larger] if larger < len(_capture_sizes) else tokens
    return any(first <= padded <= last for first, last in _ranges)


def _add(name: str) -> _Group:
    """A new group. vLLM brings prometheus_client, and imports it in every process."""
    global _counter
    if _counter is None:
        from prometheus_client import Counter

        _counter = Counter(_NAME, _HELP, ("group", "path", "rank"))
    exported = [_counter.labels(name, path, str(_rank)) for path in _PATHS]
    return _groups.setdefault(name, _Group([0, 0], exported))
