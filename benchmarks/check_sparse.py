#!/usr/bin/env python3
"""The sparse decode on an H200 against float64 attention, in random cases and in a CUDA graph.

    python benchmarks/check_sparse.py --csv benchmarks/results/check_sparse.csv

Random cases: bf16, fp8 and both byte caches, one and two scopes, 1 to 128 heads, 1 to 32 query
rows; lengths of 0, slots of -1, repeated slots, scopes without keys, sinks. Every row of a cache
that no token lists is NaN. Processes share the cases, because each variant compiles its kernels.
With a query in fp8 the scores are not float64 but what `hopper_fp8.py` says of the tensor core.

Graph: refresh and 61 layers, captured once and replayed with other slots and lengths in place. A
replay may allocate nothing and move nothing; some are checked.

With --plant each case reads one slot that no token lists, and each must be found. Exits with 1 if
a check fails.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from checks import expect, finish
from sparse_cases import (
    DEVICE,
    ENTRIES,
    KINDS,
    KV_SCALE,
    LATENT,
    Q_SCALE,
    TOKENS,
    USABLE,
    Bank,
    Case,
    Kind,
    Variant,
    apart,
    exact,
    make_bank,
    make_case,
)

from mla_fusion.attention.sparse import Scope, SparseScratch, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_decode import FACTS, write
from mla_fusion.cli.bench_decode_peers import BF16, FP8, TOLERANCE
from mla_fusion.cli.bench_region import capture_calls

LAYERS, CHECKED = 61, (0, 30, 60)
RESULT = ["what", "cases", "tokens", "without_keys", "wrong", "error", "lse_error", "seconds"]
SHAPES = [(8, 1), (16, 2), (64, 1), (128, 2)]
VARIANTS = [
    *[Variant("fp8_ds_mla", heads) for heads in (1, 8, 16, 20, 64, 128)],
    *[Variant("fp8_ds_mla", heads, sink=False) for heads in (8, 16, 64, 128)],
    *[Variant("fp8_ds_mla", heads, 2) for heads in (16, 128)],
    *[Variant(kind, *shape) for kind in ("bf16", "fp8", "fp8_ds_mla of V4") for shape in SHAPES],
    Variant("bf16 over fp8", 16),
]  # fmt: skip


@functools.cache
def scratch_of(variant: Variant, widths: tuple[int, ...]) -> SparseScratch:
    """The scratch of a variant."""
    kind = KINDS[variant.kind]
    return sparse_scratch(
        max_tokens=TOKENS, num_heads=variant.heads, widths=widths, q_dtype=kind.q,
        kv_dtype=kind.kv, device=DEVICE,
    )  # fmt: skip


def fp8_scales(kind: Kind) -> dict[str, torch.Tensor]:
    """Keywords of a decode over fp8 with one scale."""
    scales = {"q_scale": Q_SCALE} if kind.q == FP8 else {}
    if kind.kv == FP8 and kind.layout is None:
        scales |= {"kv_scale": KV_SCALE}
    return {name: torch.full((1,), value, device=DEVICE) for name, value in scales.items()}


def decode(
    variant: Variant, case: Case, banks: list[Bank], scale: float, plant: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this library. plant: a column of the first token names a slot of NaN."""
    kind, scopes = KINDS[variant.kind], []
    for scope, (bank, table) in enumerate(zip(banks, case.tables, strict=True)):
        used = torch.zeros(ENTRIES, dtype=torch.bool, device=DEVICE)
        used[table[case.listed(scope)].long()] = True
        scopes.append(Scope(bank.cache(used), table, kind.layout))
    lengths = case.lengths
    if plant:
        scopes[0].table[0, 0] = USABLE
        if lengths[0] is not None:
            lengths[0][0].clamp_(min=1)
    scratch = scratch_of(variant, tuple(table.shape[1] for table in case.tables))
    scratch.plan.partial_output.fill_(torch.nan)
    scratch.plan.partial_lse.fill_(torch.nan)
    scratch.refresh(len(case.q), lengths)
    out = torch.full((*case.q.shape[:2], LATENT), torch.nan, device=DEVICE, dtype=BF16)
    out, lse = sparse_mla_decode(
        case.q, scopes, scratch, softmax_scale=scale, sink=case.sink, out=out, return_lse=True,
        **fp8_scales(kind),
    )  # fmt: skip
    assert lse is not None
    return out, lse


def check(variant: Variant, cases: int, seed: int, plant: bool) -> dict[str, Any]:
    """A row of random cases of a variant; `first` describes the first wrong one."""
    began, kind, rng = time.monotonic(), KINDS[variant.kind], random.Random(seed)
    torch.manual_seed(seed)
    banks = [make_bank(kind) for _ in range(variant.scopes)]
    row: dict[str, Any] = dict.fromkeys(RESULT[1:], 0) | {"what": variant.kind, "first": ""}
    worst = torch.zeros(2)
    for number in range(cases):
        case = make_case(variant, rng)
        scale = case.q.shape[2] ** -0.5
        want = exact(variant, case, banks, scale)
        errors = apart(*decode(variant, case, banks, scale, plant), *want)
        # max() may lose a NaN; torch keeps it.
        worst = torch.maximum(worst, torch.tensor(errors))
        limits = TOLERANCE, kind.lse * max(1.0, case.amplitude)
        right = all(error <= limit for error, limit in zip(errors, limits, strict=True))
        row["cases"] += 1
        row["tokens"] += len(case.q)
        row["without_keys"] += int((want[1][:, 0] == -math.inf).sum())
        row["wrong"] += not right
        if right == plant and not row["first"]:
            widths = [table.shape[1] for table in case.tables]
            row["first"] = f"case {number}: {len(case.q)} tokens, widths {widths}, off by {errors}"
    row["error"], row["lse_error"] = worst.tolist()
    return row | {"seconds": time.monotonic() - began}


def replayed(name: str, replays: int, seed: int) -> dict[str, Any]:
    """A row of one graph of 61 layers, replayed with other slots and lengths."""
    began = time.monotonic()
    torch.manual_seed(seed)
    variant, width = Variant(name, 16, sink=False), 2048
    kind, bank = KINDS[name], make_bank(KINDS[name])
    used = torch.arange(ENTRIES, device=DEVICE) < USABLE
    caches = []
    for layer in range(LAYERS):
        turned = [part[:USABLE].roll(layer, 0) for part in bank.parts]
        parts = [torch.cat((t, part[USABLE:])) for t, part in zip(turned, bank.parts, strict=True)]
        caches.append(Bank(kind, parts, bank.keys).cache(used))
    scale = bank.keys.shape[1] ** -0.5
    q = torch.randn(LAYERS, TOKENS, 16, bank.keys.shape[1], device=DEVICE).to(BF16)
    slots = torch.zeros(LAYERS, TOKENS, width, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(TOKENS, dtype=torch.int32, device=DEVICE)
    out = torch.empty(LAYERS, TOKENS, 16, LATENT, device=DEVICE, dtype=BF16)
    scratch = scratch_of(variant, (width,))

    def layer_of(i: int) -> None:
        if i == 0:
            scratch.refresh(TOKENS, [lengths])
        scopes = [Scope(caches[i], slots[i], kind.layout)]
        sparse_mla_decode(q[i], scopes, scratch, softmax_scale=scale, out=out[i])

    graph = capture_calls(layer_of, LAYERS)
    held = [*scratch.plan.tensors().values(), slots, lengths, out]
    addresses = [tensor.data_ptr() for tensor in held]
    worst, allocated, checked, rng = 0.0, 0, 0, random.Random(seed)
    for replay in range(replays):
        before = allocations()
        slots.random_(-400, USABLE).clamp_(min=-1)
        lengths.random_(-200, width + 1).clamp_(min=0)
        graph.replay()
        allocated += allocations() - before
        if replay % 40 and replay < replays - 1:
            continue
        for layer in (*CHECKED, rng.randrange(LAYERS)):
            turned = [Bank(kind, bank.parts, bank.keys[:USABLE].roll(layer, 0))]
            case = Case(q[layer], 1.0, [slots[layer]], [lengths], None)
            want, lse = exact(variant, case, turned, scale)
            error, _ = apart(out[layer], lse, want, lse)
            worst = float(torch.tensor([worst, error]).max())
            checked += 1
    moved = addresses != [tensor.data_ptr() for tensor in held]
    expect(f"{name}: {replays} replays of {LAYERS} layers", not (allocated or moved),
           f"{allocated} allocations, addresses {'moved' if moved else 'as before'}")  # fmt: skip
    row = dict.fromkeys(RESULT, 0) | {"what": f"{name}, {replays} replays", "cases": checked}
    row |= {"tokens": checked * TOKENS, "wrong": int(not worst <= TOLERANCE), "error": worst}
    return row | {"seconds": time.monotonic() - began}


def allocations() -> int:
    """Blocks that torch has given out so far, and segments that it took for them."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"] + stats["segment.all.allocated"]


def judge(name: str, row: dict[str, Any], plant: bool = False) -> None:
    """Print a row, and count it as a failure unless all is right, or with `plant` all is wrong."""
    ok = row["wrong"] == (row["cases"] if plant else 0)
    expect(name, ok, f"{row['wrong']} of {row['cases']} cases wrong, {row['tokens']} tokens, "
           f"{row['without_keys']} without keys, error {row['error']:.1e}, LSE "
           f"{row['lse_error']:.1e}, {row['seconds']:.0f} s {row.get('first', '')}")  # fmt: skip


def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of a kind."""
    worst = torch.tensor([[row["error"], row["lse_error"]] for row in rows]).amax(0).tolist()
    added = {name: sum(row[name] for row in rows) for name in RESULT[1:]}
    return added | {"what": rows[0]["what"], "error": worst[0], "lse_error": worst[1]}


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="random cases, of all variants")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--plant", action="store_true", help="read a slot that no token lists")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True, help="one row for each kind of cache")
    options = parser.parse_args()
    known = environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = " ".join(["benchmarks/check_sparse.py", *sys.argv[1:]])
    print(facts, f"--seed {options.seed}", flush=True)
    each, by_kind = math.ceil(options.cases / len(VARIANTS)), {name: [] for name in KINDS}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        work = [(variant, pool.submit(check, variant, each, options.seed + i, options.plant))
                for i, variant in enumerate(VARIANTS)]  # fmt: skip
        for variant, future in work:
            # A fault of the GPU ends a process; the rest is still judged.
            if (problem := future.exception()) is not None:
                expect(str(variant), False, f"{type(problem).__name__} {problem}")
                continue
            judge(str(variant), future.result(), options.plant)
            by_kind[variant.kind].append(future.result())
    rows = [together(rows) for rows in by_kind.values() if rows]
    if not options.plant:
        for name in ("bf16", "fp8_ds_mla"):
            rows.append(replayed(name, options.replays, options.seed))
            judge(rows[-1]["what"], rows[-1])
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + RESULT)
        writer.writeheader()
        write(writer, facts, rows)
    finish()


if __name__ == "__main__":
    main()
