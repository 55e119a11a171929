"""One report for all ranks of an engine: what fused on the first, and which rank differs."""

import dataclasses
from collections.abc import Sequence

from mla_fusion.report import Report


def merge(reports: Sequence[Report]) -> Report:
    """The report of an engine from those of its ranks, in their order.

    Counts, reasons and the drawn layer are the first rank's. `variants` and the keys of `outputs`
    are those of all ranks. A rank with other counts or reasons, as in another stage of a pipeline,
    is named in `differing`.
    """
    first, *others = reports
    ranges = []
    for r in first.ranges:
        same = [o for report in others for o in report.ranges if o.range == r.range]
        variants = dict.fromkeys(v for each in (r, *same) for v in each.variants)
        kinds = dict.fromkeys((kind for each in same for kind in each.outputs), 0)
        outputs = {**kinds, **r.outputs}
        ranges.append(dataclasses.replace(r, variants=list(variants), outputs=outputs))
    differing = [
        f"rank {rank}: {_counts(other)}"
        for rank, other in enumerate(others, 1)
        if _counts(other) != _counts(first)
    ]
    return dataclasses.replace(first, ranges=ranges, ranks=len(reports), differing=differing)


def _counts(report: Report) -> str:
    found = [
        f"{r.fused} of {r.layers} fused in decode range {r.range}"
        + "".join(f", {layers} [{d.code}]" for d, layers in r.declined.items())
        for r in report.decode_ranges()
    ]
    return "; ".join(found) or "no MLA layer in a graph"
