#!/usr/bin/env python3
"""Decode attention against its peers, on this GPU: a table, and rows in a CSV file.

    python benchmarks/attention.py --csv benchmarks/results/attention.csv

Each shape is checked against float64 attention over the dequantized inputs in the same run; the
candidates then take turns, each a CUDA graph of calls on distinct caches, so that the L2 cache does
not hold what an engine would have to fetch. Plans and the peers' metadata are made before: once a
step, not once a layer. Peers whose package is missing are left out, with a printed line. The column
`vllm_default` marks what vLLM chooses on Hopper.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import random
import time
from pathlib import Path

import torch
from attention_cases import (
    BF16,
    CANDIDATES,
    FP8,
    PAGE,
    PROGRAMS,
    TOLERANCE,
    VLLM_DEFAULT,
    Case,
    decode,
    error,
    make,
    make_plan,
    ours,
)

from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_region import capture_calls, interleave, measure_ceilings, quantiles
from mla_fusion.cli.compare import distance

FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]
CASE = ["batch", "context", "ragged", "heads", "dtype", "latent", "rope"]
RESULT = ["candidate", "vllm_default", "p20_us", "p50_us", "p80_us", "gbps", "tflops", "error"]


def measure(case: Case, candidates: dict, rounds: int) -> list[dict]:
    """Rows of one case."""
    inputs = make(case)
    graphs, errors, calls = {}, {}, {}
    for name, build in candidates.items():
        try:
            call, out = build(inputs)
            out.fill_(torch.nan)
            # -1 is the last cache, and the sign for FlashMLA to keep its result.
            inputs.caches.reverse()
            call(-1)
            inputs.caches.reverse()
            errors[name] = error(inputs, out, case.lengths())
            calls[name] = call, out
            graphs[name] = capture_calls(call, len(inputs.caches))
        except (ImportError, RuntimeError, AttributeError, ValueError) as problem:
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:300]}")
    rows = []
    for name, samples in interleave(graphs, len(inputs.caches), rounds).items():
        p20, p50, p80 = quantiles(samples)
        row = {k: getattr(case, k) for k in ("batch", "context", "heads", "latent", "rope")}
        row |= {"ragged": int(case.ragged), "dtype": "fp8" if case.dtype == FP8 else "bf16"}
        default = name == VLLM_DEFAULT[case.dtype] and (case.latent, case.rope) == (512, 64)
        row |= {"candidate": name, "vllm_default": int(default)}
        row |= {"p20_us": p20, "p50_us": p50, "p80_us": p80}
        row |= {"gbps": case.bytes() / p50 / 1e3, "tflops": case.flops() / p50 / 1e6}
        rows.append(row | {"error": errors[name]})
    return rows


def grid(options: argparse.Namespace) -> list[Case]:
    """Every shape, and ragged forms of those that are not all one length by nature."""
    batches, contexts = ((1, 16), (1024, 8192)) if options.quick else ((1, 4, 16, 64, 128), KS)
    shapes = itertools.product((BF16, FP8), options.heads, batches, contexts)
    widths = {"latent": options.latent, "rope": options.rope}
    cases = [Case(b, c, h, dtype, **widths) for dtype, h, b, c in shapes]
    ragged = [dataclasses.replace(case, ragged=True) for case in cases if case.batch in (16, 64)]
    return cases + ragged


KS = (1024, 8192, 65536)


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


def write(writer: csv.DictWriter, facts: dict, rows: list[dict]) -> None:
    """Rows of a shape, in four digits."""
    for row in rows:
        rounded = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        writer.writerow(facts | rounded)


def summary(rows: list[dict]) -> None:
    """Geometric means against each peer, and where a shape of few tokens is slower."""
    table: dict = {}
    for row in rows:
        table.setdefault(tuple(row[k] for k in CASE), {})[row["candidate"]] = row["p50_us"]
    for heads in sorted({row["heads"] for row in rows}):
        for dtype in ("bf16", "fp8"):
            for peer in ("triton_mla", "flashmla", "fa3", *PROGRAMS):
                pairs = {k: t[peer] / t["ours"] for k, t in table.items()
                         if k[3:5] == (heads, dtype) and peer in t and "ours" in t}  # fmt: skip
                if not pairs:
                    continue
                mean = math.exp(sum(map(math.log, pairs.values())) / len(pairs))
                lost = {k[:3]: round(v, 2) for k, v in pairs.items() if v < 1}
                print(
                    f"H={heads} {dtype} vs {peer}: geometric mean {mean:.2f} of {len(pairs)}, "
                    f"least {min(pairs.values()):.2f}; slower at (batch, context, ragged) {lost}"
                )
    wrong = [row for row in rows if row["candidate"] == "ours" and not row["error"] <= TOLERANCE]
    print(f"rows of ours that are wrong: {wrong}")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--heads", type=int, nargs="+", default=(16, 128))
    parser.add_argument("--latent", type=int, default=512, help="kv_lora_rank")
    parser.add_argument("--rope", type=int, default=64, help="qk_rope_head_dim")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    start, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    heads, widths = " ".join(map(str, options.heads)), (options.latent, options.rope)
    facts["command"] = (
        f"benchmarks/attention.py --rounds {options.rounds} --heads {heads} "
        f"--latent {options.latent} --rope {options.rope}"
    )
    torch.manual_seed(0)
    print(facts, measure_ceilings(), flush=True)
    for dtype in (BF16, FP8):
        replayed(dtype, *widths)
        replayed_sparse(dtype, *widths)
    seed = Case(4, 100_000, 16, FP8, latent=options.latent, rope=options.rope)
    capped = {"ours": ours, "ours, 16 splits": lambda inputs: ours(inputs, 16)}
    rows = []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + CASE + RESULT)
        writer.writeheader()
        for case in [seed, *grid(options)]:
            if time.monotonic() - start > options.seconds:
                print(f"no time for {case}")
                continue
            candidates = CANDIDATES[case.dtype] | ({} if widths == (512, 64) else PROGRAMS)
            if case is seed:
                candidates = capped
            new = measure(case, candidates, options.rounds)
            write(writer, facts, new)
            file.flush()
            if case is not seed:
                rows += new
            name = f"{case.batch:4d} x {case.context:6d}{' ragged' if case.ragged else ''}"
            line = " | ".join(
                f"{r['candidate']} {r['p50_us']:.1f} ({r['gbps']:.0f} GB/s, {r['tflops']:.0f} TF)"
                f"{'' if r['error'] <= TOLERANCE else '!'}"
                for r in new
            )
            print(f"{name} H={case.heads} {str(case.dtype)[6:]}: {line}", flush=True)
            torch.cuda.empty_cache()
    summary(rows)


if __name__ == "__main__":
    main()
