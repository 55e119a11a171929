"""`mla-fusion bench region`: the fused region against what else can compute it."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping

import torch

from mla_fusion.cli.bench import kit, region_cases, region_peers
from mla_fusion.cli.bench.kit import TIMES, Ceilings, Row, pick, quantiles
from mla_fusion.cli.bench.region_cases import Region
from mla_fusion.kernels.dispatch import Widths

EQUAL, STEPS = 0.995, 1  # least share of equal elements, and most steps, of a result that counts
# "query" is the type of query and cache, "equal" the share of elements that equal the reference
# ("" for a part of the work), "own_rounding" the share that equals what the candidate's own
# roundings give, if they are known.
SHAPE = ["query", *Widths._fields, "tokens", "heads", "candidate"]
CHECK = ["equal", "worst_step", "own_rounding"]
COLUMNS = ["flashinfer", *SHAPE, *TIMES, "floor_us", "gbps", *CHECK, "plan"]
DEFAULTS = {
    "tokens": (1, 8, 32, 64, 128, 256, 512), "heads": (8, 16, 32, 64, 128),
    **region_cases.DEEPSEEK._asdict(), "layers": 61, "rounds": 15, "bf16": False,
}  # fmt: skip


def counts(row: Row) -> bool:
    """Whether the correctness check of a row allows its time to count.

    Equal to the specification in nearly all elements, and no element more than a step off. A peer
    that rounds the rotated half twice is many steps off where the sum cancels; it counts if every
    element is what its own roundings give.
    """
    if row["equal"] == "":
        return True
    near = row["worst_step"] <= STEPS or row["own_rounding"] == 1.0
    return bool(row["equal"] >= EQUAL and near)


def run(settings: argparse.Namespace, facts: Mapping[str, str], ceilings: Ceilings) -> bool:
    """Measure the region; whether ours passed every check."""
    names = pick(settings.peers, region_peers.PEERS)
    widths = Widths(*(getattr(settings, name) for name in Widths._fields))

    def work() -> Iterator[Region]:
        for heads in settings.heads:
            weights = region_cases.make_weights(heads, settings.layers, widths)
            for tokens in settings.tokens:
                case = region_cases.timed(tokens, heads, not settings.bf16, widths)
                yield region_cases.make_region(case, weights)

    def rows(region: Region) -> list[Row]:
        return measure(region, names, settings.rounds, ceilings)

    found = kit.table(settings.csv, facts, COLUMNS, work(), rows)
    print(f"microseconds per layer; ! marks a failed check. Rows: {settings.csv}")
    return all(counts(row) for row in found if row["candidate"].endswith("triton"))


def measure(region: Region, names: list[str], rounds: int, ceilings: Ceilings) -> list[Row]:
    """The rows of one shape, and a line."""

    def prepare(name: str) -> tuple[torch.cuda.CUDAGraph, Row, object]:
        layer = region_peers.PEERS[name](region)
        check: Row = dict.fromkeys(CHECK, "")
        if name not in region_peers.NOT_A_RESULT:
            check["equal"], check["worst_step"] = region_cases.agreement(region, layer)
        if own := region_peers.OWN_ROUNDING.get(name):
            check["own_rounding"] = region_cases.agreement(region, layer, own(region))[0]
        graph = kit.capture_calls(lambda i: layer(region.calls[i]), len(region.calls))
        graph.replay()
        torch.cuda.synchronize()
        return graph, check, layer  # a graph does not keep its candidate's workspaces alive

    case, found, floor = region.case, [], ceilings.floor_us(region.case)
    plan = str(dataclasses.asdict(region_peers.chosen_plan(region)))
    shape = {"query": "fp8" if case.fp8 else "bf16", **case.widths._asdict()}
    shape |= {"tokens": case.tokens, "heads": case.heads, "floor_us": round(floor, 3)}
    for name, check, samples in kit.compare(names, prepare, len(region.calls), rounds):
        times = {quantile: round(us, 3) for quantile, us in quantiles(samples).items()}
        row = {**shape, "candidate": name, **times, **check}
        row["gbps"] = round(case.bytes() / times["p50_us"] / 1e3)
        found.append(row | {"plan": plan if name == "triton" else ""})
    shown = (f"{r['candidate']} {r['p50_us']:.2f}{'' if counts(r) else '!'}" for r in found)
    print(f"T={case.tokens:4d} H={case.heads:4d} floor {floor:6.2f} |", " | ".join(shown))
    return found
