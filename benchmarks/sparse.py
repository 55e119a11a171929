#!/usr/bin/env python3
"""Sparse decode over `fp8_ds_mla` caches against FlashMLA, on this GPU: a table, and a CSV file.

    python benchmarks/sparse.py --csv benchmarks/results/sparse.csv

Each shape is checked against `reference.sparse_mla_decode` on the dequantized entries in the same
run; the candidates then take turns, each a CUDA graph of calls on distinct caches and lists of
slots. Plans and FlashMLA's metadata are made before, once a step. FlashMLA takes 64 or 128 heads:
its calls pad the query, as vLLM's backend does in every layer. It is called with all tokens as one
sequence, as vLLM does with fewer than 32 heads, and with a sequence for each token, as vLLM does
with more; the column `vllm_default` marks which. Without vLLM both are left out, with a line.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import sys
import time
from pathlib import Path

import torch
from attention import FACTS, write
from attention_cases import BF16, FP8, PAGE, ROTATED, Call

from mla_fusion.attention import reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.buffers import HOPPER_TILE
from mla_fusion.attention.layouts import FP8_DS_MLA, WIDE
from mla_fusion.attention.sparse import Scope, sparse_mla_decode, sparse_scratch
from mla_fusion.attention.validate import Inputs as Given
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_region import capture_calls, interleave, measure_ceilings, quantiles
from mla_fusion.cli.compare import distance

LATENT, WIDTH = FP8_DS_MLA.latent, FP8_DS_MLA.width
SCALE = WIDTH**-0.5
TOLERANCE = 1e-2  # both kernels round the keys to bf16, the reference does not
CHECKED = 8  # tokens
CASE = ["tokens", "heads", "topk", "context"]
RESULT = ["candidate", "vllm_default", "p20_us", "p50_us", "p80_us", "gbps", "tflops", "error"]


@dataclasses.dataclass(frozen=True)
class Case:
    """`topk` random slots of each token, among its own `context` entries of the cache."""

    tokens: int
    heads: int
    topk: int
    context: int

    def bytes(self) -> int:
        """Fewest bytes: the listed entries, their slots, queries and outputs once."""
        rows = self.tokens * self.heads * (WIDTH + LATENT) * 2
        return self.tokens * self.topk * (FP8_DS_MLA.bytes + 4) + rows

    def flops(self) -> int:
        """Operations of both products, without padding."""
        return 2 * self.tokens * self.heads * self.topk * (WIDTH + LATENT)


@dataclasses.dataclass
class Inputs:
    """Query [T, H, L + R], and for each call of a graph a cache of bytes and slots [T, topk]."""

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


def make(case: Case) -> Inputs:
    """Random inputs; a token lists no slot twice."""
    size = case.tokens * case.context
    caches, slots = [], []
    for _ in range(max(2, min(128, ROTATED // (size * FP8_DS_MLA.bytes)))):
        parts = [entries(min(65536, size - n)) for n in range(0, size, 65536)]
        caches.append(torch.cat(parts).view(-1, PAGE, FP8_DS_MLA.bytes))
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
        kv_dtype=FP8, device="cuda",
    )  # fmt: skip
    scratch.refresh(case.tokens, [None])
    out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)

    def call(i: int) -> None:
        scope = Scope(inputs.caches[i], inputs.slots[i], FP8_DS_MLA)
        sparse_mla_decode(inputs.q, [scope], scratch, softmax_scale=SCALE, out=out)

    return call, out


@dataclasses.dataclass(frozen=True)
class Variant:
    """The kernel for Hopper, compiled and planned in another way than `ours`.

    rows, warps, stages: of its `Config`. programs: workers for each multiprocessor.
    """

    rows: int
    warps: int
    stages: int
    programs: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.warps} warps, {self.stages} stages, x{self.programs}"

    def __call__(self, inputs: Inputs) -> tuple[Call, torch.Tensor]:
        case = inputs.case
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        scratch = sparse_scratch(
            max_tokens=case.tokens, num_heads=case.heads, widths=(case.topk,), q_dtype=BF16,
            kv_dtype=FP8, device="cuda", workers=self.programs * processors,
        )  # fmt: skip
        scratch.refresh(case.tokens, [None])
        out = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)
        config = provider.Config(True, self.rows, HOPPER_TILE, self.warps, self.stages)

        def call(i: int) -> None:
            scope = Scope(inputs.caches[i], inputs.slots[i], FP8_DS_MLA)
            given = Given(
                inputs.q, scope.kv_cache, scratch.plan, scope.table, SCALE, None, None, out, None,
                layout=FP8_DS_MLA,
            )  # fmt: skip
            sparse = provider.Sparse(scope, 0, scratch.first_lens, None)
            provider.launch(given, sparse, config)

        return call, out


# Two programs of 16 rows fit a multiprocessor, of two stages each; of 32 rows one.
VARIANTS = [
    Variant(16, 4, 2, 1), Variant(16, 4, 2, 2), Variant(16, 4, 2, 4), Variant(16, 4, 4, 1),
    Variant(32, 8, 2, 1), Variant(32, 8, 3, 1), Variant(32, 8, 3, 2),
]  # fmt: skip


def flashmla(inputs: Inputs, together: bool) -> tuple[Call, torch.Tensor]:
    """FlashMLA sparse, padded; the tokens as one sequence if `together`."""
    from vllm.v1.attention.ops import flashmla as ops

    case = inputs.case
    padded = 64 if case.heads <= 64 else 128
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


CANDIDATES = {
    "ours": ours,
    "flashmla": lambda inputs: flashmla(inputs, True),
    "flashmla, by token": lambda inputs: flashmla(inputs, False),
}


def error(inputs: Inputs, out: torch.Tensor) -> float:
    """Relative distance of a few tokens' outputs on the last cache; NaN stays NaN."""
    tokens = torch.linspace(0, len(out) - 1, min(CHECKED, len(out)), device="cuda").long()
    scope = Scope(inputs.caches[-1], inputs.slots[-1][tokens], FP8_DS_MLA)
    want, _ = reference.sparse_mla_decode(
        inputs.q[tokens], [scope], [None], latent=LATENT, softmax_scale=SCALE, kv_dtype=FP8
    )
    return distance(out[tokens], want)


def measure(case: Case, rounds: int, variants: bool) -> list[dict]:
    """Rows of one case."""
    inputs, graphs, errors, kept = make(case), {}, {}, []
    named = {str(each): each for each in VARIANTS if each.rows <= max(16, case.heads)}
    for name, build in (CANDIDATES | (named if variants else {})).items():
        try:
            call, out = build(inputs)
            out.fill_(torch.nan)
            call(-1)  # the last cache, and the sign for FlashMLA to keep its result
            errors[name] = error(inputs, out)
            graphs[name] = capture_calls(call, len(inputs.caches))
            kept.append((call, out))
        except (ImportError, RuntimeError, AttributeError, ValueError, TypeError) as problem:
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:300]}")
    default = "flashmla" if case.heads < 32 else "flashmla, by token"
    rows = []
    for name, samples in interleave(graphs, len(inputs.caches), rounds).items():
        p20, p50, p80 = quantiles(samples)
        row = dataclasses.asdict(case) | {"candidate": name, "vllm_default": int(name == default)}
        row |= {"p20_us": p20, "p50_us": p50, "p80_us": p80, "error": errors[name]}
        rows.append(row | {"gbps": case.bytes() / p50 / 1e3, "tflops": case.flops() / p50 / 1e6})
    return rows


def summary(rows: list[dict]) -> None:
    """Geometric means against the faster of FlashMLA's calls, slower (topk, tokens), errors."""
    table: dict = {}
    for row in rows:
        who = row["candidate"].split(",")[0] if "flashmla" in row["candidate"] else row["candidate"]
        times = table.setdefault((row["heads"], row["topk"], row["tokens"]), {})
        times[who] = min(times.get(who, math.inf), row["p50_us"])
    for heads in sorted({key[0] for key in table}):
        shapes = {key[1:]: times for key, times in table.items() if key[0] == heads}
        for who in dict.fromkeys(itertools.chain(*shapes.values())):
            ratios = {key: times["flashmla"] / times[who] for key, times in shapes.items()
                      if who in times and "flashmla" in times}  # fmt: skip
            if ratios and who != "flashmla":
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                slower = {k: round(v, 2) for k, v in ratios.items() if v < 1}
                print(f"H={heads}, {who}: geometric mean {mean:.2f}; slower at {slower}")
    print(f"rows that are wrong: {[row for row in rows if not row['error'] <= TOLERANCE]}")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 64, 128))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 4, 16, 64, 128))
    parser.add_argument("--topk", type=int, nargs="+", default=(2048,))
    parser.add_argument("--context", type=int, default=4096, help="entries that a token lists from")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--variants", action="store_true", help="also other tiles and programs")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    start, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = " ".join(["benchmarks/sparse.py", *sys.argv[1:]])
    torch.manual_seed(0)
    print(facts, measure_ceilings(), flush=True)
    rows = []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + CASE + RESULT)
        writer.writeheader()
        for topk, heads, tokens in itertools.product(options.topk, options.heads, options.tokens):
            if time.monotonic() - start > options.seconds:
                print(f"no time for {heads} heads, {tokens} tokens, {topk} slots")
                continue
            new = measure(
                Case(tokens, heads, topk, options.context), options.rounds, options.variants
            )
            write(writer, facts, new)
            file.flush()
            rows += new
            line = " | ".join(
                f"{r['candidate']} {r['p50_us']:.1f} ({r['gbps']:.0f} GB/s, error {r['error']:.1e})"
                for r in new
            )
            print(f"{tokens:4d} tokens, H={heads}, {topk} slots: {line}", flush=True)
            torch.cuda.empty_cache()
    summary(rows)


if __name__ == "__main__":
    main()
