"""Number of forward passes that ran fused: `mla_fusion_steps_total` in Prometheus, and
`llm.collective_rpc("mla_fusion_steps")`, one `StepCounter.snapshot` for each rank.

Passes are counted where vLLM builds the attention metadata in Python, once for each group of layers
that share it (a KV-cache group): a replayed CUDA graph runs none. So a draft pass that reuses
metadata (vLLM's V2 model runner, backends with `update_draft_decode_metadata`) is not counted.

A pass is fused if it is decode-only and its token count, padded to the next CUDA graph, is in a
compile range in which layers fused. Draft passes count, the warm-up does not.
"""

import functools
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
    """The counts of one worker, made when it has warmed up.

    rank: the label of the exported metric. report: what fused in which range, None if nothing did.
    capture_sizes: the token counts of CUDA graphs.
    """

    def __init__(self, rank: int, report: Report | None, capture_sizes: Sequence[int]) -> None:
        self._rank, self._capture_sizes = rank, capture_sizes
        self._ranges = [r.range for r in report.decode_ranges() if r.fused] if report else []
        self._counts: dict[str, list[int]] = {}  # in the order of _PATHS

    def count(self, group: str, metadata: Any) -> None:
        """Count one forward pass of the layers whose first is `group`."""
        tokens = metadata.num_actual_tokens
        padded = min((n for n in self._capture_sizes if n >= tokens), default=tokens)
        in_range = any(first <= padded <= last for first, last in self._ranges)
        path = 0 if in_range and is_decode_only(metadata) else 1
        self._counts.setdefault(group, [0, 0])[path] += 1
        _exported().labels(group, _PATHS[path], str(self._rank)).inc()

    def snapshot(self) -> dict[str, dict[str, int]]:
        """{first layer of a group: {"fused": passes, "unfused": passes}}."""
        return {name: dict(zip(_PATHS, n, strict=True)) for name, n in self._counts.items()}


@functools.cache
def _exported() -> Any:
    """The counter of vLLM's endpoint; vLLM brings prometheus_client, and imports it everywhere."""
    from prometheus_client import Counter

    return Counter("mla_fusion_steps", _HELP, ("group", "path", "rank"))
