#!/usr/bin/env python3
"""Sparse decode against vLLM's kernels on this GPU: a table, and a CSV file.

    python benchmarks/sparse.py --csv benchmarks/results/sparse.csv

Each shape is checked against `reference.sparse_mla_decode` on the dequantized entries in the same
run; the candidates then take turns, each a CUDA graph of calls on distinct caches and lists of
slots. Plans and FlashMLA's metadata are made before, once a step. FlashMLA takes 64 or 128 heads:
its calls pad the query, as vLLM's backend does in every layer.

Over `fp8_ds_mla` FlashMLA is called with all tokens as one sequence, as vLLM does with fewer than
32 heads, and with a sequence for each token, as vLLM does with more. Over bf16 the others are its
kernel for prefill and FlashAttention 3 with pages of one entry, as FLASHMLA_SPARSE and
FLASH_ATTN_MLA_SPARSE call them. The column `vllm_default` marks vLLM's choice, `share` is `gbps`
of the rate of a copy. Without vLLM its kernels are left out, with a line.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mla_fusion.attention import reference
from mla_fusion.attention.layouts import FP8_DS_MLA, WIDE, CacheLayout
from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_decode import FACTS, write
from mla_fusion.cli.bench_decode_peers import BF16, FP8, PAGE, ROTATED, Call
from mla_fusion.cli.bench_region import capture_calls, interleave, measure_ceilings, quantiles
from mla_fusion.cli.compare import distance

LATENT, WIDTH = FP8_DS_MLA.latent, FP8_DS_MLA.width
SCALE = WIDTH**-0.5
TOLERANCE = 1e-2  # FlashMLA rounds the keys to bf16, the reference does not
CHECKED = 8  # tokens
LAYOUTS = {"fp8_ds_mla": FP8_DS_MLA, "bf16": None}
CASE = ["tokens", "heads", "topk", "context", "cache"]
TIMES = ["p20_us", "p50_us", "p80_us", "gbps", "share", "tflops", "error"]
RESULT = ["candidate", "vllm_default", *TIMES]


@dataclasses.dataclass(frozen=True)
class Case:
    """`topk` random slots of each token, among its own `context` entries of the cache."""

    tokens: int
    heads: int
    topk: int
    context: int
    cache: str

    @property
    def layout(self) -> CacheLayout | None:
        """Of the cache's bytes."""
        return LAYOUTS[self.cache]

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache's values."""
        return BF16 if self.layout is None else FP8

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return 2 * WIDTH if self.layout is None else self.layout.bytes

    def bytes(self) -> int:
        """Fewest bytes: the listed entries, their slots, queries and outputs once."""
        rows = self.tokens * self.heads * (WIDTH + LATENT) * 2
        return self.tokens * self.topk * (self.entry + 4) + rows

    def flops(self) -> int:
        """Operations of both products, without padding."""
        return 2 * self.tokens * self.heads * self.topk * (WIDTH + LATENT)


@dataclasses.dataclass
class Inputs:
    """Query [T, H, L + R], and for each call of a graph a cache and slots [T, topk]."""

    case: Case
    q: torch.Tensor
    caches: list[torch.Tensor]
    slots: list[torch.Tensor]


def entries(count: int) -> torch.Tensor:
    """Random entries uint8 [count, 656]: values, a scale for each 128 of them, rotated values."""
    values = torch.randn(count, LATENT // FP8_DS_MLA.group, FP8_DS_MLA.group, device="cuda")
    scales = values.abs().amax(-1, keepdim=True) / 448
    codes = (values / scales).to(FP8).flatten(1)
    rotated = torch.randn(count, WIDE, device="cuda").to(BF16)
    parts = (codes, scales.flatten(1), rotated)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def make_cache(case: Case) -> torch.Tensor:
    """Random pages for all tokens."""
    size = case.tokens * case.context
    if case.layout is None:
        return torch.randn(size, WIDTH, device="cuda", dtype=BF16).view(-1, PAGE, WIDTH)
    parts = [entries(min(65536, size - n)) for n in range(0, size, 65536)]
    return torch.cat(parts).view(-1, PAGE, case.entry)


def make(case: Case) -> Inputs:
    """Random inputs; a token lists no slot twice."""
    size = case.tokens * case.context
    caches, slots = [], []
    for _ in range(max(2, min(128, ROTATED // (size * case.entry)))):
        caches.append(make_cache(case))
        first = torch.arange(case.tokens, device="cuda")[:, None] * case.context
        order = torch.rand(case.tokens, case.context, device="cuda").argsort(1)
        slots.append((first + order[:, : case.topk]).int())
    q = torch.randn(case.tokens, case.heads, WIDTH, device="cuda").to(BF16)
    return Inputs(case, q, caches, slots)


def ours(inputs: Inputs) -> tuple[Call, torch.Tensor]:
    """This library."""
    case = inputs.case
    scratch = sparse_scratch(
        max_tokens=case.tokens, num_heads=case.heads, widths=(case.topk,), q_dtype=BF16,
        kv_dtype=case.dtype, device="cuda",
    )  # fmt: skip
    scratch.refresh(case.tokens, [None])
    out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)

    def call(i: int) -> None:
        scope = Scope(inputs.caches[i], inputs.slots[i], case.layout)
        sparse_mla_decode(inputs.q, [scope], scratch, softmax_scale=SCALE, out=out)

    return call, out


def padded_heads(case: Case) -> int:
    """Query heads that FlashMLA has a kernel for."""
    return 64 if case.heads <= 64 else 128


def flashmla(inputs: Inputs, together: bool) -> tuple[Call, torch.Tensor]:
    """FlashMLA sparse, padded; the tokens as one sequence if `together`."""
    from vllm.v1.attention.ops import flashmla as ops

    case = inputs.case
    padded = padded_heads(case)
    sequences, rows = (1, case.tokens) if together else (case.tokens, 1)
    lens = torch.full((sequences,), case.context, dtype=torch.int32, device="cuda")
    table = torch.zeros(sequences, 1, dtype=torch.int32, device="cuda")
    schedule = ops.get_mla_metadata()[0]  # filled by the first call
    out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)

    def call(i: int) -> None:
        q = inputs.q.view(sequences, rows, case.heads, WIDTH)
        if case.heads < padded:
            wide = q.new_zeros(sequences, rows, padded, WIDTH)
            wide[:, :, : case.heads] = q
            q = wide
        result, _ = ops.flash_mla_with_kvcache(
            q=q,
            k_cache=inputs.caches[i].unsqueeze(-2),
            block_table=table,
            head_dim_v=LATENT,
            cache_seqlens=lens,
            tile_scheduler_metadata=schedule,
            is_fp8_kvcache=True,
            indices=inputs.slots[i].view(sequences, rows, case.topk),
            softmax_scale=SCALE,
        )
        if i < 0:
            out.copy_(result[:, :, : case.heads].flatten(0, 1))

    return call, out


def flashmla_bf16(inputs: Inputs) -> tuple[Call, torch.Tensor]:
    """FlashMLA's sparse prefill, padded, as vLLM's FLASHMLA_SPARSE calls it in decode too."""
    from vllm.v1.attention.ops import flashmla as ops

    case = inputs.case
    padded = padded_heads(case)
    counts = torch.full((case.tokens,), case.topk, dtype=torch.int32, device="cuda")
    out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)

    def call(i: int) -> None:
        q = inputs.q
        if case.heads < padded:
            q = q.new_empty(case.tokens, padded, WIDTH)
            q[:, : case.heads] = inputs.q
        slots = inputs.slots[i].unsqueeze(1)
        keys = inputs.caches[i].view(-1, 1, WIDTH)
        result = ops.flash_mla_sparse_fwd(q, keys, slots, SCALE, topk_length=counts)[0]
        if i < 0:
            out.copy_(result[:, : case.heads])

    return call, out


def fa3(inputs: Inputs) -> tuple[Call, torch.Tensor]:
    """FlashAttention 3 with pages of one entry, as vLLM's FLASH_ATTN_MLA_SPARSE calls it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    case = inputs.case
    starts = torch.arange(case.tokens + 1, dtype=torch.int32, device="cuda")
    counts = torch.full((case.tokens,), case.topk, dtype=torch.int32, device="cuda")
    latent, rope = (part.contiguous() for part in inputs.q.split([LATENT, WIDE], dim=-1))
    out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)

    def call(i: int) -> None:
        keys = inputs.caches[i].view(-1, 1, 1, WIDTH)
        result = flash_attn_varlen_func(
            q=rope,
            q_v=latent,
            k=keys[..., LATENT:],
            v=keys[..., :LATENT],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=case.topk,
            seqused_k=counts,
            block_table=inputs.slots[i],
            softmax_scale=SCALE,
            causal=True,
            fa_version=3,
        )
        if i < 0:
            out.copy_(result)

    return call, out


CANDIDATES: dict[str, dict[str, Callable[[Inputs], tuple[Call, torch.Tensor]]]] = {
    "fp8_ds_mla": {
        "ours": ours,
        "flashmla": lambda inputs: flashmla(inputs, True),
        "flashmla, by token": lambda inputs: flashmla(inputs, False),
    },
    "bf16": {"ours": ours, "flashmla": flashmla_bf16, "fa3": fa3},
}


def vllm_default(case: Case) -> str:
    """The candidate that vLLM calls, on Hopper."""
    if case.layout is None:
        return "fa3"
    return "flashmla" if case.heads < 32 else "flashmla, by token"


def error(inputs: Inputs, out: torch.Tensor) -> float:
    """Relative distance of a few tokens' outputs on the last cache; NaN stays NaN."""
    tokens = torch.linspace(0, len(out) - 1, min(CHECKED, len(out)), device="cuda").long()
    scope = Scope(inputs.caches[-1], inputs.slots[-1][tokens], inputs.case.layout)
    want, _ = reference.sparse_mla_decode(
        inputs.q[tokens],
        [scope],
        [None],
        latent=LATENT,
        softmax_scale=SCALE,
        kv_dtype=inputs.case.dtype,
    )
    return distance(out[tokens], want)


def measure(case: Case, rounds: int, copy_gbps: float) -> list[dict]:
    """Rows of one case; copy_gbps: the rate of a copy."""
    inputs, graphs, errors, kept = make(case), {}, {}, []
    for name, build in CANDIDATES[case.cache].items():
        try:
            call, out = build(inputs)
            out.fill_(torch.nan)
            call(-1)  # the last cache, and the sign for vLLM's kernels to keep their result
            errors[name] = error(inputs, out)
            graphs[name] = capture_calls(call, len(inputs.caches))
            kept.append((call, out))
        except (ImportError, RuntimeError, AttributeError, ValueError, TypeError) as problem:
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:300]}")
    default, rows = vllm_default(case), []
    for name, samples in interleave(graphs, len(inputs.caches), rounds).items():
        p20, p50, p80 = quantiles(samples)
        row = dataclasses.asdict(case) | {"candidate": name, "vllm_default": int(name == default)}
        row |= {"p20_us": p20, "p50_us": p50, "p80_us": p80, "error": errors[name]}
        row |= {"gbps": case.bytes() / p50 / 1e3, "tflops": case.flops() / p50 / 1e6}
        rows.append(row | {"share": row["gbps"] / copy_gbps})
    return rows


def summary(rows: list[dict]) -> None:
    """Geometric means against the fastest call of vLLM's kernels, and what is wrong."""
    table: dict = {}
    for row in rows:
        who = "ours" if row["candidate"] == "ours" else "vllm"
        times = table.setdefault((row["cache"], row["heads"], row["topk"], row["tokens"]), {})
        times[who] = min(times.get(who, math.inf), row["p50_us"])
    for cache, heads in sorted({key[:2] for key in table}):
        ratios = {k[2:]: t["vllm"] / t["ours"] for k, t in table.items()
                  if k[:2] == (cache, heads) and len(t) == 2}  # fmt: skip
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            slower = {k: round(v, 2) for k, v in ratios.items() if v < 1}
            print(
                f"{cache}, H={heads}: geometric mean {mean:.2f}; slower at (topk, tokens) {slower}"
            )
    print(f"rows that are wrong: {[row for row in rows if not row['error'] <= TOLERANCE]}")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 64, 128))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 4, 16, 64, 128))
    parser.add_argument("--cache", choices=LAYOUTS, nargs="+", default=("fp8_ds_mla",))
    parser.add_argument("--topk", type=int, nargs="+", default=(2048,))
    parser.add_argument("--context", type=int, default=4096, help="entries that a token lists from")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    start, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = " ".join(["benchmarks/sparse.py", *sys.argv[1:]])
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    print(facts, ceilings, flush=True)
    rows = []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + CASE + RESULT)
        writer.writeheader()
        shapes = options.cache, options.topk, options.heads, options.tokens
        for cache, topk, heads, tokens in itertools.product(*shapes):
            if time.monotonic() - start > options.seconds:
                print(f"no time for {heads} heads, {tokens} tokens, {topk} slots")
                continue
            case = Case(tokens, heads, topk, options.context, cache)
            new = measure(case, options.rounds, ceilings.gbps)
            write(writer, facts, new)
            file.flush()
            rows += new
            line = " | ".join(
                f"{r['candidate']} {r['p50_us']:.1f} ({r['gbps']:.0f} GB/s, error {r['error']:.1e})"
                for r in new
            )
            print(f"{cache}, {tokens:4d} tokens, H={heads}, {topk} slots: {line}", flush=True)
            torch.cuda.empty_cache()
    summary(rows)


if __name__ == "__main__":
    main()
