#!/usr/bin/env python3
"""What items, tiles and pieces of the decode cost, fitted to times of `mla-fusion bench decode`.

    python benchmarks/plan_cost.py --heads 64 --dtype fp8

A time is that of the busiest worker, and of the pieces, which are written and merged:

    us = launch + items * item + tiles * tile + deepest * merge + pieces * piece

items, tiles: of the worker for which they cost most. deepest: pieces of the sequence that has most.
The planner counts an item as `overhead` tiles more (`mla_fusion/attention/planner.py`). So item /
tile says what `overhead` should be, and the fit predicts the times of plans with another one. Needs
no GPU.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from pathlib import Path

import numpy as np
import torch

from mla_fusion.attention import PersistentDecodePlan
from mla_fusion.cli.bench.decode_peers import Case

ROWS = Path(__file__).resolve().parent / "results" / "decode_h200.csv"
OVERHEAD, TILE = 4, 64  # of the plans that were timed, as in triton_choice.plan_settings
NAMES = ("launch", "item", "tile", "merge", "piece")
START = (3.0, 8.0, 1.5, 0.02, 0.05)  # microseconds: which worker is the busiest depends on them


@dataclasses.dataclass(frozen=True)
class Loads:
    """Of a plan. items, tiles: [workers]. deepest, pieces: see above."""

    items: np.ndarray
    tiles: np.ndarray
    deepest: int
    pieces: int

    def terms(self, costs: np.ndarray) -> list[float]:
        """What each of `costs` is multiplied by."""
        busiest = int((self.items * costs[1] + self.tiles * costs[2]).argmax())
        return [1, self.items[busiest], self.tiles[busiest], self.deepest, self.pieces]


def loads(case: Case, overhead: int, workers: int, heads_per_work: int | None) -> Loads:
    """Those of the plan for a shape."""
    bf16 = torch.bfloat16  # a plan is the same for all types
    plan = PersistentDecodePlan.allocate(
        max_batch=case.batch, max_query_len=1, num_heads=case.heads, q_dtype=bf16, kv_dtype=bf16,
        device="cpu", v_head_dim=case.latent, workers=workers, overhead=overhead,
        kv_granularity=TILE, heads_per_work=heads_per_work,
    )  # fmt: skip
    starts = torch.arange(case.batch + 1, dtype=torch.int32)
    lens = torch.tensor(case.lengths(), dtype=torch.int32)
    plan.refresh(qo_indptr=starts, seq_lens=lens, num_tokens=case.batch, max_query_len=1)
    ends, work = plan.work_indptr.numpy(), plan.work_info_set.numpy()
    done = np.r_[0, np.cumsum(-(-(work[:, 5] - work[:, 4]) // TILE))]
    merged = plan.reduce_indptr.numpy()
    return Loads(np.diff(ends), np.diff(done[ends]), int(np.diff(merged).max()), int(merged[-1]))


def fit(timed: list[tuple[Loads, float]]) -> np.ndarray:
    """The costs, by least squares of the relative errors, until the busiest workers stay."""
    costs, times = np.array(START), np.array([us for _, us in timed])
    for _ in range(50):
        terms = np.array([plan.terms(costs) for plan, _ in timed])
        found = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)[0]
        if np.allclose(found, costs, rtol=1e-3):
            break
        costs = (costs + found) / 2
    return costs


def predict(plan: Loads, costs: np.ndarray) -> float:
    """Microseconds of a plan."""
    return float(np.dot(plan.terms(costs), costs))


def read(path: Path, heads: int, dtype: str) -> list[tuple[Case, float]]:
    """Shapes of one query row that have a time of ours, and that time."""
    with path.open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file)
            if (row["heads"], row["queries"], row["dtype"]) == (str(heads), "1", dtype)
            and row["candidate"] == "ours"
        ]  # fmt: skip
    return [(case_of(row), float(row["p50_us"])) for row in rows]


def case_of(row: dict[str, str]) -> Case:
    """The shape of a row."""
    batch, context, heads, ragged = (
        int(row[name]) for name in ("batch", "context", "heads", "ragged")
    )
    return Case(batch, context, heads, torch.bfloat16, bool(ragged))


def main() -> None:
    """Fit, and predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="of mla-fusion bench decode")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp8"), required=True)
    parser.add_argument("--workers", type=int, default=132, help="of the plans that were timed")
    parser.add_argument("--heads-per-work", type=int, help="of the plans that were timed")
    parser.add_argument("--overheads", type=int, nargs="+", default=[2, 3, 5, 6, 7, 8, 10])
    options = parser.parse_args()
    settings = options.workers, options.heads_per_work
    cases = read(options.rows, options.heads, options.dtype)
    if len(cases) <= len(NAMES):
        parser.error(
            f"{options.rows} has {len(cases)} times of {options.heads} heads in {options.dtype}; "
            f"{len(NAMES)} costs need more: see `mla-fusion bench decode --csv`"
        )
    timed = [(loads(case, OVERHEAD, *settings), us) for case, us in cases]
    costs = fit(timed)
    fitted = np.array([predict(plan, costs) for plan, _ in timed])
    off = float(np.sqrt(np.mean((fitted / [us for _, us in timed] - 1) ** 2)))
    print("us: " + ", ".join(f"{n} {c:.3f}" for n, c in zip(NAMES, costs, strict=True)))
    print(f"an item is {costs[1] / costs[2]:.1f} tiles; off by {off:.1%} in root mean square")
    for overhead in options.overheads:
        other = np.array([predict(loads(case, overhead, *settings), costs) for case, _ in cases])
        ratios = other / fitted
        mean = float(np.exp(np.log(ratios).mean()))
        ends = [(ratios[i], cases[i][0]) for i in (ratios.argmin(), ratios.argmax())]
        shapes = ", ".join(
            f"{ratio:.3f} at {case.batch} x {case.context}{' ragged' * case.ragged}"
            for ratio, case in ends
        )
        print(f"overhead {overhead}: {mean:.3f} of the time of {OVERHEAD} in the mean, {shapes}")


if __name__ == "__main__":
    main()
