#!/usr/bin/env python3
"""The specialized decode kernel for Hopper on this GPU: is it right, and is it faster.

    python benchmarks/check_specialized.py --csv OUT.csv

Random batches of bf16 and fp8 are held against float64 attention, eager, and each launch of a batch
against the first one, bit by bit; a case, all batches of a type, and a number of heads and query
rows, is a row of the file. Processes compile all kernels at once before. Then shapes, given as
batch x context, or with x heads x query rows, are timed in turns with the kernel whose warps work
in *step*, and with FlashAttention 3 (bf16) and FlashMLA (its fp8 error is no failure) where vLLM is
installed. Both plans are checked and timed where an item may have two blocks of 64 rows: *pairs*,
half as many workers, so that both run at the same time and share what they read in the L2 cache,
as the provider has it for bf16; and *blocks* one after the other, as it has it for fp8, for 128
heads and one query row items of their own.
All runs in a child process: a kernel that waits for ever is killed after `--seconds` without a
line, and the last line says where. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from checks import expect, finish, poison, where

from mla_fusion.attention import PersistentDecodePlan, triton_choice
from mla_fusion.attention import triton as provider
from mla_fusion.attention.buffers import multiprocessors
from mla_fusion.attention.validate import Inputs as Given
from mla_fusion.attention.validate import validate
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_compile import compile_ahead
from mla_fusion.cli.bench_decode import FACTS, write
from mla_fusion.cli.bench_decode_peers import (
    BF16,
    FP8,
    PAGE,
    PLANNED,
    TOLERANCE,
    UNAVAILABLE,
    Call,
    Candidate,
    Case,
    Inputs,
    exact,
    fa3,
    flashmla,
    make,
    prepare,
)
from mla_fusion.cli.bench_region import interleave, quantiles
from mla_fusion.cli.compare import distance

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPES = {"bf16": BF16, "fp8": FP8}
LSE_TOLERANCES = {BF16: 1e-5, FP8: 2e-3}  # as in check_attention.py
# Heads, query rows, page, whether the plan has pairs, and the type. In CHECKED it has no type, and
# those that may have pairs are checked without them, too.
Checked = tuple[int, int, int, bool, str]
CHECKED = [
    (64, 1, 64, False),
    (128, 1, 64, True),
    (16, 4, 128, False),
    (16, 8, 64, True),
    (8, 4, 64, False),
    (8, 8, 64, False),
    (32, 8, 64, True),
    (40, 1, 128, False),
    (128, 2, 64, True),
]
# Lengths and sequences of a batch.
BATCHES = [("short", 24), ("odd", 40), ("long", 3), ("odd", 200)]
LONGEST = {"short": 129, "odd": 3_000, "long": 40_000}
ROW = ["heads", "queries", "page", "pairs", "dtype", "batches", "launches", "pieces", "error",
       "lse_error", "different", "ok"]  # fmt: skip
TIMED = ["64x8192", "128x8192", "64x65536", "16x8192", "4x1024", "1x1024"]
DRAFTS = ["8x8192x16x4", "64x8192x16x4", "32x1024x16x4", "64x8192x8x8", "64x8192x8x4",
          "64x8192x16x8", "4x1024x16x8"]  # fmt: skip
PEERS: dict[str, Candidate] = {"fa3": fa3, "flashmla": flashmla}


def settings_of(case: Case) -> dict[str, Any]:
    """The provider's settings of a plan for bf16: with pairs where items may have them."""
    return {**provider.plan_settings(case.heads, case.queries, BF16, case.width, "cuda")}


def has_pairs(case: Case) -> bool:
    """Whether items may have two row blocks, both at the same time."""
    return settings_of(case)["workers"] < multiprocessors(torch.device("cuda"))


def plan_of(case: Case, pairs: bool, batch: int) -> PersistentDecodePlan:
    """A plan for `batch` sequences; without `pairs` there is a worker for each multiprocessor, and
    an item holds up to 64 heads.
    """
    settings = settings_of(case)
    if not pairs:
        settings |= {"workers": multiprocessors(torch.device("cuda")), "heads_per_work": None}
    return PersistentDecodePlan.allocate(
        max_batch=batch, max_query_len=case.queries, num_heads=case.heads, q_dtype=case.dtype,
        kv_dtype=case.dtype, device="cuda", v_head_dim=case.latent, **settings,
    )  # fmt: skip


def refresh(plan: PersistentDecodePlan, rows: list[int], lens: torch.Tensor) -> None:
    """Plan sequences of `rows` query rows."""
    starts = torch.tensor([0, *rows], dtype=torch.int32, device="cuda").cumsum(0).int()
    plan.refresh(
        qo_indptr=starts, seq_lens=lens, num_tokens=sum(rows), max_query_len=max(rows, default=0)
    )


def launch(
    inputs: Inputs, plan: PersistentDecodePlan, i: int, out: torch.Tensor, lse: torch.Tensor,
    config: triton_choice.Config,
) -> None:  # fmt: skip
    """One decode of cache `i` by the kernel of `config`."""
    given = Given(
        inputs.q[: len(out)], inputs.caches[i], plan, inputs.table, inputs.case.scale, inputs.scale,
        inputs.scale, out, lse,
    )  # fmt: skip
    validate(given)
    provider.launch(given, config=config)


def outputs(case: Case, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of `rows` query rows, NaN."""
    out = torch.full((rows, case.heads, case.latent), torch.nan, device="cuda", dtype=BF16)
    return out, torch.full((rows, case.heads), torch.nan, device="cuda")


def lengths_of(rng: random.Random, kind: str, batch: int) -> list[int]:
    """KV tokens of each sequence."""
    if kind == "short":
        return rng.choices((0, 1, 2, 63, 64, 65, 127, 128, LONGEST[kind]), k=batch)
    return [rng.randint(1, LONGEST[kind]) for _ in range(batch)]


def batches_of(
    checked: Checked, rng: random.Random
) -> Iterator[tuple[str, Inputs, PersistentDecodePlan, list[int], list[int]]]:
    """The batches of a case, one plan for all, refreshed for each: name, inputs, plan, query rows
    and KV tokens of each sequence.
    """
    heads, queries, page, pairs, dtype = checked
    plan = None
    for kind, batch in BATCHES:
        context = -(-LONGEST[kind] // page) * page
        case = Case(batch, context, heads, TYPES[dtype], False, queries, page)
        plan = plan or plan_of(case, pairs, max(number for _, number in BATCHES))
        inputs, lengths = make(case), lengths_of(rng, kind, batch)
        rows = [rng.choice((queries, rng.randint(1, queries))) for _ in lengths]
        inputs.lens.copy_(torch.tensor(lengths))
        refresh(plan, rows, inputs.lens)
        yield f"{name_of(checked)} {batch} {kind}", inputs, plan, rows, lengths


def cases_of(wanted: list[tuple[int, int, int, bool]], types: list[str]) -> list[Checked]:
    """Cases of some types: without pairs, and with them where there may be."""
    return [
        (heads, queries, page, with_pairs, dtype)
        for dtype in types
        for heads, queries, page, pairs in wanted
        for with_pairs in ((False, True) if pairs else (False,))
    ]


def name_of(checked: Checked) -> str:
    """Of a case, for people."""
    heads, queries, page, pairs, dtype = checked
    return f"{dtype} H={heads} rows<={queries} page={page}{' pairs' if pairs else ''}"


def compile_case(checked: Checked) -> str:
    """Launch each batch of a case once, so that Triton's cache has its kernels; its name."""
    for _, inputs, plan, rows, _ in batches_of(checked, random.Random(0)):
        launch(inputs, plan, 0, *outputs(inputs.case, sum(rows)), triton_choice.SPECIALIZED)
    torch.cuda.synchronize()
    return name_of(checked)


def check(
    cases: list[Checked], rng: random.Random, launches: int, facts: dict[str, str], path: Path,
    apart: bool = False,
) -> None:  # fmt: skip
    """Random batches: short sequences, odd lengths, and few long ones, which are split. apart: no
    kernel starts before the last launch has ended.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FACTS, *ROW])
        writer.writeheader()
        for checked in cases:
            found = [
                check_batch(name, inputs, plan, rows, lengths, launches, apart)
                for name, inputs, plan, rows, lengths in batches_of(checked, rng)
            ]
            # max() may lose a NaN; torch keeps it.
            worst = torch.tensor([each[:2] for each in found]).amax(0).tolist()
            pieces, different, right = (sum(each[i] for each in found) for i in (2, 3, 4))
            of_case = (*checked[:3], int(checked[3]), checked[4], len(found), launches)
            values = (*of_case, pieces, *worst, different, int(right == len(found)))
            write(writer, facts, [dict(zip(ROW, values, strict=True))])
            file.flush()


def check_batch(
    name: str, inputs: Inputs, plan: PersistentDecodePlan, rows: list[int], lengths: list[int],
    times: int, apart: bool,
) -> tuple[float, float, int, int, bool]:  # fmt: skip
    """One batch, so many times: the same plan has the same result, bit by bit. Its errors, of the
    LSE too, its pieces, the launches that differ from the first one, and whether all is right.
    """
    print(f"     {name}", flush=True)
    poison(inputs, lengths)
    launches = [outputs(inputs.case, sum(rows)) for _ in range(times)]
    for out, lse in launches:
        launch(inputs, plan, 0, out, lse, triton_choice.SPECIALIZED)
        if apart:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    pieces, start = int(plan.reduce_indptr[-1]), 0
    (out, lse), errors = launches[0], [[0.0, 0.0]]
    for b, length in enumerate(lengths):
        at = slice(start, start + rows[b])
        start = at.stop
        want, want_lse = exact(inputs, b, length, at)
        moved = torch.where(lse[at] == want_lse, 0.0, (lse[at].double() - want_lse).abs())
        errors.append([distance(out[at], want), float(moved.amax())])
    # max() may lose a NaN; torch keeps it.
    worst, worst_lse = torch.tensor(errors).amax(0).tolist()
    odd = [(i, *each) for i, each in enumerate(launches) if not all(map(same, each, (out, lse)))]
    ok = worst <= TOLERANCE and worst_lse <= LSE_TOLERANCES[inputs.case.dtype] and not odd
    detail = f"error {worst:.1e}, LSE {worst_lse:.1e}, {pieces} pieces"
    expect(name, ok, f"{detail}, {len(odd)} of {times} launches differ from the first")
    for i, each, its_lse in odd:
        print(f"     launch {i}: {where(out != each, lse != its_lse, plan, rows)}", flush=True)
    return worst, worst_lse, pieces, len(odd), ok


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; also where they are NaN."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def ours(inputs: Inputs, specialized: bool, pairs: bool) -> tuple[Call, torch.Tensor]:
    """One of both kernels as a candidate."""
    plan = plan_of(inputs.case, pairs, max(inputs.case.batch, PLANNED))
    rows = plan.heads_per_work * inputs.case.queries
    step = triton_choice.choose(True, rows, inputs.case.latent, inputs.case.rope)
    config = triton_choice.SPECIALIZED if specialized else step
    refresh(plan, [inputs.case.queries] * inputs.case.batch, inputs.lens)
    out, lse = outputs(inputs.case, len(inputs.q))
    return lambda i: launch(inputs, plan, i, out, lse, config), out


CANDIDATES: dict[str, Candidate] = {
    f"{name}, {plan}": functools.partial(
        ours, specialized=name == "specialized", pairs=plan == "pairs"
    )
    for name in ("step", "specialized")
    for plan in ("blocks", "pairs")
} | PEERS
FORMER = "step, blocks"


def shape_of(text: str, dtype: str = "bf16") -> Case:
    """A shape of a type, given as batch x context, of 128 heads, or with x heads x query rows."""
    batch, context, *rest = map(int, text.split("x"))
    heads, queries = rest or (triton_choice.PAIRED_HEADS, 1)
    return Case(batch, context, heads, TYPES[dtype], queries=queries)


def candidates(case: Case) -> dict[str, Candidate]:
    """Those for a shape: with pairs where it may have them; FlashAttention 3 for bf16."""
    paired = has_pairs(case)
    left = {k: build for k, build in CANDIDATES.items() if paired or not k.endswith("pairs")}
    return {k: build for k, build in left.items() if k != "fa3" or case.dtype == BF16}


def compile_shape(case: Case) -> str:
    """Launch ours for short sequences, so that Triton's cache has the kernels of a shape."""
    short = make(dataclasses.replace(case, context=PAGE))
    for kind, build in candidates(case).items():
        if kind not in PEERS:
            build(short)[0](0)
    torch.cuda.synchronize()
    return f"{case.batch} x {case.name}"


def measure(case: Case, rounds: int) -> None:
    """Microseconds of all kernels, the first sample at once, and how far their results are off."""
    name = f"{case.batch} x {case.context} {case.name}"
    print(f"     {name}", flush=True)
    inputs = make(case)
    graphs, errors, kept = {}, {}, {}
    for kind, build in candidates(case).items():
        try:
            graphs[kind], errors[kind], kept[kind] = prepare(inputs, build)
        except UNAVAILABLE as problem:
            if kind not in PEERS:
                raise
            print(f"     {name} {kind} left out: {type(problem).__name__} {str(problem)[:100]}")
            continue
        (us,) = interleave({kind: graphs[kind]}, len(inputs.caches), 1)[kind]
        print(f"     {name} {kind}: {us:.1f} us alone, error {errors[kind]:.1e}", flush=True)
    samples = interleave(graphs, len(inputs.caches), rounds)
    times = {kind: quantiles(values)[1] for kind, values in samples.items()}
    for kind, us in times.items():
        ratios = ", ".join(
            f"{times[other] / us:.2f}x {other}" for other in (FORMER, *PEERS) if other in times
        )
        rate = case.flops() / us / 1e6
        print(f"     {name} {kind}: {us:.1f} us, {rate:.0f} TFLOP/s, {ratios}", flush=True)
    # max() may lose a NaN; torch keeps it.
    judged = [error for kind, error in errors.items() if case.dtype == BF16 or kind not in PEERS]
    worst = float(torch.tensor(judged).max())
    odd = [kind for kind in kept if kind not in PEERS and not replays(graphs[kind], *kept[kind])]
    expect(name, worst <= TOLERANCE and not odd, f"error {worst:.1e}, replayed differently: {odd}")


def replays(graph: torch.cuda.CUDAGraph, call: Call, out: torch.Tensor) -> bool:
    """Whether a replay leaves what an eager call on the last cache does, bit by bit."""
    out.fill_(torch.nan)
    graph.replay()
    replayed = out.clone()
    out.fill_(torch.nan)
    call(-1)
    return same(replayed, out)


def watch(command: list[str], seconds: float) -> int:
    """Run `command`, print what it prints, and kill it after `seconds` of silence."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert child.stdout is not None
    while select.select([child.stdout], [], [], seconds)[0]:
        text = os.read(child.stdout.fileno(), 65536)
        if not text:
            return child.wait()
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
    # And those who compile for it.
    os.killpg(child.pid, signal.SIGKILL)
    print(f"FAIL nothing printed for {seconds:.0f} s: the kernel waits for ever; killed")
    return 1


def main() -> None:
    """Watch a child, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=60, help="of silence before it is killed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("check", "time"), help="one of the two parts")
    heads = sorted({f"{heads}x{rows}" for heads, rows, *_ in CHECKED})
    parser.add_argument("--cases", nargs="+", choices=heads, default=heads, metavar="HxROWS")
    parser.add_argument("--launches", type=int, default=4, help="of each batch that is checked")
    parser.add_argument("--apart", action="store_true", help="no launch before the last has ended")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--shapes", nargs="+", default=TIMED + DRAFTS, metavar="BxN[xHxROWS]")
    parser.add_argument("--budget", type=float, default=30, help="seconds: then no new shape")
    parser.add_argument("--csv", type=Path, default=Path("build/bench/check_specialized.csv"))
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--child", action="store_true", help="run here, unwatched")
    options = parser.parse_args()
    if not options.child:
        print(environment(options.commit), f"--seed {options.seed}", flush=True)
        again = [sys.executable, __file__, "--child", *sys.argv[1:], "--seed", str(options.seed)]
        sys.exit(watch(again, options.seconds))
    torch.manual_seed(options.seed)
    if options.only != "time":
        wanted = [each for each in CHECKED if f"{each[0]}x{each[1]}" in options.cases]
        cases = cases_of(wanted, options.types)
        command = " ".join(["python", *(word for word in sys.argv if word != "--child")])
        known = environment(options.commit) | {"command": command}
        facts = {fact: known[fact] for fact in FACTS}
        compile_ahead(compile_case, cases)
        rng = random.Random(options.seed)
        check(cases, rng, options.launches, facts, options.csv, options.apart)
    if options.only != "check":
        shapes = [shape_of(text, dtype) for text in options.shapes for dtype in options.types]
        compile_ahead(compile_shape, shapes)
        start = time.monotonic()
        for case in shapes:
            if time.monotonic() - start > options.budget:
                print(f"     no time for {case.batch} x {case.context} {case.name}", flush=True)
                continue
            measure(case, options.rounds)
            torch.cuda.empty_cache()
    finish()


if __name__ == "__main__":
    main()
