#!/usr/bin/env python3
"""The epilogue of a decode against separate launches, on this GPU: a table, and rows in a CSV file.

    python benchmarks/epilogue.py --csv benchmarks/results/epilogue.csv

Separate are the reduction, torch.bmm and, where the result is fp8, a quantization: vLLM's op, or
this library's where vLLM is missing. A candidate is a CUDA graph of calls with distinct W_UV, so
that L2 does not hold what an engine would have to fetch; graphs take turns. "back": calls follow
each other. "behind": each follows a decode, less the same graph of the decode alone. Results are
checked against the reference in the same run. A shape of the kernel is named rows x columns x
slices x pieces x warps.

    python benchmarks/epilogue.py --tune --csv benchmarks/results/epilogue.csv

times other shapes of the kernel too, minutes of an H200, and prints rows for `MEASURED` in
mla_fusion/attention/triton_epilogue.py: for each number of tokens and heads the shape whose mean
gain over pieces and places is the largest, of those that are never slower.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from mla_fusion.attention import PersistentDecodePlan, epilogue_kernel, reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention import triton_epilogue as epilogues
from mla_fusion.attention.epilogue import GROUP, Epilogue
from mla_fusion.attention.triton_epilogue import Shape
from mla_fusion.attention.validate import Inputs
from mla_fusion.cli.bench import environment
from mla_fusion.cli.bench_region import capture_calls, interleave, quantiles
from mla_fusion.cli.compare import steps

try:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
except ImportError:
    ops = None

FACTS = ["gpu", "driver", "torch", "triton", "vllm", "commit", "command"]
KEY = ["tokens", "heads", "pieces", "values", "quantization", "place"]
RESULT = [*KEY, "candidate", "chosen", "p20_us", "p50_us", "p80_us", "worst_step"]
FP8, BF16, PAGE, LATENT, ROPE = torch.float8_e4m3fn, torch.bfloat16, 64, 512, 64
WEIGHTS = 2**27  # bytes of W_UV that a graph walks over, at most: more than the L2 cache
PROGRAMS = 32, 528  # fewest and most of a launch that is worth a measurement
MOST_PIECES = 256  # of a step: about what two workers on each multiprocessor make
Step = Callable[[Inputs], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens of sequences of one token each, H heads, S pieces of each sequence, V columns."""

    tokens: int
    heads: int
    pieces: int
    values: int
    quantization: str


def make(case: Case, calls: int = 64) -> list[Inputs]:
    """Up to so many calls that differ in W_UV, behind one plan."""
    tokens, heads, fold = case.tokens, case.heads, -(-case.heads // 64)
    # With half as many workers again as pieces, the planner gives each two blocks: one piece.
    plan = PersistentDecodePlan.allocate(
        max_batch=tokens, max_query_len=1, num_heads=heads, q_dtype=FP8, kv_dtype=FP8,
        device="cpu", v_head_dim=LATENT, workers=-(-3 * tokens * fold * case.pieces // 2),
        kv_granularity=PAGE, overhead=1, planner="portable",
    )  # fmt: skip
    blocks, width, columns = 2 * case.pieces, LATENT + ROPE, heads * case.values
    # Planned on the host: every such plan would compile another planner.
    with torch.device("cpu"):
        lens, rows = torch.full((tokens,), PAGE * blocks).int(), torch.arange(tokens + 1).int()
        plan.refresh(qo_indptr=rows, seq_lens=lens, num_tokens=tokens, max_query_len=1)
    for name, tensor in plan.tensors().items():
        setattr(plan, name, tensor.cuda())
    table = torch.arange(tokens * blocks).int().view(tokens, blocks)
    cache = torch.randn(tokens * blocks, PAGE, width, dtype=BF16).to(FP8)
    q = torch.randn(tokens, heads, width, dtype=BF16).to(FP8)
    latents, half = torch.empty(tokens, heads, LATENT, dtype=BF16), torch.full((1,), 0.5)
    out = torch.empty(tokens, columns, dtype=BF16 if case.quantization == "none" else FP8)
    scales = {"tensor": half, "group": torch.empty(columns // GROUP, tokens).T}
    made = []
    for _ in range(min(calls, max(8, WEIGHTS // (2 * columns * LATENT)))):
        # As vLLM has it: dense in L.
        w_uv = torch.randn(heads, case.values, LATENT, dtype=BF16) / LATENT**0.5
        epilogue = Epilogue(w_uv.transpose(1, 2), out, scales.get(case.quantization))
        scale = width**-0.5
        made.append(Inputs(q, cache, plan, table, scale, half, half, latents, None, epilogue))
    return made


def separate(given: Inputs) -> object:
    """Reduction, product and quantization."""
    epilogue = given.epilogue
    provider.merge(given)
    if epilogue.scale is None or ops is None:
        return epilogues.multiply(given)
    product = torch.empty_like(epilogue.out, dtype=BF16)
    epilogues.multiply(dataclasses.replace(given, epilogue=Epilogue(epilogue.w_uv, product)))
    if epilogue.quantization == "tensor":
        return ops.scaled_fp8_quant(product, epilogue.scale, output=epilogue.out)
    options = {"column_major_scales": True, "out_q": epilogue.out, "use_ue8m0": False}
    _, scale = per_token_group_quant_fp8(product, GROUP, **options)
    # Only where the result is checked.
    return None if torch.cuda.is_current_stream_capturing() else epilogue.scale.copy_(scale)


def name_of(shape: Shape | None) -> str:
    """Of the candidate with this shape."""
    return "x".join(map(str, dataclasses.astuple(shape))) if shape else "separate"


def shaped(rows: int, columns: int, slices: int, warps: int, pieces: int = 16) -> Shape:
    """With as many pieces at once as 32 registers of a thread hold, up to `pieces`."""
    registers = 32 * 32 * warps // (rows * min(LATENT // slices, 2**15 // columns))
    return Shape(rows, columns, slices, max(1, min(pieces, registers)), warps)


def programs(case: Case, shape: Shape) -> int:
    """Of a launch."""
    blocks = -(-case.tokens // shape.rows) * case.values // shape.columns
    return blocks * shape.slices * case.heads


def filling(case: Case) -> Shape:
    """All rows and columns in a program, and slices until there are programs for the GPU."""
    rows, columns = min(16, triton.next_power_of_2(case.tokens)), min(GROUP, case.values)
    shapes = [shaped(rows, columns, slices, 8 if rows > 4 else 4) for slices in (1, 2, 4, 8)]
    return next((shape for shape in shapes if programs(case, shape) >= 128), shapes[-1])


def tuned(case: Case) -> set[Shape]:
    """Shapes that may be the best: rows are in one or two programs, columns in one, or in several
    where there is one row and no slice."""
    most, widest = min(16, triton.next_power_of_2(case.tokens)), min(GROUP, case.values)
    every = itertools.product((1, 2, 4, 8, 16), (32, 64, 128), (1, 2, 4, 8), (4, 8), (16, 64))
    shapes = {
        shaped(rows, columns, slices, warps, pieces)
        for rows, columns, slices, warps, pieces in every
        if most <= 2 * rows <= 2 * most and (columns == widest or rows * slices == 1)
    }
    least, greatest = PROGRAMS
    return {shape for shape in shapes if least <= programs(case, shape) <= greatest}


def shapes_of(case: Case, tune: bool) -> set[Shape]:
    """Shapes of one launch to measure, also where separate ones are chosen."""
    chosen = epilogues.choose(case.tokens, case.heads, LATENT, case.values, case.quantization)
    shapes = {filling(case), *(tuned(case) if tune else ())} | ({chosen} if chosen else set())
    facts = case.tokens, LATENT, case.values, case.quantization
    return {shape for shape in shapes if not shape.unsuited(*facts)}


def candidates(case: Case, tune: bool) -> dict[str, Step]:
    """Who computes what follows the decode."""
    found: dict[str, Step] = {"separate": separate}
    for shape in shapes_of(case, tune):
        found[name_of(shape)] = lambda given, shape=shape: epilogues.launch(given, shape)
    return found


def compile_all(cases: list[Case], tune: bool) -> None:
    """Compile what `cases` launch, on all cores: one after another takes longer than measuring."""
    needed: dict[Case, set[Shape]] = {}
    for case in cases:
        # Tokens and pieces are not compiled in.
        one = dataclasses.replace(case, tokens=1, pieces=1)
        needed.setdefault(one, set()).update(shapes_of(case, tune))
    with (
        ThreadPoolExecutor() as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for case, shapes in needed.items():
            given = make(case, calls=1)[0]
            for shape in shapes:
                args, constants = epilogues.arguments(given, shape)
                epilogue_kernel.epilogue_kernel.warmup(*args, grid=(1,), **constants)


def worst_step(given: Inputs, step: Step) -> int:
    """Largest distance of the result from the reference's; the decode has run."""
    epilogue = given.epilogue
    epilogue.out.view(torch.uint8).fill_(0x7F)
    step(given)
    got = epilogue.out.clone()
    step(given)
    again = epilogue.out.view(torch.uint8)
    assert torch.equal(got.view(torch.uint8), again), "two launches differ"
    scale = None if epilogue.scale is None else epilogue.scale.clone()
    provider.merge(given)
    reference.finish(given.out, epilogue)
    # A latent may round to its neighbour, so the last bits of results and scales may differ, and
    # more of a result where its sum cancels.
    if epilogue.quantization == "group":
        ratio = float((scale / epilogue.scale).log2().abs().max())
        assert ratio < 0.02, f"scales are off by a factor of {2**ratio}"
    exact = epilogue.out.float()
    return int(steps(got, epilogue.out)[exact.abs() > 0.5 * exact.std()].max())


def measure(case: Case, tune: bool, rounds: int) -> list[dict]:
    """Rows of one case."""
    calls, graphs, errors = make(case), {}, {}
    provider.decode(calls[0])
    calls[0].plan.fresh = False
    pieces = calls[0].plan.reduce_indptr.diff().max().item()
    for name, step in candidates(case, tune).items():
        try:
            errors[name] = worst_step(calls[0], step)
            graphs["back", name] = capture_calls(lambda i, step=step: step(calls[i]), len(calls))
            both = lambda i, step=step: (provider.decode(calls[i]), step(calls[i]))  # noqa: E731
            graphs["behind", name] = capture_calls(both, len(calls))
        except (RuntimeError, AttributeError, AssertionError, TritonError) as problem:
            print(f"{name} left out: {type(problem).__name__} {str(problem)[:200]}")
    graphs["alone", ""] = capture_calls(lambda i: provider.decode(calls[i]), len(calls))
    times = interleave(graphs, len(calls), rounds)
    assert not calls[0].plan.epilogue_counts.any(), "a slice was counted and never collected"
    alone, rows = quantiles(times.pop(("alone", "")))[1], []
    chosen = name_of(
        epilogues.choose(case.tokens, case.heads, LATENT, case.values, case.quantization)
    )
    for (place, name), samples in times.items():
        less = alone if place == "behind" else 0.0
        p20, p50, p80 = (round(x - less, 3) for x in quantiles(samples))
        row = dataclasses.asdict(case) | {"pieces": pieces, "place": place, "candidate": name}
        row |= {"chosen": int(name == chosen), "worst_step": errors[name]}
        rows.append(row | {"p20_us": p20, "p50_us": p50, "p80_us": p80})
    return rows


def show(rows: list[dict]) -> None:
    """The five fastest of a case, what `choose` says with a star, wrong results with a mark."""
    for place in ("back", "behind"):
        here = sorted((r for r in rows if r["place"] == place), key=lambda r: r["p50_us"])
        found = [
            f"{r['candidate']}{'*' * r['chosen']} {r['p50_us']:.2f} ({r['p20_us']:.2f}-"
            f"{r['p80_us']:.2f}){'!' * (r['worst_step'] > 1)}"
            for r in here[:5]
        ]
        case = "T={tokens} H={heads} S={pieces} {quantization}".format(**rows[0])
        print(f"{case} {place}: {' | '.join(found)}", flush=True)


def summary(rows: list[dict]) -> None:
    """Where what `choose` says loses, and by how much the best would win."""
    table: dict = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        table.setdefault(key, {})[row["candidate"]] = row["p50_us"], row["chosen"]
    gains = []
    for key, found in table.items():
        best = min(found, key=lambda name: found[name][0])
        ours = next((time for time, chosen in found.values() if chosen), float("nan"))
        gains.append(found["separate"][0] / ours)
        if found[best][0] < 0.97 * ours:
            print(f"{key}: chosen {ours:.2f}, {best} {found[best][0]:.2f}")
    mean = statistics.geometric_mean(gains)
    print(f"chosen against separate: geometric mean {mean:.2f}, least {min(gains):.2f}")
    print(f"wrong rows: {[row for row in rows if row['worst_step'] > 1]}")


def advise(rows: list[dict]) -> None:
    """Rows of `MEASURED`: of shapes that never lose, the one with the largest mean gain."""
    times: dict = {}
    for row in rows:
        if row["worst_step"] > 1 and row["candidate"] != "separate":
            continue
        facts = row["tokens"], row["heads"], row["quantization"] == "group"
        place = row["pieces"], row["place"], row["quantization"]
        times.setdefault(facts, {}).setdefault(place, {})[row["candidate"]] = row["p50_us"]
    for (tokens, heads, group), places in sorted(times.items()):
        names = set.intersection(*map(set, places.values())) - {"separate"}
        gains = {
            name: [found["separate"] / found[name] for found in places.values()] for name in names
        }
        means = {n: statistics.geometric_mean(each) for n, each in gains.items() if min(each) >= 1}
        if means and means[best := max(means, key=means.__getitem__)] >= 1.2:
            shape = ", ".join(best.split("x"))
            found = " ".join(f"{t[best]:.2f}/{t['separate']:.2f}" for t in places.values())
            print(
                f"    Faster({tokens}, {heads}, {group}, Shape({shape})),"
                f"  # {means[best]:.2f}, least {min(gains[best]):.2f}: {found}"
            )


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--rounds", type=int, help="9, or 5 with --tune")
    parser.add_argument("--quick", action="store_true", help="a few shapes")
    parser.add_argument("--tune", action="store_true", help="other shapes of the kernel too")
    parser.add_argument("--tokens", type=int, nargs="+", help="1 to 128, or to 16 with --tune")
    parser.add_argument("--heads", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    parser.add_argument("--pieces", type=int, nargs="+", help="1, 4, 16, 32; --tune: 1, 16, 128")
    parser.add_argument("--values", type=int, default=128)
    parser.add_argument("--quantization", nargs="+", default=("none", "group"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after these")
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.heads, options.pieces = (1, 8, 32), (16, 128), (1, 16)
    tune = options.tune
    options.rounds = options.rounds or (5 if tune else 9)
    options.tokens = options.tokens or [2**n for n in range(5 if tune else 8)]
    options.pieces = options.pieces or ((1, 16, 128) if tune else (1, 4, 16, 32))
    grid = (options.tokens, options.heads, options.pieces, [options.values], options.quantization)
    start, known = time.monotonic(), environment(options.commit)
    facts = {name: known[name] for name in FACTS if name in known}
    facts["command"] = " ".join(["benchmarks/epilogue.py", *sys.argv[1:]])
    print(facts, flush=True)
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    every = itertools.starmap(Case, itertools.product(*grid))
    least = [dataclasses.replace(c, pieces=min(c.pieces, MOST_PIECES // c.tokens)) for c in every]
    cases = list(dict.fromkeys(least))
    compile_all(cases, tune)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict] = []
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    with options.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, FACTS + RESULT)
        writer.writeheader()
        for case in cases:
            if time.monotonic() - start > options.seconds:
                break
            rows += (new := measure(case, tune, options.rounds))
            writer.writerows(facts | row for row in new)
            file.flush()
            show(new)
            torch.cuda.empty_cache()
    summary(rows)
    if tune:
        advise(rows)
    print(f"{len(rows)} rows after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
