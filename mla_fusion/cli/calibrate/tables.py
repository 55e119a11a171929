"""Rows of `mla-fusion bench decode` as the files that `attention=auto` reads."""

from collections.abc import Iterable, Mapping
from typing import Any

from mla_fusion.cli.bench.decode import OURS, TYPES
from mla_fusion.measure.timing import TIMES
from mla_fusion.runtime import measured

BACKENDS = {"fa3": "FLASH_ATTN_MLA", "flashmla": "FLASHMLA", "triton_mla": "TRITON_MLA",
            "flashinfer_mla": "FLASHINFER_MLA", "flashmla_sparse": "FLASHMLA_SPARSE",
            "fa3_sparse": "FLASH_ATTN_MLA_SPARSE"}  # fmt: skip
FACTS = "vllm", "triton", "commit", "command"


def tables(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The content of each file, by its name: ours against each peer that was timed beside it."""
    steps: dict[tuple[Any, ...], dict[tuple[int, ...], dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        shape = row["gpu"], row["dtype"], *(int(row[k]) for k in ("heads", "queries", "values"))
        step = int(row["batch"]), int(row["context"]), int(row["ragged"])
        steps.setdefault(shape, {}).setdefault(step, {})[row["candidate"]] = row
    found: dict[str, dict[str, Any]] = {}
    for (gpu, dtype, heads, queries, values), us_of in sorted(steps.items()):
        table = found.setdefault(measured.file_name(gpu), {"gpu": gpu, "shapes": []})
        for peer, backend in BACKENDS.items():
            pairs = {step: (us[OURS], us[peer]) for step, us in sorted(us_of.items())
                     if OURS in us and peer in us}  # fmt: skip
            if not pairs:
                continue
            ours, _ = next(iter(pairs.values()))
            table["shapes"].append({
                "dtype": str(TYPES[dtype])[6:] if dtype in TYPES else dtype,
                "heads": heads, "queries": queries, "backend": backend, "values": values,
                **{name: ours[name] for name in FACTS},
                "rows": [_row(step, pair) for step, pair in pairs.items()],
            })  # fmt: skip
    return found


def _row(step: tuple[int, ...], pair: Iterable[Mapping[str, Any]]) -> measured.Row:
    """Both times of a step, in four digits."""
    times = [float(f"{float(timed[name]):.4g}") for timed in pair for name in TIMES]
    return measured.Row._make([*step, *times])
