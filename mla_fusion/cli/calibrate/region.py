"""Measures the launch plans of the fused region: for each number of tokens a first round measures
tile shapes, a second one varies the rest of the best plan. A plan whose output does not agree with
the reference is never chosen."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mla_fusion import gpu
from mla_fusion.cli.selftest.kernels import run_checks
from mla_fusion.kernels import dispatch
from mla_fusion.kernels import triton as provider
from mla_fusion.kernels.ahead import on_meta
from mla_fusion.kernels.arithmetic import next_power_of_two
from mla_fusion.kernels.card import TRITON
from mla_fusion.kernels.dispatch import Plan, Widths
from mla_fusion.kernels.inputs import Inputs
from mla_fusion.measure import region_cases, timing
from mla_fusion.measure.records import text
from mla_fusion.measure.region_cases import Region
from mla_fusion.runtime import measured, measured_here

# Measured tokens -> most tokens of a batch that the plan serves.
TOKENS = {1: 1, 8: 16, 32: 32, 64: 64, 128: 128, 256: 256, 512: 512}
EQUAL, STEPS = 0.999, 1  # least share of equal elements, and most steps, of a plan that counts
LAYERS, ROUNDS = 61, 9
Shape = tuple[bool, Widths, int]  # whether the query is fp8, and heads
Found = tuple[Plan, tuple[float, int], dict[str, float]]  # with agreement and times


def tiles(tokens: int, heads: int, latent: int) -> Iterator[Plan]:
    """First round: product tiles for batches of `tokens`, and a few hundred rest programs."""
    rope_rows = min(128, next_power_of_two(max(16, tokens * heads // 256)))
    cache_tokens = min(8, next_power_of_two(max(1, tokens // 64)))
    rest: dict[str, Any] = {"rope_rows": rope_rows, "cache_tokens": cache_tokens}
    if tokens == 1:
        for block_n, warps in itertools.product((32, 64, 128), (2, 4, 8)):
            yield Plan(block_m=1, block_n=block_n, num_warps=warps, **rest)
    many = (64, 128), (64, 128, 256)
    heights, widths = {
        1: ((16,), (32, 64)), 8: ((16,), (32, 64, 128)), 32: ((16, 32), (32, 64, 128)),
        64: ((32, 64), (64, 128)),
    }.get(tokens, many)  # fmt: skip
    every = itertools.product(heights, widths, (1, 2, 4, 8), (4, 8))
    for block_m, block_n, m_tiles, warps in every:
        programs = heads * -(-latent // block_n) * -(-tokens // (block_m * m_tiles))
        if block_m * (m_tiles - 1) >= tokens or not (64 if m_tiles > 1 else 1) <= programs <= 4096:
            continue
        least, most = (512, 16384) if warps == 4 else (2048, 2**15)
        if least <= block_m * block_n <= most:
            yield Plan(block_m=block_m, block_n=block_n, m_tiles=m_tiles, num_warps=warps, **rest)


def variations(best: Plan, tokens: int) -> Iterator[Plan]:
    """Second round: all but the product's tile, around the `best` one."""
    rests: list[dict[str, int]] = [{}]
    if tokens >= 32:
        rests += [
            {"rope_rows": min(256, 2 * best.rope_rows)},
            {"rope_rows": max(16, best.rope_rows // 2)},
            {"rope_rows": min(256, 2 * best.rope_rows), "num_warps": 12 - best.num_warps},
            {"cache_tokens": 2 * best.cache_tokens},
        ]
    for rest, last in itertools.product(rests, (False, True)):
        yield dataclasses.replace(best, **rest, rest_last=last)


def of_layer(layer: Mapping[str, Any], fp8: bool) -> Shape:
    """The shape of a rank's layer, by its config."""
    widths = Widths(*(layer[field] for field in region_cases.FIELDS.values()))
    return fp8, widths, layer["num_attention_heads"]


def every() -> list[Shape]:
    """Every shape that was measured on some GPU."""
    return [*dict.fromkeys((row.fp8, row.widths, row.heads) for row in dispatch.measured())]


def calibrate(shapes: Iterable[Shape], facts: Mapping[str, str], folder: Path) -> int:
    """Measure, and write the file that `measured_here.load` reads; 1 if a result was wrong."""
    path = folder / measured_here.file_name(measured_here.REGION, facts["gpu"])
    mine = [shape for shape in shapes if serves(shape)]
    kinds = sorted({"fp8" if fp8 else "bf16" for fp8, *_ in mine})
    if any(row.verdict == "WRONG" for row in run_checks([f"{TRITON.row} {k}" for k in kinds])):
        print("no launch plan is measured; open an issue with `mla-fusion selftest --json FILE`")
        return 1
    for shape in mine:
        if not (plans := tune(*shape)):
            print("WRONG results of all plans: nothing is written for the fused region")
            return 1
        store(path, facts["gpu"], shape, plans)
        print(f"Launch plans of the fused region: {path}.")
    return 0


def serves(shape: Shape) -> bool:
    """True if the kernel takes such a layer here; else a line says why not."""
    cache = gpu.fp8_type() if shape[0] else torch.bfloat16
    why = TRITON.why_not(shape[1], cache, gpu.of("cuda"))
    if why:
        print(f"no launch plan is measured: {why.explain()}")
    return why is None


def tune(fp8: bool, widths: Widths, heads: int) -> dict[int, Plan]:
    """The fastest plan of a shape by its limit of tokens; empty if some batch has no right one."""
    torch.manual_seed(0)
    weights = region_cases.make_weights(heads, LAYERS, widths)
    cases = [region_cases.timed(tokens, heads, fp8, widths) for tokens in TOKENS]
    regions = [region_cases.make_region(case, weights) for case in cases]
    asked = [[*tiles(case.tokens, heads, widths.latent)] for case in cases]
    for second in (False, True):
        timing.compile_all([*itertools.chain.from_iterable(map(works_of, regions, asked))])
        for n, (case, region) in enumerate(zip(cases, regions, strict=True)):
            if not (found := right(measure(region, asked[n]))):
                return {}
            best, _, times = found[0]
            asked[n] = [best] if second else [*dict.fromkeys(variations(best, case.tokens))]
            if second:
                print(f"{heads} heads, T={case.tokens:3d}: {times['p50_us']:.2f} us, {best}")
    return dict(zip(TOKENS.values(), (best for [best] in asked), strict=True))


def works_of(region: Region, plans: Iterable[Plan]) -> list[functools.partial[Any]]:
    """A launch for each plan. Its tensors are on the meta device, in the shapes of a region's first
    layer."""
    inputs = Inputs(*map(on_meta, region.calls[0]))
    return [functools.partial(provider.fused_mla_decode_prep, inputs, plan) for plan in plans]


def measure(region: Region, plans: Iterable[Plan]) -> list[Found]:
    """Agreement with the reference, and times of a layer, of each plan that runs."""

    def build(plan: Plan) -> tuple[timing.Call, tuple[float, int]]:
        layer = functools.partial(provider.fused_mla_decode_prep, plan=plan)
        return lambda i: layer(region.calls[i]), region_cases.agreement(region, layer)

    return timing.compare(plans, build, len(region.calls), ROUNDS)


def right(found: Iterable[Found]) -> list[Found]:
    """The plans whose result agrees with the reference, the fastest first."""
    agree = (each for each in found if each[1][0] >= EQUAL and each[1][1] <= STEPS)
    return sorted(agree, key=lambda each: each[2]["p50_us"])


def store(path: Path, name: str, shape: Shape, plans: Mapping[int, Plan]) -> None:
    """Write a GPU's file: the plans of a shape, after those that it has for other ones."""
    fp8, widths, heads = shape
    key = ["fp8" if fp8 else "activation", *widths, heads]
    old = measured_here.read(measured_here.REGION, path, name).get("plans", [])
    kept = [row for row in old if row[:5] != key]
    new = [[*key, limit, *dataclasses.astuple(plan)] for limit, plan in plans.items()]
    facts = {"gpu": name, "arch": gpu.of("cuda").arch, "kernels": measured.kernels()}
    table = facts | {"plans": kept + new}
    path.write_text(text(table))
