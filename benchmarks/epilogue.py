#!/usr/bin/env python3
"""The work behind a decode, by this library and by vLLM, on this GPU: a table, and a CSV file.

    python benchmarks/epilogue.py --tokens 1 4 --heads 16

This library runs the reduction and, on Hopper where that was not slower, one kernel for product and
quantization. vLLM runs the same reduction, torch.bmm and, if the result is fp8, its quantization.
Calls have distinct W_UV, so that L2 does not hold what an engine would have to fetch. Rows named
"back" time calls behind each other; rows named "behind" time each call behind a decode, and
subtract the time of the decode alone."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mla_fusion.attention import PersistentDecodePlan, reference
from mla_fusion.attention import triton as provider
from mla_fusion.attention.plan.epilogue import GROUP
from mla_fusion.attention.plan.inputs import Inputs
from mla_fusion.cli import positive
from mla_fusion.measure import distances, records
from mla_fusion.measure.records import Row
from mla_fusion.measure.timing import TIMES, capture_calls, interleave

Step = Callable[[Inputs], None]
KEY = ["tokens", "heads", "pieces", "values", "quantization", "place"]
RESULT = [*KEY, "candidate", *TIMES, "worst_step"]
FP8, BF16, PAGE, LATENT, ROPE = torch.float8_e4m3fn, torch.bfloat16, 64, 512, 64
WEIGHTS = 2**27  # bytes of W_UV that a graph walks over, at most: more than the L2 cache
MOST_CALLS = 64  # of a graph
QUANTIZATIONS = "none", "tensor", "group"
MOST_PIECES = 256  # of a step: about what two CTAs on each SM make
OURS, VLLM = "ours", "vllm"
WRONG = 1 << 20  # steps of a result that is wrong as a whole
SIZES = {"tokens": (1, 2, 4, 8, 32, 128), "heads": (8, 16, 32, 128), "splits": (1, 16, 128)}


@dataclasses.dataclass(frozen=True)
class Case:
    """T tokens of sequences of one token each, H heads, S splits of each sequence, V columns."""

    tokens: int
    heads: int
    pieces: int
    values: int
    quantization: str


def main(arguments: list[str] | None = None) -> int:
    """Measure the cases; 0 if every result passed its check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, nargs="+", default=default)
    parser.add_argument("--rounds", type=positive, default=9, help="samples of each, in turns")
    parser.add_argument("--csv", type=Path, default=Path("build/bench/epilogue.csv"))
    parser.add_argument("--commit", default="", help="commit, where git does not know it")
    settings = parser.parse_args(arguments)
    torch.manual_seed(0)
    sizes = settings.tokens, settings.heads, settings.splits
    # No more splits than a step has.
    cases = dict.fromkeys(
        Case(tokens, heads, min(splits, MOST_PIECES // tokens), GROUP, quantization)
        for tokens, heads, splits, quantization in itertools.product(*sizes, QUANTIZATIONS)
    )
    rows = functools.partial(measure, rounds=settings.rounds)
    facts = records.environment(settings.commit, "benchmarks/epilogue.py")
    wrong = summary(records.table(settings.csv, facts, RESULT, cases, rows))
    print(f"microseconds per call; ! marks a failed check. Rows: {settings.csv}")
    return int(bool(wrong))


def make(case: Case) -> list[Inputs]:
    """Calls that differ in W_UV, behind one plan."""
    tokens, heads, fold = case.tokens, case.heads, -(-case.heads // 64)
    blocks, device = 2 * case.pieces, "cuda"
    # On the host no planner is compiled. With 1.5 CTAs a split, each split has two blocks.
    plan = PersistentDecodePlan.allocate(
        max_batch=tokens, max_query_len=1, num_heads=heads, q_dtype=FP8, kv_dtype=FP8,
        device="cpu", v_head_dim=LATENT, ctas=-(-3 * tokens * fold * case.pieces // 2),
        kv_granularity=PAGE, overhead=1,
    )  # fmt: skip
    lens, rows = torch.full((tokens,), PAGE * blocks).int(), torch.arange(tokens + 1).int()
    plan.refresh(qo_indptr=rows, seq_lens=lens, num_tokens=tokens, max_query_len=1)
    for name, tensor in plan.tensors().items():
        setattr(plan, name, tensor.cuda())
    pages = torch.arange(tokens * blocks, device=device).int().view(tokens, blocks)
    cache = torch.randn(tokens * blocks, PAGE, LATENT + ROPE, device=device).to(FP8)
    q = torch.randn(tokens, heads, LATENT + ROPE, device=device).to(FP8)
    latents = torch.empty(tokens, heads, LATENT, device=device, dtype=BF16)
    scale = torch.full((1,), 0.5, device=device)
    every = q, cache, plan, pages, q.shape[2] ** -0.5, scale, scale, latents, None
    weights = heads * LATENT * case.values * BF16.itemsize
    count = min(MOST_CALLS, max(8, WEIGHTS // weights))
    w_uv = [distances.make_w_uv(heads, LATENT, case.values) for _ in range(count)]
    epilogue = distances.make_epilogue(w_uv[0], tokens, case.quantization)
    return [Inputs(*every, dataclasses.replace(epilogue, w_uv=each)) for each in w_uv]


def ours(given: Inputs) -> None:
    """Reduction, product and quantization."""
    provider.follow(given)


def vllm(given: Inputs) -> None:
    """The same reduction, torch.bmm and vLLM's quantization."""
    epilogue = given.epilogue
    assert epilogue is not None
    provider.merge(given)
    heads, _, values = epilogue.w_uv.shape
    product = epilogue.out
    if epilogue.scale is not None:
        product = torch.empty_like(product, dtype=BF16)
    target = product.view(-1, heads, values).transpose(0, 1)
    torch.bmm(given.out.transpose(0, 1), epilogue.w_uv, out=target)
    if epilogue.scale is None:
        return
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    if epilogue.quantization == "tensor":
        ops.scaled_fp8_quant(product, epilogue.scale, output=epilogue.out)
        return
    options = {"column_major_scales": True, "out_q": epilogue.out, "use_ue8m0": False}
    _, scale = per_token_group_quant_fp8(product, GROUP, **options)
    if not torch.cuda.is_current_stream_capturing():  # where the result is checked
        epilogue.scale.copy_(scale)


CANDIDATES: dict[str, Step] = {OURS: ours, VLLM: vllm}


def worst_step(given: Inputs, step: Step) -> int:
    """Largest distance of the result from the reference's; the decode has run."""
    epilogue = given.epilogue
    assert epilogue is not None
    epilogue.out.view(torch.uint8).fill_(0x7F)
    step(given)
    got = epilogue.out.clone()
    step(given)
    if not torch.equal(got.view(torch.uint8), epilogue.out.view(torch.uint8)):
        print("WRONG: two launches differ")
        return WRONG
    scale = None if epilogue.scale is None else epilogue.scale.clone()
    provider.merge(given)
    reference.finish(given.out, epilogue)
    # A latent may round to its neighbour, so the last bits of results and scales may differ, and
    # more of a result where its sum cancels.
    if scale is not None and epilogue.scale is not None and epilogue.quantization == "group":
        ratio = float((scale / epilogue.scale).log2().abs().max())
        if not ratio < 0.02:
            print(f"WRONG: scales are off by a factor of {2**ratio}")
            return WRONG
    exact = epilogue.out.float()
    return int(distances.steps(got, epilogue.out)[exact.abs() > 0.5 * exact.std()].max())


def measure(case: Case, rounds: int) -> list[Row]:
    """Rows of one case, and a line for each place."""
    calls = make(case)
    provider.decode(calls[0])
    calls[0].plan.fresh = False

    def captured(*every: Step) -> torch.cuda.CUDAGraph:
        return capture_calls(lambda i: [step(calls[i]) for step in every], len(calls))

    errors = {name: worst_step(calls[0], step) for name, step in CANDIDATES.items()}
    graphs = {("back", name): captured(step) for name, step in CANDIDATES.items()}
    graphs |= {("behind", n): captured(provider.decode, step) for n, step in CANDIDATES.items()}
    alone = "alone", ""
    times = interleave({alone: captured(provider.decode), **graphs}, len(calls), rounds)
    less = {"back": 0.0, "behind": times.pop(alone)["p50_us"]}
    known = dataclasses.asdict(case) | {"pieces": int(calls[0].plan.reduce_indptr.diff().max())}
    rows: list[Row] = [
        known | {"place": place, "candidate": name, "worst_step": errors[name]}
        | {quantile: us - less[place] for quantile, us in us_of.items()}
        for (place, name), us_of in times.items()
    ]  # fmt: skip
    show(rows)
    return rows


def show(rows: list[Row]) -> None:
    """A line for each place of a case; ! marks a wrong result."""
    for place, here in itertools.groupby(rows, lambda row: row["place"]):
        found = [
            f"{r['candidate']} {r['p50_us']:.2f} ({r['p20_us']:.2f}-{r['p80_us']:.2f})"
            f"{'!' * (r['worst_step'] > 1)}"
            for r in here
        ]
        case = "T={tokens} H={heads} S={pieces} {quantization}".format(**rows[0])
        print(f"{case} {place}: {' | '.join(found)}", flush=True)


def summary(rows: list[Row]) -> list[Row]:
    """Print the mean of vLLM's times over ours, and where ours takes longer; the wrong rows."""
    gains = []
    for key, us in records.medians(rows, KEY).items():
        gains.append(us[VLLM] / us[OURS])
        if gains[-1] < 0.97:
            print(f"{key}: ours {us[OURS]:.2f}, vllm {us[VLLM]:.2f}")
    mean = statistics.geometric_mean(gains)
    print(f"vllm over ours: geometric mean {mean:.2f}, least {min(gains):.2f}")
    wrong = [row for row in rows if row["worst_step"] > 1]
    print(f"wrong rows: {wrong}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
