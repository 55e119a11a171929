"""How many forward passes ran fused: `mla_fusion_steps` in Python, `mla_fusion_steps_total` in
Prometheus.

vLLM's workers are usually other processes: `llm.collective_rpc("mla_fusion_steps")` asks them, and
returns one `StepCounter.snapshot` for each rank.

Passes are counted where vLLM builds the attention metadata in Python, once for each group of layers
that share it (a KV-cache group): the fused op cannot, since a replayed CUDA graph runs no Python.
So a draft pass that reuses metadata (vLLM's V2 model runner, backends with
`update_draft_decode_metadata`) is not counted. Nothing is read from the device.

A pass is fused if `runtime.is_decode_only` says so and its token count, padded to the next CUDA
graph, is in a compile range in which layers fused. Draft passes count, the warm-up does not.
"""

import functools
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from mla_fusion.report import Report
from mla_fusion.runtime import is_decode_only

_HELP = (
    "Forward passes of a group of MLA layers, fused or as vLLM runs them; draft passes that reuse "
    "attention metadata are not counted (mla-fusion)."
)
_PATHS = ("fused", "unfused")


class StepCounter:
    """The counts of one worker. Nothing is counted before `start`, so the warm-up is not."""

    def __init__(self, rank: int) -> None:
        self._rank = rank  # the label of the exported metric
        self._started = False
        self._ranges: list[tuple[int, int]] = []
        self._capture_sizes: list[int] = []
        self._counts: dict[str, list[int]] = {}  # in the order of _PATHS

    def start(self, report: Report | None, capture_sizes: Sequence[int]) -> None:
        """Forget all counts and count from now on, by what fused in which range (`report`, None if
        nothing did) and the token counts of CUDA graphs."""
        self._counts.clear()
        self._ranges = [r.range for r in report.decode_ranges() if r.fused] if report else []
        self._capture_sizes = sorted(capture_sizes)
        self._started = True

    def count(self, group: str, metadata: Any) -> None:
        """Count one forward pass of the layers whose first is `group`."""
        if not self._started:
            return
        tokens = metadata.num_actual_tokens
        path = 0 if is_decode_only(metadata) and self._in_fused_range(tokens) else 1
        self._counts.setdefault(group, [0, 0])[path] += 1
        _exported().labels(group, _PATHS[path], str(self._rank)).inc()

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{first layer of a group: {"fused": passes, "unfused": passes}}."""
        return {name: dict(zip(_PATHS, n, strict=True)) for name, n in self._counts.items()}

    def _in_fused_range(self, tokens: int) -> bool:
        sizes = self._capture_sizes
        larger = bisect_left(sizes, tokens)
        padded = sizes[larger] if larger < len(sizes) else tokens
        return any(first <= padded <= last for first, last in self._ranges)


@functools.cache
def _exported() -> Any:
    """The counter of vLLM's endpoint; vLLM brings prometheus_client, and imports it everywhere."""
    from prometheus_client import Counter

    return Counter("mla_fusion_steps", _HELP, ("group", "path", "rank"))
