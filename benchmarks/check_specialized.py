#!/usr/bin/env python3
"""The specialized decode kernel for Hopper on this GPU: is it right, and is it faster.

    python benchmarks/check_specialized.py --seconds 30

Random batches of bf16 and fp8 are held against float64 attention, eager. Then shapes, given as
batch x context, or with x heads x query rows, are timed in turns with the kernel whose warps work
in *step*, and with FlashAttention 3 (bf16) and FlashMLA where vLLM is installed. FlashMLA's fp8
error is printed, and no failure. Both plans are timed for 128 heads and one query row: *blocks* of
64 heads as items of their own, and *pairs*, items of all heads whose two row blocks run at the same
time and share what they read in the L2 cache. The provider chooses pairs for bf16.
All runs in a child process: a kernel that waits for ever is killed after `--seconds` without a
line, and the last line says where. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import select
import subprocess
import sys
import time
from typing import Any

import torch
from checks import expect, finish, poison

from mla_fusion.attention import PersistentDecodePlan, triton_choice
from mla_fusion.attention import triton as provider
from mla_fusion.attention.buffers import multiprocessors
from mla_fusion.attention.validate import Inputs as Given
from mla_fusion.attention.validate import validate
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_decode_peers import (
    BF16,
    FP8,
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

STEP = triton_choice.choose(True, 64, 512, 64)
# As in check_attention.py: fp8 products of Hopper sum up in fewer bits than fp32 has.
LSE_TOLERANCES = {BF16: 1e-5, FP8: 2e-3}
# Heads, query rows, page, and whether the plan pairs row blocks.
CHECKED = [
    (64, 1, 64, False),
    (128, 1, 64, False),
    (128, 1, 64, True),
    (16, 4, 128, False),
    (16, 8, 64, False),
    (8, 4, 64, False),
    (8, 8, 64, False),
    (32, 8, 64, False),
    (40, 1, 128, False),
    (128, 2, 64, False),
]
TYPES = {"bf16": BF16, "fp8": FP8}
TIMED = ["64x8192", "128x8192", "64x65536", "16x8192", "4x1024", "1x1024"]
DRAFTS = ["8x8192x16x4", "64x8192x16x4", "32x1024x16x4", "64x8192x8x8"]
PEERS: dict[str, Candidate] = {"fa3": fa3, "flashmla": flashmla}


def plan_of(case: Case, pairs: bool) -> PersistentDecodePlan:
    """A plan with the provider's settings; without `pairs` an item holds up to 64 heads."""
    settings: dict[str, Any] = provider.plan_settings(
        case.heads, case.queries, case.dtype, case.width, "cuda"
    )
    processors = multiprocessors(torch.device("cuda"))
    if pairs:
        settings |= {"workers": processors // 2, "heads_per_work": triton_choice.PAIRED_HEADS}
    else:
        settings |= {"workers": processors, "heads_per_work": None}
    return PersistentDecodePlan.allocate(
        max_batch=case.batch, max_query_len=case.queries, num_heads=case.heads, q_dtype=case.dtype,
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
    choices = {
        "short": lambda: rng.choice((0, 1, 2, 63, 64, 65, 127, 128, 129)),
        "odd": lambda: rng.randint(1, 3000),
        "long": lambda: rng.randint(1, 40_000),
    }
    return [choices[kind]() for _ in range(batch)]


def check(rng: random.Random, dtype: str, cases: list[str], launches: int) -> None:
    """Random batches: short sequences, odd lengths, and few long ones, which are split."""
    for heads, queries, page, pairs in CHECKED:
        if f"{heads}x{queries}" not in cases:
            continue
        for kind, batch in (("short", 24), ("odd", 40), ("long", 3), ("odd", 200)):
            context = 40_064 if kind == "long" else 3_072
            case = Case(batch, context, heads, TYPES[dtype], False, queries, page)
            name = f"{dtype} H={heads} rows<={queries} page={page}{' pairs' if pairs else ''}"
            lengths = lengths_of(rng, kind, batch)
            check_case(f"{name} {batch} {kind}", case, pairs, lengths, rng, launches)


def check_case(
    name: str, case: Case, pairs: bool, lengths: list[int], rng: random.Random, times: int
) -> None:
    """One batch, so many times: the same plan has the same result, bit by bit."""
    print(f"     {name}", flush=True)
    rows = [rng.choice((case.queries, rng.randint(1, case.queries))) for _ in lengths]
    inputs, plan = make(case), plan_of(case, pairs)
    inputs.lens.copy_(torch.tensor(lengths))
    poison(inputs, lengths)
    refresh(plan, rows, inputs.lens)
    launches = [outputs(case, sum(rows)) for _ in range(times)]
    for out, lse in launches:
        launch(inputs, plan, 0, out, lse, triton_choice.SPECIALIZED)
    torch.cuda.synchronize()
    wanted, start = [], 0
    for b, length in enumerate(lengths):
        at = slice(start, start + rows[b])
        start = at.stop
        wanted.append((at, *exact(inputs, b, length, at)))
    pieces = int(plan.reduce_indptr[-1])
    out, lse = launches[0]
    errors = [[0.0, 0.0]]
    for at, want, want_lse in wanted:
        moved = torch.where(lse[at] == want_lse, 0.0, (lse[at].double() - want_lse).abs())
        errors.append([distance(out[at], want), float(moved.amax())])
    # max() may lose a NaN; torch keeps it.
    worst, worst_lse = torch.tensor(errors).amax(0).tolist()
    same = all(torch.equal(out, each) and torch.equal(lse, at) for each, at in launches[1:])
    ok = worst <= TOLERANCE and worst_lse <= LSE_TOLERANCES[case.dtype] and same
    detail = f"error {worst:.1e}, LSE {worst_lse:.1e}, {pieces} pieces"
    expect(name, ok, f"{detail}, again {'same' if same else 'different'}")


def ours(inputs: Inputs, config: triton_choice.Config, pairs: bool) -> tuple[Call, torch.Tensor]:
    """The kernel of `config` as a candidate."""
    plan = plan_of(inputs.case, pairs)
    refresh(plan, [inputs.case.queries] * inputs.case.batch, inputs.lens)
    out, lse = outputs(inputs.case, len(inputs.q))
    return lambda i: launch(inputs, plan, i, out, lse, config), out


CANDIDATES: dict[str, Candidate] = {
    f"{name}, {plan}": functools.partial(ours, config=config, pairs=plan == "pairs")
    for name, config in (("step", STEP), ("specialized", triton_choice.SPECIALIZED))
    for plan in ("blocks", "pairs")
} | PEERS
FORMER = "step, blocks"


def measure(case: Case, rounds: int) -> None:
    """Microseconds of all kernels, the first sample at once, and how far their results are off."""
    fp8 = case.dtype == FP8
    name = f"{'fp8' if fp8 else 'bf16'} {case.batch} x {case.context}"
    if (case.heads, case.queries) != (128, 1):
        name += f", {case.heads} heads x {case.queries} rows"
    print(f"     {name}", flush=True)
    inputs = make(case)
    graphs, errors, kept = {}, {}, {}
    for kind, build in CANDIDATES.items():
        paired = (case.heads, case.queries) == (triton_choice.PAIRED_HEADS, 1)
        if (kind == "fa3" and fp8) or (kind.endswith("pairs") and not paired):
            continue
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
    judged = [error for kind, error in errors.items() if not fp8 or kind not in PEERS]
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
    return torch.equal(replayed, out)


def watch(command: list[str], seconds: float) -> int:
    """Run `command`, print what it prints, and kill it after `seconds` of silence."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    while select.select([child.stdout], [], [], seconds)[0]:
        text = os.read(child.stdout.fileno(), 65536)
        if not text:
            return child.wait()
        sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()
    child.kill()
    print(f"FAIL nothing printed for {seconds:.0f} s: the kernel waits for ever; killed")
    return 1


def main() -> None:
    """Watch a child, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--seconds", type=float, default=30, help="of silence before it is killed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("check", "time"), help="one of the two parts")
    heads = sorted({f"{heads}x{rows}" for heads, rows, *_ in CHECKED})
    parser.add_argument("--cases", nargs="+", choices=heads, default=heads, metavar="HxROWS")
    parser.add_argument("--launches", type=int, default=4, help="of each batch that is checked")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--shapes", nargs="+", default=TIMED + DRAFTS, metavar="BxN[xHxROWS]")
    parser.add_argument("--budget", type=float, default=30, help="seconds: then no new shape")
    parser.add_argument("--child", action="store_true", help="run here, unwatched")
    options = parser.parse_args()
    if not options.child:
        print(environment(""), f"--seed {options.seed}", flush=True)
        again = [sys.executable, __file__, "--child", *sys.argv[1:], "--seed", str(options.seed)]
        sys.exit(watch(again, options.seconds))
    torch.manual_seed(options.seed)
    if options.only != "time":
        for dtype in options.types:
            check(random.Random(options.seed), dtype, options.cases, options.launches)
    if options.only != "check":
        start = time.monotonic()
        for shape, dtype in itertools.product(options.shapes, options.types):
            if time.monotonic() - start > options.budget:
                print(f"     no time for {dtype} {shape}", flush=True)
                continue
            batch, context, *rest = map(int, shape.split("x"))
            heads, queries = rest or (triton_choice.PAIRED_HEADS, 1)
            measure(Case(batch, context, heads, TYPES[dtype], queries=queries), options.rounds)
            torch.cuda.empty_cache()
    finish()


if __name__ == "__main__":
    main()
