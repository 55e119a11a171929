#!/usr/bin/env python3
"""The persistent decode on this GPU against its specification, and the time of a refresh.

    python benchmarks/check_attention.py --csv benchmarks/results/refresh.csv

Inputs are random, and fresh unless --seed says otherwise. Plans must equal those of
`mla_fusion/attention/planner.py` in every element of every buffer, also where a refresh leaves
what an earlier one wrote. Output and LSE of the decode are held against float64 attention; each
kernel is captured once, with its refresh, and replayed for other lengths and other numbers of
query rows. Exits with 1 if a check fails; what a refresh takes is written, not judged.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from checks import expect, finish, poison

from mla_fusion.attention import PersistentDecodePlan, planner
from mla_fusion.attention.buffers import PLANNED
from mla_fusion.cli.bench.decode_peers import (
    BF16,
    FP8,
    TOLERANCE,
    Case,
    Inputs,
    decode,
    exact,
    make,
    make_plan,
)
from mla_fusion.cli.bench.kit import (
    FACTS,
    capture_calls,
    distance,
    environment,
    interleave,
    quantiles,
)

# fp8 products of Hopper sum up in fewer bits than fp32 has: 1e-3 at most in five runs; bf16 3.2e-6.
LSE_TOLERANCE = {BF16: 1e-5, FP8: 2e-3}
LONGEST = 8  # query rows

# What the planner is compiled for: max_batch, heads (16, 32 and 128 are 1, 2 and 8 head blocks
# with queries of up to 8 rows), workers, kv_granularity and overhead.
PLANNERS = [
    (1, 16, 264, 64, 4),
    (1, 128, 132, 16, 16),
    (7, 32, 132, 64, 16),
    (7, 128, 256, 16, 4),
    (64, 128, 264, 64, 4),
    (256, 16, 132, 64, 4),
    (256, 16, 264, 64, 4),
    (256, 32, 256, 16, 16),
]
PLANS = 20  # of each, with a cap on splits and without

# What the decode is compiled for, besides the type: heads, page size, most query rows, and widths
# other than 512 + 64: Mistral-Small-4, MiniCPM3, and some that only the portable kernel takes.
DECODES: list[tuple[int, ...]] = [
    (16, 64, 1), (16, 64, 2), (8, 16, 4), (16, 1, 8), (128, 64, 1), (128, 16, 1),
    (64, 64, 1), (16, 64, 4), (128, 64, 2), (128, 128, 8),
    (16, 64, 1, 256, 64), (32, 64, 2, 256, 64), (8, 16, 4, 256, 64), (128, 128, 8, 256, 64),
    (40, 64, 1, 256, 32), (16, 1, 2, 256, 32),
    (16, 64, 1, 320, 64), (64, 16, 2, 512, 128), (16, 64, 1, 1024, 128),
]  # fmt: skip
BATCH, CONTEXT, REPLAYS = 8, 6000, 8

REFRESH = ["batch", "workers", "max_batch", "p20_us", "p50_us", "p80_us"]
REFRESHES, ROUNDS = 20, 15  # in a graph; replays of it


def ints(values: list[int]) -> torch.Tensor:
    """int32 on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def starts_of(rows: list[int]) -> list[int]:
    """First query row of each sequence, and the end of the last."""
    return list(itertools.accumulate(rows, initial=0))


def refresh(plan: PersistentDecodePlan, rows: list[int], lengths: list[int], longest: int) -> None:
    """Plan sequences of `rows` query rows and `lengths` KV tokens, where the plan is."""
    starts, lens = (ints(values).to(plan.device) for values in (starts_of(rows), lengths))
    plan.refresh(qo_indptr=starts, seq_lens=lens, num_tokens=sum(rows), max_query_len=longest)


def plans(rng: random.Random) -> None:
    """The planner's kernel against the specification, over ragged batches."""
    moved = 0
    for shape in PLANNERS:
        for cap in (-1, 16):
            max_batch, heads, workers, granularity, overhead = shape
            fields: dict[str, Any] = {
                "max_batch": max_batch, "max_query_len": LONGEST, "num_heads": heads,
                "q_dtype": BF16, "kv_dtype": BF16, "workers": workers, "v_head_dim": 8,
                "kv_granularity": granularity, "overhead": overhead, "planner": "portable",
                "max_split_per_batch": cap,
            }  # fmt: skip
            want = PersistentDecodePlan.allocate(**fields, device="cpu")
            got, single = (PersistentDecodePlan.allocate(**fields, device="cuda") for _ in range(2))
            wrong: list[str] = []
            for number in range(PLANS):
                rows, lengths, longest = ragged_batch(rng, max_batch, granularity)
                # Single rows are cut otherwise where the specification moves a cut.
                for plan, most in ((want, longest), (got, longest), (single, 1)):
                    refresh(plan, rows, lengths, most)
                for name in PLANNED:
                    different = int((getattr(want, name) != getattr(got, name).cpu()).sum())
                    if different:
                        wrong.append(
                            f"{different} of {name}, plan {number} ({len(rows)} sequences)"
                        )
                count = int(want.work_indptr[-1])
                ends = (plan.work_info_set[:count, planner.KV_END] for plan in (got, single))
                moved += not torch.equal(*ends)
            detail = f"{PLANS} plans, elements that differ: {'; '.join(wrong[:5]) or 'none'}"
            name = f"planner max_batch={max_batch} fold={want.fold} workers={workers}"
            expect(f"{name} blocks={granularity}+{overhead} cap={cap}", not wrong, detail)
    total = 2 * PLANS * len(PLANNERS)
    expect("planner, moved cuts", moved > total // 20, f"in {moved} of {total} plans")


def ragged_batch(
    rng: random.Random, max_batch: int, granularity: int
) -> tuple[list[int], list[int], int]:
    """Query rows and KV tokens of up to `max_batch` sequences, and the most rows of one."""
    longest, batch = rng.randint(1, LONGEST), rng.randint(1, max_batch)
    rows = [rng.choice((longest, 0, rng.randint(0, longest))) for _ in range(batch)]

    def length(kind: str) -> int:
        if kind == "long":
            return rng.randint(1, 100_000)
        if kind == "few":  # tokens in the last block, which a cut may not leave to a piece
            return granularity * rng.randint(1, 99) + rng.randint(1, 3)
        return rng.randint(0, 64)

    kinds = rng.choice((["long"], ["short"], ["few"], ["long", "short", "short", "few"]))
    return rows, [length(rng.choice(kinds)) for _ in rows], longest


def refresh_times() -> list[dict[str, Any]]:
    """Rows with the time of one refresh of the plans this library allocates for 256 sequences."""
    rows = []
    for dtype in (BF16, FP8):
        plan = make_plan(Case(256, 8192, 16, dtype))
        steps, graphs = {}, {}
        for batch in (1, 32, 128, 256):
            lens = ints(Case(batch, 8192, 16, dtype, ragged=True).lengths())
            # Kept: a graph reads these tensors where they are.
            step = steps[str(batch)] = {
                "qo_indptr": ints(list(range(batch + 1))), "seq_lens": lens,
                "num_tokens": batch, "max_query_len": 1,
            }  # fmt: skip
            graphs[str(batch)] = capture_calls(lambda i, p=plan, s=step: p.refresh(**s), REFRESHES)
        workers = plan.rules.workers
        for name, samples in interleave(graphs, REFRESHES, ROUNDS).items():
            p20, p50, p80 = (f"{us:.4g}" for us in quantiles(samples))
            print(f"     a refresh, {name} sequences, {workers} workers: {p50} us ({p20} to {p80})")
            numbers = (int(name), workers, 256, p20, p50, p80)
            rows.append(dict(zip(REFRESH, numbers, strict=True)))
    return rows


def decodes(rng: random.Random) -> None:
    """Every kernel of `DECODES`: eager with each uniform query length, then replayed."""
    for dtype in (BF16, FP8):
        for heads, page, queries, *widths in DECODES:
            case = Case(BATCH, CONTEXT, heads, dtype, False, queries, page, *widths)
            name = f"decode H={heads} {str(dtype)[6:]} page={page} rows<={queries}"
            name += f" {case.latent}+{case.rope}"
            try:
                run_decode(name, case, rng)
            except Exception:  # noqa: BLE001 (the other kernels are still worth checking)
                expect(name, False, traceback.format_exc(limit=-3))


def run_decode(name: str, case: Case, rng: random.Random) -> None:
    """One kernel against float64 attention."""
    started = time.monotonic()
    inputs, plan = make(case), make_plan(case)
    rows_of_plan = case.batch * case.queries
    starts = ints([0] * (case.batch + 1))
    # Of two calls, as of two layers: the second starts before the first has ended.
    outs = torch.empty(2, rows_of_plan, case.heads, case.latent, device="cuda", dtype=BF16)
    full = inputs.caches[0].clone()
    worst = {"eager": [0.0, 0.0], "replayed": [0.0, 0.0]}
    clean = True

    def step(tokens: int, longest: int) -> list[torch.Tensor]:
        plan.refresh(
            qo_indptr=starts, seq_lens=inputs.lens, num_tokens=tokens, max_query_len=longest
        )
        return [decode(inputs, plan, 0, out[:tokens], return_lse=True) for out in outs]

    def set_batch(rows: list[int], lengths: list[int]) -> None:
        starts.copy_(ints(starts_of(rows)))
        inputs.lens.copy_(ints(lengths))
        inputs.caches[0].copy_(full)
        poison(inputs, lengths)
        outs.fill_(torch.nan)

    def judge(kind: str, lses: list[torch.Tensor], rows: list[int], lengths: list[int]) -> None:
        nonlocal clean
        for out, lse in zip(outs, lses, strict=True):
            errors = distances(inputs, out, lse, starts_of(rows), lengths)
            worst[kind] = torch.tensor([worst[kind], errors]).amax(0).tolist()
        clean &= bool(outs[:, sum(rows) :].isnan().all())

    for longest in range(1, case.queries + 1):
        rows, lengths = [longest] * case.batch, decode_lengths(rng, case)
        set_batch(rows, lengths)
        judge("eager", step(sum(rows), longest), rows, lengths)
    lses: list[torch.Tensor] = []
    # As in a graph of vLLM: for the largest batch, replayed for smaller ones after it.
    set_batch([case.queries] * case.batch, decode_lengths(rng, case))
    graph = capture_calls(lambda i: lses.extend(step(rows_of_plan, case.queries)), 1)
    for _ in range(REPLAYS):
        rows = [rng.choice((case.queries, rng.randint(0, case.queries))) for _ in range(BATCH)]
        lengths = decode_lengths(rng, case)
        rows[-1] = lengths[-1] = 0  # padding
        set_batch(rows, lengths)
        for lse in lses[-2:]:
            lse.fill_(torch.nan)
        graph.replay()
        judge("replayed", lses[-2:], rows, lengths)
    seconds = time.monotonic() - started
    for kind, (error, lse_error) in worst.items():
        ok = error <= TOLERANCE and lse_error <= LSE_TOLERANCE[case.dtype]
        expect(f"{name}, {kind}", ok, f"error {error:.1e}, LSE {lse_error:.1e}; {seconds:.1f} s")
    expect(f"{name}, rows after the batch", clean, "not written" if clean else "written")


def decode_lengths(rng: random.Random, case: Case) -> list[int]:
    """KV tokens of each sequence: some fewer than a query has rows, some in one tile, some long."""
    most = (case.queries, 64, 1000, case.context)
    return [rng.randint(1, most[b % len(most)]) for b in range(case.batch)]


def distances(
    inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, starts: list[int], lengths: list[int]
) -> list[float]:
    """Largest relative distance of a sequence's output, and largest of an LSE; NaN stays NaN."""
    found = [[0.0, 0.0]]
    for b, length in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        if rows.start == rows.stop:
            continue
        want, want_lse = exact(inputs, b, length, rows)
        # Rows that see no key: -inf minus -inf is NaN, and the one right distance of zero.
        moved = torch.where(lse[rows] == want_lse, 0.0, (lse[rows].double() - want_lse).abs())
        found.append([distance(out[rows], want), float(moved.amax())])
    # max() may lose a NaN; torch keeps it.
    return torch.tensor(found).amax(0).tolist()


def main() -> None:
    """Run every check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True, help="rows with the time of a refresh")
    options = parser.parse_args()
    began, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = f"benchmarks/check_attention.py --seed {options.seed}"
    print(facts, flush=True)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    plans(rng)
    print(f"     {time.monotonic() - began:.0f} s")
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + REFRESH)
        writer.writeheader()
        writer.writerows(facts | row for row in refresh_times())
    print(f"     {time.monotonic() - began:.0f} s")
    decodes(rng)
    print(f"     {time.monotonic() - began:.0f} s")
    finish()


if __name__ == "__main__":
    main()
