#!/usr/bin/env python3
"""The epilogue of a decode against separate launches, on this GPU: a table, and rows in a CSV file.

    python benchmarks/epilogue.py --csv benchmarks/results/epilogue.csv

Separate are the reduction, torch.bmm and, where the result is fp8, a quantization: vLLM's op if vLLM
is installed, else this library's. Each candidate is a CUDA graph of as many calls as there are W_UV,
which are distinct, so that L2 does not hold what an engine would have to fetch; graphs take turns.
"back": calls follow each other. "behind": each follows a decode of H heads whose plan has so many
pieces, less the same graph of the decode alone. Results are checked against the reference in the
same run. `--tune` also times other shapes of the kernel, named rows x columns x pieces x warps.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mla_fusion.attention import PersistentDecodePlan, reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.buffers import multiprocessors
from mla_fusion.attention.epilogue import GROUP, Epilogue
from mla_fusion.attention.triton_epilogue import Shape
from mla_fusion.attention.validate import Inputs
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_region import capture_calls, interleave, quantiles
from mla_fusion.cli.compare import steps

FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]
RESULT = ["tokens", "heads", "pieces", "values", "quantization", "place", "candidate", "chosen"]
RESULT += ["p20_us", "p50_us", "p80_us", "worst_step"]
FP8, BF16, PAGE = torch.float8_e4m3fn, torch.bfloat16, 64
LATENT, ROPE = 512, 64
WEIGHTS = 2**28  # bytes of W_UV that a graph walks over, several times the L2 cache
Step = Callable[[Inputs], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens of sequences of one token each, H heads, S pieces of each sequence, V columns."""

    tokens: int
    heads: int
    pieces: int
    values: int
    quantization: str


def make(case: Case) -> list[Inputs]:
    """Calls that differ in W_UV; the plan has about `pieces` pieces for each tile."""
    fold = -(-case.heads // 64)
    workers = 2 * multiprocessors(torch.device("cuda"))
    # A worker has one piece, as nearly as the planner allows: then there are as many as workers.
    workers = min(workers, max(1, case.tokens * fold * case.pieces))
    plan = PersistentDecodePlan.allocate(
        max_batch=case.tokens, max_query_len=1, num_heads=case.heads, q_dtype=FP8, kv_dtype=FP8,
        device="cuda", v_head_dim=LATENT, workers=workers, kv_granularity=64, overhead=1,
        planner="portable",
    )  # fmt: skip
    length = PAGE * max(1, 2 * case.pieces)
    lens = torch.full((case.tokens,), length, dtype=torch.int32, device="cuda")
    rows = torch.arange(case.tokens + 1, dtype=torch.int32, device="cuda")
    plan.refresh(qo_indptr=rows, seq_lens=lens, num_tokens=case.tokens, max_query_len=1)
    blocks = length // PAGE
    table = torch.arange(case.tokens * blocks, dtype=torch.int32, device="cuda")
    table = table.view(case.tokens, blocks)
    width = LATENT + ROPE
    cache = torch.randn(case.tokens * blocks, PAGE, width, device="cuda", dtype=BF16).to(FP8)
    q = torch.randn(case.tokens, case.heads, width, device="cuda", dtype=BF16).to(FP8)
    latents = torch.empty(case.tokens, case.heads, LATENT, device="cuda", dtype=BF16)
    half, columns = torch.full((1,), 0.5, device="cuda"), case.heads * case.values
    stored = BF16 if case.quantization == "none" else FP8
    out, scale = torch.empty(case.tokens, columns, device="cuda", dtype=stored), None
    if case.quantization == "tensor":
        scale = half
    elif case.quantization == "group":
        scale = torch.empty(columns // GROUP, case.tokens, device="cuda").T
    size = 2 * columns * LATENT
    calls = []
    for _ in range(max(8, min(64, WEIGHTS // size))):
        # As vLLM has it: dense in L.
        w_uv = torch.randn(case.heads, case.values, LATENT, device="cuda", dtype=BF16)
        epilogue = Epilogue((w_uv / LATENT**0.5).transpose(1, 2), out, scale)
        calls.append(
            Inputs(q, cache, plan, table, width**-0.5, half, half, latents, None, epilogue)
        )
    return calls


def separate(quantize: Callable[[torch.Tensor, Epilogue], object]) -> Step:
    """Reduction, product and `quantize`."""

    def step(given: Inputs) -> None:
        epilogue = given.epilogue
        provider.merge(given)
        if epilogue.scale is None:
            epilogues.multiply(given)
            return
        product = torch.empty_like(epilogue.out, dtype=BF16)
        plain = dataclasses.replace(epilogue, out=product, scale=None)
        epilogues.multiply(dataclasses.replace(given, epilogue=plain))
        quantize(product, epilogue)

    return step


def vllm_quantize() -> Callable[[torch.Tensor, Epilogue], object]:
    """vLLM's own quantization ops."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def quantize(product: torch.Tensor, epilogue: Epilogue) -> None:
        if epilogue.quantization == "tensor":
            ops.scaled_fp8_quant(product, epilogue.scale, output=epilogue.out)
            return
        _, scale = per_token_group_quant_fp8(
            product, GROUP, column_major_scales=True, out_q=epilogue.out, use_ue8m0=False
        )
        if not torch.cuda.is_current_stream_capturing():
            epilogue.scale.copy_(scale)

    return quantize


def candidates(case: Case, tune: bool) -> dict[str, Step]:
    """Who computes what follows the decode."""
    try:
        found = {"separate": separate(vllm_quantize())}
    except ImportError:
        found = {"separate": separate(epilogues.quantize)}
    group = case.quantization == "group"
    shapes = {epilogues.choose(case.tokens, case.heads, case.values, case.quantization)}
    # What the model of bytes would do where it chooses separate launches, to see that it is right.
    shapes.add(Shape(min(4, case.tokens), 128 if group else 64, 16 // min(4, case.tokens), 8))
    if tune:
        for rows, columns, pieces, warps in itertools.product(
            (1, 2, 4, 8, 16), (128,) if group else (16, 32, 64, 128), (4, 8, 16, 32), (4, 8)
        ):
            fits = rows <= 2 * case.tokens and 8 <= rows * pieces <= 32
            if fits and case.values % columns == 0:
                shapes.add(Shape(rows, columns, pieces // (2 if rows > 8 else 1), warps))
    for shape in shapes - {None}:
        name = "x".join(map(str, dataclasses.astuple(shape)))
        found[name] = lambda given, shape=shape: epilogues.launch(given, shape)
    return found


def worst_step(given: Inputs, step: Step) -> int:
    """Largest distance of the result from the reference's; the decode has run."""
    epilogue = given.epilogue
    epilogue.out.view(torch.uint8).fill_(0x7F)
    step(given)
    got = epilogue.out.clone()
    scale = None if epilogue.scale is None else epilogue.scale.clone()
    provider.merge(given)
    reference.finish(given.out, epilogue)
    # A latent may round to its neighbour, so scales may differ in the last bits of bf16.
    if epilogue.quantization == "group":
        ratio = float((scale / epilogue.scale).log2().abs().max())
        assert ratio < 0.02, f"scales are off by a factor of {2**ratio}"
    exact = epilogue.out.float()
    if epilogue.quantization == "none":
        # Steps of numbers that are not small: where products cancel, all orders are far apart.
        return int(steps(got, epilogue.out)[exact.abs() > 0.1 * exact.std()].max())
    return int(steps(got, epilogue.out).max())


def measure(case: Case, tune: bool, rounds: int) -> list[dict]:
    """Rows of one case."""
    calls, graphs, errors = make(case), {}, {}
    provider.decode(calls[0])
    pieces = calls[0].plan.reduce_indptr.diff().max().item()
    for name, step in candidates(case, tune).items():
        try:
            errors[name] = worst_step(calls[0], step)
            graphs["back", name] = capture_calls(lambda i, step=step: step(calls[i]), len(calls))

            def behind(i: int, step: Step = step) -> None:
                provider.decode(calls[i])
                step(calls[i])

            graphs["behind", name] = capture_calls(behind, len(calls))
        except Exception as problem:
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:200]}")
    graphs["alone", ""] = capture_calls(lambda i: provider.decode(calls[i]), len(calls))
    times = interleave(graphs, len(calls), rounds)
    alone, rows = quantiles(times.pop(("alone", "")))[1], []
    shape = epilogues.choose(case.tokens, case.heads, case.values, case.quantization)
    chosen = "x".join(map(str, dataclasses.astuple(shape))) if shape else "separate"
    for (place, name), samples in times.items():
        less = alone if place == "behind" else 0.0
        p20, p50, p80 = (round(x - less, 3) for x in quantiles(samples))
        row = dataclasses.asdict(case) | {"pieces": pieces, "place": place, "candidate": name}
        row |= {"chosen": int(name == chosen), "worst_step": errors[name]}
        rows.append(row | {"p20_us": p20, "p50_us": p50, "p80_us": p80})
    return rows


def summary(rows: list[dict]) -> None:
    """Where what `choose` says loses, and by how much the best would win."""
    table: dict = {}
    for row in rows:
        key = tuple(row[name] for name in RESULT[:6])
        table.setdefault(key, {})[row["candidate"]] = row["p50_us"], row["chosen"]
    gains = []
    for key, found in table.items():
        best = min(found, key=lambda name: found[name][0])
        ours = next((time for time, chosen in found.values() if chosen), math.nan)
        gains.append(found["separate"][0] / ours)
        if best and found[best][0] < 0.97 * ours:
            print(f"{key}: chosen {ours:.2f}, {best} {found[best][0]:.2f}")
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    print(f"chosen against separate: geometric mean {mean:.2f}, least {min(gains):.2f}")
    print(f"wrong rows: {[row for row in rows if row['worst_step'] > 1]}")


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--tune", action="store_true", help="other shapes of the kernel too")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128))
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    parser.add_argument("--pieces", type=int, nargs="+", default=(1, 4, 16, 32))
    parser.add_argument("--values", type=int, default=128)
    parser.add_argument("--quantization", nargs="+", default=("none", "group"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.heads, options.pieces = (1, 8, 32), (16, 128), (1, 16)
    start, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = f"benchmarks/epilogue.py --rounds {options.rounds} --values {options.values}"
    print(facts, flush=True)
    torch.manual_seed(0)
    rows: list[dict] = []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + RESULT)
        writer.writeheader()
        for tokens, heads, pieces, quantization in itertools.product(
            options.tokens, options.heads, options.pieces, options.quantization
        ):
            case = Case(tokens, heads, pieces, options.values, quantization)
            if time.monotonic() - start > options.seconds:
                print(f"no time for {case}")
                continue
            new = measure(case, options.tune, options.rounds)
            writer.writerows(facts | row for row in new)
            file.flush()
            rows += new
            for place in ("back", "behind"):
                here = sorted((r for r in new if r["place"] == place), key=lambda r: r["p50_us"])
                line = " | ".join(
                    f"{r['candidate']}{'*' if r['chosen'] else ''} {r['p50_us']:.2f}"
                    f" ({r['p20_us']:.2f}-{r['p80_us']:.2f}){'!' * (r['worst_step'] > 1)}"
                    for r in here[:5]
                )
                print(f"T={tokens} H={heads} S={new[0]['pieces']} {quantization} {place}: {line}",
                      flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    summary(rows)


if __name__ == "__main__":
    main()
