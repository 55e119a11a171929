#!/usr/bin/env python3
"""Decode attention on this GPU beside what `mla-fusion bench decode` measures.

    python benchmarks/attention.py --csv benchmarks/results/attention.csv

First a captured plan and decode, dense and sparse, are replayed with other lengths and held against
float64 attention. Then rows in a CSV file: a cap on splits for few long sequences and, for widths
whose number of programs a multiprocessor was not measured, the shapes of `mla-fusion bench decode`
with other numbers. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from pathlib import Path

import torch

from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench import decode as bench_decode
from mla_fusion.cli.bench.decode import DEFAULTS, TYPES
from mla_fusion.cli.bench.decode_peers import (
    BF16,
    FP8,
    PAGE,
    TOLERANCE,
    Case,
    decode,
    error,
    make,
    make_plan,
    ours,
)
from mla_fusion.cli.bench.kit import (
    capture_calls,
    distance,
    environment,
    interleave,
    measure_ceilings,
    quantiles,
)

CAPPED = {"ours": ours, "ours, 16 splits": functools.partial(ours, cap=16)}
PROGRAMS = {f"ours, {n} a processor": functools.partial(ours, programs=n) for n in (1, 2, 3)}


def replayed(dtype: torch.dtype, latent: int, rope: int) -> None:
    """One capture of refresh and decode, replayed with other lengths."""
    case = Case(16, 4096, 16, dtype, latent=latent, rope=rope)
    inputs, worst = make(case), 0.0
    plan, out = make_plan(case), torch.empty(16, 16, latent, device="cuda", dtype=BF16)
    rows = torch.arange(17, dtype=torch.int32, device="cuda")

    def step(i: int) -> None:
        plan.refresh(qo_indptr=rows, seq_lens=inputs.lens, num_tokens=16, max_query_len=1)
        decode(inputs, plan, 0, out)

    graph = capture_calls(step, 1)
    for seed in range(6):
        lengths = [random.Random(seed * 16 + b).randint(1, 4096) for b in range(16)]
        inputs.lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        worst = max(worst, error(inputs, out, lengths))
    print(f"replayed with other lengths, {dtype}: error {worst:.1e}", flush=True)
    assert worst <= TOLERANCE


def replayed_sparse(dtype: torch.dtype, latent: int, rope: int) -> None:
    """Two scopes and a sink, captured once, replayed with other slots and lengths."""
    tokens, heads, widths, scale = 32, 16, (128, 1024), 0.5 if dtype == FP8 else 1.0
    scratch = sparse_scratch(
        max_tokens=tokens, num_heads=heads, widths=widths, q_dtype=dtype, kv_dtype=dtype,
        device="cuda", v_head_dim=latent,
    )  # fmt: skip
    width, softmax_scale = latent + rope, (latent + rope) ** -0.5
    caches = [torch.randn(64, PAGE, width, device="cuda").to(dtype) for _ in widths]
    tables = [torch.zeros(tokens, n, dtype=torch.int32, device="cuda") for n in widths]
    lens = [torch.zeros(tokens, dtype=torch.int32, device="cuda") for _ in widths]
    q = torch.randn(tokens, heads, width, device="cuda").to(dtype)
    # As large as the sum over a thousand keys, or it would not show.
    sink, half = 6 + torch.randn(heads, device="cuda"), torch.full((1,), 0.5, device="cuda")
    out = torch.empty(tokens, heads, latent, device="cuda", dtype=BF16)

    def step(i: int) -> None:
        if i == 0:
            scratch.refresh(tokens, lens)
        scopes = [Scope(c, t) for c, t in zip(caches, tables, strict=True)]
        sparse_mla_decode(
            q, scopes, scratch, softmax_scale=softmax_scale, sink=sink, q_scale=half, kv_scale=half,
            out=out,
        )  # fmt: skip

    graph, worst = capture_calls(step, 1), 0.0
    for _ in range(5):
        for table, length in zip(tables, lens, strict=True):
            table.copy_(torch.randint(-2000, 64 * PAGE, table.shape).clamp(min=-1))
            length.copy_(torch.randint(0, table.shape[1] + 1, (tokens,)))
        lens[0][0] = lens[1][0] = 0
        out.fill_(torch.nan)
        graph.replay()
        for t in range(tokens):
            slots = [table[t, : int(n[t])] for table, n in zip(tables, lens, strict=True)]
            keys = torch.cat(
                [
                    c.view(-1, width)[s[s >= 0].long()].double()
                    for c, s in zip(caches, slots, strict=True)
                ]
            )
            scores = softmax_scale * scale * scale * q[t].double() @ keys.T
            total = torch.logaddexp(scores.logsumexp(-1), sink.double())
            want = (scores - total[:, None]).exp() @ keys[:, :latent] * scale
            apart = distance(out[t], want)
            worst = max(worst, math.inf if math.isnan(apart) else apart)
    times = interleave({"sparse": capture_calls(lambda i: step(1), 8)}, 8, 9)["sparse"]
    print(f"sparse, {dtype}, 32 tokens, 128 + 1024 slots at most: error {worst:.1e}, "
          f"{quantiles(times)[1]:.1f} us", flush=True)  # fmt: skip
    assert worst <= TOLERANCE


def main() -> None:
    """Replay, then measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=DEFAULTS["rounds"])
    parser.add_argument("--heads", type=int, nargs="+", default=DEFAULTS["heads"])
    parser.add_argument("--latent", type=int, default=DEFAULTS["latent"], help="kv_lora_rank")
    parser.add_argument("--rope", type=int, default=DEFAULTS["rope"], help="qk_rope_head_dim")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    heads, widths = " ".join(map(str, options.heads)), (options.latent, options.rope)
    command = (
        f"benchmarks/attention.py --rounds {options.rounds} --heads {heads} "
        f"--latent {options.latent} --rope {options.rope}"
    )
    facts = {**environment(options.commit), "command": command}
    torch.manual_seed(0)
    print(facts, measure_ceilings(), flush=True)
    for dtype in (BF16, FP8):
        replayed(dtype, *widths)
        replayed_sparse(dtype, *widths)
    work = [(Case(4, 100_000, 16, FP8, latent=options.latent, rope=options.rope), CAPPED)]
    if widths != (512, 64):
        shapes = argparse.Namespace(**{**DEFAULTS, **vars(options)})
        work += [
            (case, {"ours": ours, **PROGRAMS}) for case in bench_decode.grid(shapes, TYPES.values())
        ]
    rows = bench_decode.table(options.csv, facts, work, options.rounds)
    bench_decode.summary(rows)
    raise SystemExit(not all(row["error"] <= TOLERANCE for row in rows))


if __name__ == "__main__":
    main()
